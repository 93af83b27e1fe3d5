"""Start-up measurement of what a step costs, by packed size and by context (section 6 of the specification)."""

from __future__ import annotations

import torch

from hspark.core import Chain, RowState
from hspark.policy import StepCostTable, profile_cost
from hspark.rows import new_rows, packed_sizes
from hspark.sampling import SamplingMode
from hspark.step import DecodeStep, Shape

# Contexts, per row, between which the price of a token of context is measured.
SHORT, LONG = 64, 512


@torch.inference_mode()
def profile_step(step: DecodeStep, repeats: int = 3) -> StepCostTable:
    """Times whole decode steps (drafting, target, verification, commit) of every packed size on made-up rows.

    Runs before any request: it uses the target's buffers. On a CPU, where sizes are not padded, the table is
    interpolated between the measured sizes; elsewhere it is the staircase of the padded sizes.
    """
    target, width = step.target, step.width
    device = target.device
    rows = new_rows(target.rows, target.max_length, device)
    rows.tokens.copy_(torch.randint(0, target.vocab_size, rows.tokens.shape, device=device))
    speculate = torch.ones_like(rows.running)
    tokens = torch.randint(0, target.vocab_size, (target.rows, width), device=device)
    full = torch.ones(target.rows, width, device=device)
    chain = Chain.build(tokens, torch.full_like(rows.length, width), full, source=0)
    most = target.max_length - width - 2
    short, long = min(SHORT, most), min(LONG, most)

    def run_at(context: int) -> Runner:
        return Runner(step, rows, speculate, chain, context)

    with_context = long > short
    interpolate = device.type == "cpu"
    sizes = packed_sizes(target.rows, width)
    if interpolate:  # between sizes that are not padded every second one will do, and start-up is shorter
        sizes = (*sizes[:-1:2], sizes[-1])
    return profile_cost(
        run_at(short),
        sizes,
        warmup=1,
        repeats=repeats,
        run_with_context=run_at(long) if with_context else None,
        context_tokens=target.rows * (long - short) if with_context else 0,
        interpolate=interpolate,
    )


class Runner:
    """Runs one whole step of a given packed size over rows whose length is `context`."""

    def __init__(self, step: DecodeStep, rows: RowState, speculate: torch.Tensor, chain: Chain, context: int) -> None:
        self.step, self.rows, self.speculate, self.chain, self.context = step, rows, speculate, chain, context

    def __call__(self, size: int) -> None:
        rows, width, count = self.rows, self.step.width, self.rows.length.shape[0]
        running = min(count, size)
        drafts, device = size - running, rows.length.device
        share = torch.arange(count, device=device)
        kept = torch.where(share < running, drafts // running + (share < drafts % running), 0).clamp(max=width)
        rows.length.fill_(self.context)
        rows.limit.fill_(self.step.target.max_length)
        rows.running.copy_(share < running)
        price = torch.zeros((), device=device)
        bound = min(-(-(self.context + width + 1) // 64) * 64, self.step.target.max_length)
        for drafter in self.step.drafters:
            if hasattr(drafter, "context_limit"):
                drafter.context_limit = bound
        self.step.propose(rows, self.speculate, price, SamplingMode())
        most = -(-drafts // running)
        # As a CPU's steps are sized; elsewhere all rows take part in every step.
        span = (0, running) if device.type == "cpu" else None
        outcome = self.step.verify(rows, self.chain, kept, SamplingMode(), Shape(size, 1 + most, bound, span=span))
        if device.type != "cpu":
            outcome.count.cpu()
