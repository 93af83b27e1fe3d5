"""Intervals: bootstrap over prompts, and of a mean over repeated simulations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hspark.lab.intervals import student_point

Array = NDArray[Any]


class Interval(NamedTuple):
    """A value and the ends of its 95% interval; None where there is too little to give one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_one(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def scaled(self, factor: float) -> Interval:
        """Times a number above 0, such as 100 for per cent."""
        ends = (None if end is None else factor * end for end in (self.low, self.high))
        return Interval(factor * self.value, *ends)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Bootstrap:
    """Resampling of groups (prompts) with replacement.

    groups: int64 [M], the group of each unit, 0 .. G-1; the units of a group are drawn together. The same seed gives
    the same draws, so ratios between arms are paired. With fewer than two groups there are no draws, hence no interval.
    """

    def __init__(self, groups: Array, resamples: int = 200, seed: int = 0) -> None:
        self.groups = groups
        count = int(groups.max()) + 1 if len(groups) else 0
        draws: Array = np.zeros((0, count))
        if count > 1 and resamples:
            draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
        self.weights = np.concatenate([np.ones((1, count)), draws])

    def sums(self, values: Array) -> Array:
        """float64 [1 + R]: the sum of values [M], then the sum in each of the R draws."""
        summed = np.bincount(self.groups, weights=values, minlength=self.weights.shape[1])
        return np.asarray(self.weights @ summed)

    def ratio(self, part: Array, whole: Array) -> Array:
        """float64 [1 + R]: sum of part [M] over sum of whole [M]; NaN where the latter is 0."""
        return divided(self.sums(part), self.sums(whole))


def divided(part: Array, whole: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(whole != 0, part / whole, np.nan))


def interval(values: Array) -> Interval:
    """Of values [1 + R] as `Bootstrap` gives them: the first, and the middle 95% of the others."""
    draws = values[1:][~np.isnan(values[1:])]
    if len(draws) < 2:
        return Interval(float(values[0]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(float(values[0]), float(low), float(high))


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent repeats and its Student interval; no interval from fewer than two."""
    data = np.asarray(values, dtype=np.float64)
    count = len(data)
    if count < 2:
        return Interval(float(data.mean()))
    half = student_point(count - 1) * float(data.std(ddof=1)) / count**0.5
    return Interval(float(data.mean()), float(data.mean()) - half, float(data.mean()) + half)
