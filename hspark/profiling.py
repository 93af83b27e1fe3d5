"""Start-up measurement of what a step costs, by packed size and by context (section 6 of the specification)."""

from __future__ import annotations

import itertools

import torch
from torch.utils._pytree import tree_leaves

from hspark.core import RowState
from hspark.policy import StepCostTable, profile_cost
from hspark.rows import new_rows, packed_sizes
from hspark.sampling import SamplingMode
from hspark.sizing import context_bound
from hspark.step import DecodeStep, Shape, StepFunctions

# Contexts, per row, between which the price of a token of context is measured.
SHORT, LONG = 64, 512


@torch.inference_mode()
def profile_step(
    step: DecodeStep, repeats: int = 3, *, functions: StepFunctions | None = None, rows: RowState | None = None
) -> StepCostTable:
    """Times whole decode steps (drafting, target, verification, commit) of every packed size on made-up rows.

    functions: the step's own, as the engine will call them; compiled ones are warm in all these sizes afterwards. rows:
    the engine's, if these functions may be called on no others; free before and after. Runs before any request: it
    uses the target's buffers. On a CPU, where sizes are not padded, the table is interpolated between the measured
    sizes; elsewhere, and compiled, it is the staircase of the padded sizes.
    """
    target, width = step.target, step.width
    device = target.device
    functions = StepFunctions.of(step) if functions is None else functions
    free = new_rows(target.rows, target.max_length, device)
    rows = new_rows(target.rows, target.max_length, device) if rows is None else rows
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers are not ours to take
    rows.tokens.copy_(torch.randint(0, target.vocab_size, rows.tokens.shape, device=device, generator=generator))
    most = max(1, target.max_length - width - 2)
    short, long = min(SHORT, most), min(LONG, most)
    padded = functions.compiled or device.type != "cpu"

    def run_at(context: int) -> Runner:
        return Runner(step, functions, rows, context, padded)

    with_context = long > short
    if functions.compiled:
        # Sizes and contexts by turns: what has varied once is a symbol in everything that is compiled after it.
        for size, context in itertools.product(packed_sizes(target.rows, width), (short, long)):
            run_at(context)(size)
    sizes = packed_sizes(target.rows, width)
    if not padded:  # between sizes that are not padded every second one will do, and start-up is shorter
        sizes = (*sizes[:-1:2], sizes[-1])
    table = profile_cost(
        run_at(short),
        sizes,
        warmup=2 if functions.compiled else 1,  # a graph is recorded, and replayed once
        repeats=repeats,
        run_with_context=run_at(long) if with_context else None,
        context_tokens=target.rows * (long - short) if with_context else 0,
        interpolate=not padded,
    )
    for used, blank in zip(tree_leaves(rows), tree_leaves(free), strict=True):
        if used is not None:
            used.copy_(blank)
    return table


class Runner:
    """Runs one whole step of a given packed size over rows whose length is `context`."""

    def __init__(self, step: DecodeStep, functions: StepFunctions, rows: RowState, context: int, padded: bool) -> None:
        self.step, self.functions, self.rows, self.context, self.padded = step, functions, rows, context, padded
        self.bound = context_bound(context + step.width + 1, step.target.max_length, padded)
        with torch.inference_mode(False):  # as the engine makes it: to a compiler these are two types
            self.speculate = torch.ones_like(rows.running)

    def __call__(self, size: int) -> None:
        rows, width, count = self.rows, self.step.width, self.rows.length.shape[0]
        running = min(count, size)
        drafts, device = size - running, rows.length.device
        share = torch.arange(count, device=device)
        # Where max_length is short, a row has no room for all of its drafts; padding stands in for the others.
        room = min(width, self.step.target.max_length - self.context - 1)
        kept = torch.where(share < running, drafts // running + (share < drafts % running), 0).clamp(max=room)
        rows.length.fill_(self.context)
        rows.limit.fill_(self.step.target.max_length)
        rows.running.copy_(share < running)
        for drafter in self.step.drafters:
            if hasattr(drafter, "context_limit"):
                drafter.context_limit = self.bound
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        mode = SamplingMode()
        chain = self.functions.propose(rows, self.speculate, torch.zeros((), device=device), mode)
        self.functions.allocate(chain, torch.full((), drafts, device=device))
        # As the engine sizes its steps: all rows and the whole width where shapes have to be few.
        shape = Shape(size, 1 + -(-drafts // running), self.bound, span=(0, running))
        if self.padded:
            shape = Shape(size, 1 + width if drafts else 1, self.bound)
        outcome = self.functions.verify(rows, chain, kept, mode, shape, False)
        if device.type != "cpu":
            outcome.count.cpu()
