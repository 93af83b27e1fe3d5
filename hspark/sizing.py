"""How large a step is: budget and price from survivals, static sizes from the budget. All on the host."""

from __future__ import annotations

import logging

from torch import Tensor

from hspark.policy import BudgetDecision, CostModel, SurvivalHistory, choose_budget, evaluate_budget
from hspark.request import Request
from hspark.rows import packed_sizes
from hspark.step import DecodeStep, Shape

logger = logging.getLogger("hspark")

# Contexts are bounded in multiples of this many positions, so that few static shapes occur.
CONTEXT_BUCKET = 64


def context_bound(longest: int, capacity: int, padded: bool) -> int:
    """The bound that serves `longest` positions: a multiple of CONTEXT_BUCKET, or a power of two where shapes have to
    be few, and at most `capacity`."""
    bound = -(-longest // CONTEXT_BUCKET) * CONTEXT_BUCKET
    return min(1 << (bound - 1).bit_length() if padded else bound, capacity)


class Sizing:
    """Decides the sizes of one engine's steps.

    budget: "adaptive", "all", or a number of slots per step. delay: steps between survivals and the step that they
    size. padded: shapes have to be few, as where they are compiled or the host cannot look at the device for free.
    """

    def __init__(self, step: DecodeStep, cost: CostModel, budget: str | int, delay: int, padded: bool) -> None:
        self.cost, self.budget, self.delay, self.padded = cost, budget, delay, padded
        self.rows, self.width, self.capacity = step.target.rows, step.width, step.target.max_length
        self.history = SurvivalHistory(self.rows, self.width, delay)
        self.decision = BudgetDecision(0, 0.0, 0.0, 0.0)
        self._flat_noted = False

    def decide(self, step: int, running: list[Request]) -> None:
        """Budget and price of step number `step`, from survivals that are `delay` steps old."""
        survival = self.history.read(step)
        context = sum(len(r.prompt) + len(r.token_ids) for r in running)
        if self.budget == "adaptive":
            self.decision = choose_budget(survival, len(running), self.cost, context)
            if self.decision.budget and not self.decision.price and not self._flat_noted:
                self._flat_noted = True
                logger.info("a draft slot costs nothing at this size, so every draft is verified: %r", self.cost)
        else:
            slots = self.width * self.rows if self.budget == "all" else int(self.budget)
            self.decision = evaluate_budget(survival, len(running), self.cost, slots, context)

    def context(self, running: list[Request], in_flight: int) -> int:
        """A bound on the positions that a step reads or writes, known without asking the device. in_flight: steps whose
        outcome the host has not seen."""
        longest = max(len(r.prompt) + len(r.token_ids) for r in running) + (self.width + 1) * (in_flight + 1)
        return context_bound(longest, self.capacity, self.padded)

    def shape(self, kept: Tensor, owned: list[int], context: int, *, settled: bool) -> Shape:
        """Static sizes of the verification. Where the host is the device, looking at `kept` costs nothing and saves
        padding; elsewhere, and where shapes are compiled, the budget bounds it and sizes are padded to a few.

        owned: the running rows, ascending. settled: nothing is in flight. Otherwise a row may have reached its limit
        unseen, and have no slot at all.
        """
        running = len(owned)
        if not self.padded:
            size, queries = running + int(kept.sum()), 1 + int(kept.max())
            span = (owned[0], owned[-1] + 1) if settled else (0, self.rows)
            return Shape(size, queries, context, settled and size == queries * (span[1] - span[0]), span)
        slots = min(self.decision.budget, self.width * running)
        size = next(size for size in packed_sizes(self.rows, self.width) if size >= running + slots)
        return Shape(size, 1 + self.width if slots else 1, context)
