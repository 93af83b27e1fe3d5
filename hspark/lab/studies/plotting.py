"""Series from intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hspark.lab.studies.statistics import Interval
from hspark.lab.study import Series


def interval_series(name: str, x: Sequence[Any], values: Sequence[Interval]) -> Series:
    """A curve or set of bars with its intervals; without them where one is missing."""
    y = [each.value for each in values]
    low = [each.low for each in values if each.low is not None]
    high = [each.high for each in values if each.high is not None]
    if len(low) != len(y) or len(high) != len(y):
        return Series(name, list(x), y)
    return Series(name, list(x), y, low, high)
