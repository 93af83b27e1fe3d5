"""Chi-square tests with a known false-alarm rate and a computable miss rate, without further dependencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square(counts: Tensor, probs: Tensor, smallest: float = 5.0) -> float:
    """p-value of counts [...] against the law probs [...]: how often a right sampler looks at least this bad.

    The full support takes part. Cells expected to hold fewer than `smallest` counts are pooled into one; where even
    the pool holds fewer, its count is judged by its Poisson tail. A single count where the law is 0 gives 0.0.
    """
    if counts.shape != probs.shape:
        raise ValueError(f"counts has shape {tuple(counts.shape)}; use that of probs, {tuple(probs.shape)}")
    counts, probs = counts.double().reshape(-1), probs.double().reshape(-1)
    if bool((counts[probs <= 0] > 0).any()):
        return 0.0
    expected = probs * counts.sum()
    rare = expected < smallest
    found, due = float(counts[rare].sum()), float(expected[rare].sum())
    observed, wanted = counts[~rare], expected[~rare]
    tail = 1.0
    if due >= smallest:
        observed = torch.cat([observed, observed.new_tensor([found])])
        wanted = torch.cat([wanted, wanted.new_tensor([due])])
    elif found > 0:
        tail = float(torch.special.gammainc(torch.tensor(found).double(), torch.tensor(due).double()))
    if wanted.shape[0] < 2:
        return tail
    wanted = wanted * (observed.sum() / wanted.sum())
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    p_value = _upper_tail(statistic, wanted.shape[0] - 1)
    return p_value if due >= smallest or due == 0 else min(1.0, 2 * min(p_value, tail))


def miss_rate(distance: float, samples: int, cells: int, false_alarm: float) -> float:
    """How often `chi_square` with threshold `false_alarm` passes a law at this total variation from the right one.

    An upper bound for `cells` cells, reached by two equal ones: for a total variation D, the chi-square distance is at
    least 4 D^2, so the statistic is noncentral with at least 4 D^2 * samples (Poisson mixture of central tails).
    Differences among cells that `chi_square` pools do not count: D is what pooling leaves of them.
    """
    freedom = cells - 1
    low, high = 0.0, 10.0 * (freedom + 100.0)
    for _ in range(100):  # the threshold, by bisection
        middle = (low + high) / 2
        low, high = (middle, high) if _upper_tail(middle, freedom) > false_alarm else (low, middle)
    half = 2.0 * distance**2 * samples
    weights = [
        math.exp(j * math.log(half) - half - math.lgamma(j + 1)) if half > 0 else float(j == 0)
        for j in range(int(half * 2) + 200)
    ]
    return min(1.0, sum(w * (1.0 - _upper_tail(high, freedom + 2 * j)) for j, w in enumerate(weights) if w > 1e-18))


def _upper_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees of freedom >= statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
