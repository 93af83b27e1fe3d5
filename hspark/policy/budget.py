"""Host side of adaptive verification: how many slots to verify, and what a slot is worth (the paper, section 4.3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hspark.policy.cost import CostModel
from hspark.policy.curves import whole


class BudgetDecision(NamedTuple):
    """What one sizing decides.

    budget: b*, slots to verify over the whole batch. price: lambda = G(b*) * p, expected tokens per slot.
    goodput: G(b*) = A(b*) / C(b*), expected tokens per second. expected_tokens: A(b*), over the whole batch.
    """

    budget: int
    price: float
    goodput: float
    expected_tokens: float


def choose_budget(
    survival: Tensor | Any,
    requests: int,
    cost: CostModel,
    context_tokens: float = 0,
    *,
    maximum: int | None = None,
) -> BudgetDecision:
    """The budget with the highest goodput, and the price of a slot at it.

    survival: survivals of all slots of the batch, any shape, tensor or array; entries that are not above 0 (padding,
    NaN) are no slots. requests: B >= 1, running requests; each emits one token beside its drafts.
    cost: seconds of a step. context_tokens: total tokens in the KV cache, for the context term of `cost`.
    maximum: the largest budget allowed, or None.

    A(b) = B + the sum of the b largest survivals; b* = argmax A(b) / C(b) over every b from 0 to the number of slots,
    the smallest b among equals. There is no early stop: the goodput over a staircase of padded sizes has many peaks.
    """
    expected = _expected_tokens(survival, requests)
    if maximum is not None:
        expected = expected[: whole("maximum", maximum, 0) + 1]
    budgets = torch.arange(expected.shape[0])
    seconds = cost.step_cost(requests, budgets, context_tokens)
    goodput = expected / seconds
    best = int(goodput.argmax())
    return _decision(best, float(goodput[best]), float(expected[best]), requests, cost)


def evaluate_budget(
    survival: Tensor | Any, requests: int, cost: CostModel, budget: int, context_tokens: float = 0
) -> BudgetDecision:
    """Goodput and price at a budget that is fixed from outside; arguments as for `choose_budget`.

    The budget is reported as it was given, and only as many slots as exist are counted and paid for.
    """
    budget = whole("budget", budget, 0)
    expected = _expected_tokens(survival, requests)
    used = min(budget, expected.shape[0] - 1)
    seconds = float(cost.step_cost(requests, torch.tensor([used]), context_tokens)[0])
    decision = _decision(used, float(expected[used]) / seconds, float(expected[used]), requests, cost)
    return decision._replace(budget=budget)


def _decision(budget: int, goodput: float, expected: float, requests: int, cost: CostModel) -> BudgetDecision:
    return BudgetDecision(budget, goodput * cost.slot_cost(requests, budget), goodput, expected)


def _expected_tokens(survival: Tensor | Any, requests: int) -> Tensor:
    """A(b) for every b from 0 to the number of slots, float64."""
    slots = torch.as_tensor(survival).detach().reshape(-1).to(device="cpu", dtype=torch.float64)
    slots = slots[slots > 0].sort(descending=True).values
    return whole("requests", requests, 1) + torch.cat([slots.new_zeros(1), slots.cumsum(0)])


class SurvivalHistory:
    """Survivals of the last steps on the host, from which a step is sized `delay` steps later.

    The device runs ahead of the host, so the budget of step t is chosen from survivals that step t - delay produced
    (the paper, section 2 and appendix O; a delay of 2 is the paper's, 0 is for study). Rows change hands meanwhile:
    until a new request's own survivals are old enough, all its slots count as survival 1, never as the previous
    owner's values.
    """

    def __init__(self, rows: int, width: int, delay: int = 2) -> None:
        self.delay = whole("delay", delay, 0)
        self._shape = (whole("rows", rows, 1), whole("width", width, 0))
        self._steps: dict[int, Tensor] = {}
        self._first_step: list[int | None] = [None] * rows

    def claim(self, row: int, step: int) -> None:
        """A new request enters `row`; `step` is the first step that it takes part in."""
        self._first_step[row] = step

    def release(self, row: int) -> None:
        """The request in `row` has ended; the row has no slots until it is claimed again."""
        self._first_step[row] = None

    def push(self, step: int, survival: Tensor) -> None:
        """Stores what `step` produced: float [R, W]. May come late; steps no longer needed are dropped."""
        if tuple(survival.shape) != self._shape:
            raise ValueError(f"survival has shape {tuple(survival.shape)}; use {self._shape} (rows, width)")
        self._steps[step] = survival.detach().to(device="cpu", dtype=torch.float32)
        for old in [known for known in self._steps if known < step - self.delay]:
            del self._steps[old]

    def read(self, step: int) -> Tensor:
        """The survivals from which `step` is sized: float32 [R, W], 0 in rows without a request."""
        source = step - self.delay
        values = torch.zeros(self._shape)
        known = self._steps.get(source)
        for row, first in enumerate(self._first_step):
            if first is None:
                continue
            # A row whose step has not reported yet is as unknown as a new one.
            values[row] = 1.0 if first > source or known is None else known[row]
        return values
