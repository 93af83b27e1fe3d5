"""Sizing and allocation of many independent batches at once: the engine's own definitions, vectorised over replicas.

P replicas, B rows each, W slots a row. Results are those of `choose_budget`, `evaluate_budget` and `allocate`,
replica by replica.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hspark.policy import CostModel, LinearCost, StepCostTable

Floats = NDArray[Any]
Ints = NDArray[np.int64]


class Decisions(NamedTuple):
    """`BudgetDecision` of P replicas: budget int64 [P]; price, goodput, expected_tokens float64 [P]."""

    budget: Ints
    price: Floats
    goodput: Floats
    expected_tokens: Floats

    @staticmethod
    def none(replicas: int) -> Decisions:
        """What an engine has before it has sized anything."""
        zeros = np.zeros(replicas)
        return Decisions(np.zeros(replicas, dtype=np.int64), zeros, zeros, zeros)

    def take(self, replicas: Ints) -> Decisions:
        return Decisions(*(field[replicas] for field in self))


class Costs:
    """A cost model, asked for many replicas. Values are remembered where the context term is known to be a sum."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._summed = type(cost) in (LinearCost, StepCostTable)
        self._curves: dict[tuple[int, int], Floats] = {}
        self._slots: dict[tuple[int, int], float] = {}

    def curve(self, requests: Ints, most: int, context: Floats) -> Floats:
        """C(b) in seconds, float64 [P, most + 1], for b = 0 .. most. requests, context: [P]."""
        if not self._summed:
            budgets = torch.arange(most + 1)
            pairs = zip(requests.tolist(), context.tolist(), strict=True)
            return np.stack([self.cost.step_cost(count, budgets, tokens).numpy() for count, tokens in pairs])
        if (requests == requests[0]).all():
            plain = self._plain(int(requests[0]), most)[None]
        else:
            plain = np.stack([self._plain(count, most) for count in requests.tolist()])
        return plain + self.cost.per_context_token * context[:, None]  # type: ignore[attr-defined]

    def at(self, requests: Ints, budget: Ints, context: Floats, most: int) -> Floats:
        """C(budget[i]) in seconds, float64 [P]; no budget may exceed `most`."""
        if not self._summed:
            triples = zip(requests.tolist(), budget.tolist(), context.tolist(), strict=True)
            return np.array([float(self.cost.step_cost(n, [b], tokens)[0]) for n, b, tokens in triples])
        pairs = zip(requests.tolist(), budget.tolist(), strict=True)
        plain = np.array([self._plain(count, most)[b] for count, b in pairs])
        return plain + self.cost.per_context_token * context  # type: ignore[attr-defined]

    def slot(self, requests: Ints, budget: Ints) -> Floats:
        """p, seconds of one more slot, float64 [P]."""
        values = []
        for key in zip(requests.tolist(), budget.tolist(), strict=True):
            if key not in self._slots:
                self._slots[key] = self.cost.slot_cost(*key)
            values.append(self._slots[key])
        return np.array(values)

    def _plain(self, requests: int, most: int) -> Floats:
        key = (requests, most)
        if key not in self._curves:
            self._curves[key] = self.cost.step_cost(requests, torch.arange(most + 1)).numpy()
        return self._curves[key]


def expected_tokens(survival: Floats, requests: Ints) -> tuple[Floats, Ints]:
    """A(b) for b = 0 .. S, float64 [P, S + 1], and how many of the S slots count (survival above 0), int64 [P].

    survival: float32 [P, B, W], S = B * W, without NaN. Beyond a replica's slots A stays as it is.
    """
    flat = survival.reshape(survival.shape[0], -1)
    ordered = np.sort(flat, axis=1)[:, ::-1].astype(np.float64)
    expected = np.zeros((flat.shape[0], flat.shape[1] + 1))
    np.cumsum(ordered, axis=1, out=expected[:, 1:])
    expected += requests[:, None]
    return expected, (flat > 0).sum(axis=1)


def choose(survival: Floats, requests: Ints, costs: Costs, context: Floats) -> Decisions:
    """`choose_budget` of every replica. survival: float32 [P, B, W]; requests, context: [P]."""
    expected, slots = expected_tokens(survival, requests)
    most = expected.shape[1] - 1
    goodput = expected / costs.curve(requests, most, context)
    if (slots < most).any():
        goodput[np.arange(most + 1) > slots[:, None]] = -np.inf
    budget = goodput.argmax(axis=1)
    return _decided(budget, goodput, expected, requests, costs)


def evaluate(survival: Floats, requests: Ints, costs: Costs, context: Floats, budget: int) -> Decisions:
    """`evaluate_budget` of every replica at one budget."""
    expected, slots = expected_tokens(survival, requests)
    most = expected.shape[1] - 1
    goodput = expected / costs.curve(requests, most, context)
    used = np.minimum(budget, slots)
    return _decided(used, goodput, expected, requests, costs)._replace(budget=np.full_like(used, budget))


def _decided(budget: Ints, goodput: Floats, expected: Floats, requests: Ints, costs: Costs) -> Decisions:
    replica = np.arange(budget.shape[0])
    best = goodput[replica, budget]
    return Decisions(budget, best * costs.slot(requests, budget), best, expected[replica, budget])


def allocate_counts(survival: Floats, length: Ints, budget: Ints) -> Ints:
    """`allocate` of every replica: slots that each row keeps, int64 [P, B].

    survival: float32 [P, B, W], without NaN, non-increasing along a row. length: int64 [P, B]. budget: int64 [P].
    """
    replicas, rows, width = survival.shape
    if not width:
        return np.zeros_like(length)
    inside = np.arange(width) < length[:, :, None]
    score = np.where(inside, survival, np.float32(-1.0))
    available = length.sum(axis=1)
    wanted = np.clip(budget, 0, available)
    ordered = np.sort(score.reshape(replicas, -1), axis=1)
    # The lowest survival that is kept; where nothing is, none is above it.
    level = ordered[np.arange(replicas), np.minimum(rows * width - wanted, rows * width - 1)]
    level = np.where(wanted > 0, level, np.float32(np.inf))[:, None, None]
    kept = (score > level).sum(axis=2)
    ties = (score == level) & inside
    spare = wanted - kept.sum(axis=1)
    at_level = ties.sum(axis=2)
    plenty = at_level.sum(axis=1) > spare
    kept += np.where(plenty[:, None], 0, at_level)
    if plenty.any():  # the earlier slot wins, then the lower row
        by_slot = ties[plenty].transpose(0, 2, 1).reshape(int(plenty.sum()), -1)
        won = by_slot & (by_slot.cumsum(axis=1) <= spare[plenty, None])
        kept[plenty] += won.reshape(-1, width, rows).sum(axis=1)
    return kept
