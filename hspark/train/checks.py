"""Checks of settings, with one wording: the name, the value, and what would do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """ValueError unless `value` is an int (no bool) from `low` to `high`, both included; None: no upper bound."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        accepted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r}; use an integer {accepted}")


def check_number(name: str, value: Any, fits: Callable[[float], bool], accepted: str) -> None:
    """ValueError unless `value` is a finite int or float (no bool) with fits(value); `accepted` describes those."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max or not fits(value):
        raise ValueError(f"{name}={value!r}; use {accepted}")


def check_flag(name: str, value: Any) -> None:
    """ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; use True or False")
