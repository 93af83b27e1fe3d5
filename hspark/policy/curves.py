"""Checked tables {whole number: seconds}, and the ways of reading between their entries."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def seconds(name: str, value: Any, *, positive: bool) -> float:
    """`value` as seconds: finite, above 0 or (positive=False) at least 0. ValueError that names it otherwise."""
    accepted = "a finite number of seconds above 0" if positive else "a finite number of seconds of at least 0"
    number = as_float(value)
    if number is None or number < 0 or (positive and number == 0):
        raise ValueError(f"{name}={value!r} is not usable; use {accepted}")
    return number


def as_float(value: Any) -> float | None:
    """A finite real number, of Python or of an array, as a float; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value`, an integer of Python or of an array, as an int from `low` to `high` (None: without an end). ValueError
    that names it otherwise."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        bound = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name}={value!r} is not usable; use {bound}")
    return number


def entries(name: str, value: float | Mapping[int, float], *, positive: bool) -> dict[int, float]:
    """A number (one entry at 1) or a mapping {whole number of at least 1: seconds}, checked and sorted."""
    if not isinstance(value, Mapping):
        return {1: seconds(name, value, positive=positive)}
    if not value:
        raise ValueError(f"{name} is empty; use at least one entry")
    checked = {
        whole(f"{name} key", key, 1): seconds(f"{name}[{key!r}]", value[key], positive=positive) for key in value
    }
    return dict(sorted(checked.items()))


def listed(table: Mapping[int, float]) -> list[list[float]]:
    """The JSON form of a table: JSON objects would turn the whole numbers into strings."""
    return [[key, value] for key, value in table.items()]


def unlisted(name: str, value: Any) -> dict[int, float]:
    """The table written by `listed`."""
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    if not pairs:
        raise ValueError(f"{name}={value!r} is not a table; use a list of [whole number, seconds] pairs")
    table = {whole(f"{name} key", key, 1): value for key, value in value}
    if len(table) < len(value):
        raise ValueError(f"{name}={value!r} gives several values for one whole number; use one pair for each")
    return table


def held(table: Mapping[int, float], at: int) -> float:
    """The table read at a whole number: straight lines between entries, the nearest entry beyond the ends."""
    keys = list(table)
    upper = bisect_left(keys, at)
    if upper == 0 or upper == len(keys):
        return table[keys[min(upper, len(keys) - 1)]]
    low, high = keys[upper - 1], keys[upper]
    share = (at - low) / (high - low)
    return table[low] * (1 - share) + table[high] * share


def curve(table: Mapping[int, float], at: Tensor) -> Tensor:
    """The table read at float64 [n]: straight lines between entries; below the first entry that one holds, and beyond
    the last one the last slope goes on, unless it falls: no step is cheaper than what was measured at an end.
    """
    keys = torch.tensor(list(table), dtype=torch.float64)
    values = torch.tensor(list(table.values()), dtype=torch.float64)
    if len(table) == 1:
        return values.expand_as(at).clone()
    segment = torch.searchsorted(keys, at, right=True).clamp(1, len(table) - 1)
    low, high = keys[segment - 1], keys[segment]
    share = ((at - low) / (high - low)).clamp(min=0.0)
    # In this form the entries themselves come out exactly.
    line = values[segment - 1] * (1 - share) + values[segment] * share
    return torch.where(at > keys[-1], line.clamp(min=float(values[-1])), line)


def slope(table: Mapping[int, float], at: int) -> float:
    """Seconds per unit around `at`: the secant from the nearest smaller entry to the nearest larger one.

    Beyond the ends, the first or last secant; 0 for a table of one entry, and never negative.
    """
    keys = list(table)
    if len(keys) == 1:
        return 0.0
    low = min(max(bisect_left(keys, at) - 1, 0), len(keys) - 2)
    high = max(min(bisect_right(keys, at), len(keys) - 1), 1)
    return max(0.0, (table[keys[high]] - table[keys[low]]) / (keys[high] - keys[low]))
