"""Checks of settings, with one wording: the name, the value, and what would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hspark.policy.curves import as_float


def check_number(name: str, value: Any, fits: Callable[[float], bool], accepted: str) -> None:
    """ValueError unless `value` is a finite real number (no bool) with fits(value); `accepted` describes those."""
    number = as_float(value)
    if number is None or not fits(number):
        raise ValueError(f"{name}={value!r}; use {accepted}")


def check_flag(name: str, value: Any) -> None:
    """ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; use True or False")
