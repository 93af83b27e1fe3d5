"""What hypothesis draws for the tests: chains, pairs of chains in every relation, survivals, cost models.

Acceptances come from the quarters 0, 1/4 .. 1 and widths stay small, so that products and sums of survivals are exact
in float32: a slow reference in plain Python can be compared for equality, ties included.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hspark.core import SOURCE_FREE, SOURCE_MODEL, Chain
from hspark.policy import CostModel, LinearCost, StepCostTable

MAX_WIDTH = 6
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)

# How a model-free chain may relate to the model chain of the same row.
RELATIONS = ("unrelated", "equal", "contains", "contained", "diverges", "no_match")


def prices() -> st.SearchStrategy[float]:
    """Slot prices, exact in float32, including 0 and one that no slot exceeds."""
    return st.sampled_from([0.0, 0.0625, 0.25, 0.3125, 0.5, 0.75, 1.0, 2.0])


@st.composite
def chains(
    draw: st.DrawFn,
    *,
    batch: int,
    width: int,
    vocab: int = 3,
    source: int = SOURCE_MODEL,
    sampled: bool = False,
    min_length: int = 0,
) -> Chain:
    """A chain [batch, width] with lengths from min_length; with `sampled`, its slots are drawn from random laws."""
    rows = [draw(_row(width, vocab, min_length)) for _ in range(batch)]
    return chain_of(rows, width, source, draw(_laws(batch, width, vocab)) if sampled else None)


@st.composite
def chain_pairs(
    draw: st.DrawFn, *, max_batch: int = 3, vocab: int = 3, sampled: bool = False, min_width: int = 1
) -> tuple[Chain, Chain]:
    """(model chain [B, K], model-free chain [B, L]), each row in one of RELATIONS, K and L on their own."""
    batch = draw(st.integers(1, max_batch))
    model_width, free_width = draw(st.integers(min_width, MAX_WIDTH)), draw(st.integers(min_width, MAX_WIDTH))
    model_rows, free_rows = [], []
    for _ in range(batch):
        tokens, acceptance = draw(_row(model_width, vocab, 0))
        other, other_acceptance = draw(_row(free_width, vocab, 0))
        relation = draw(st.sampled_from(RELATIONS))
        if relation == "no_match":
            other = []
        elif relation == "equal":
            other = tokens[:free_width]
        elif relation == "contains":
            other = (tokens + draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=free_width)))[:free_width]
        elif relation == "contained":
            other = tokens[: draw(st.integers(0, len(tokens)))][:free_width]
        elif relation == "diverges" and tokens:
            at = draw(st.integers(0, len(tokens) - 1))
            other = [*tokens[:at], (tokens[at] + 1) % vocab, *other][:free_width]
        filler = draw(st.lists(st.sampled_from(QUARTERS), min_size=MAX_WIDTH, max_size=MAX_WIDTH))
        model_rows.append((tokens, acceptance))
        free_rows.append((other, (other_acceptance + filler)[: len(other)]))
    laws = draw(_laws(batch, model_width, vocab)) if sampled else None
    return chain_of(model_rows, model_width, SOURCE_MODEL, laws), chain_of(free_rows, free_width, SOURCE_FREE, None)


def chain_of(
    rows: list[tuple[list[int], list[float]]], width: int, source: int, log_probs: Tensor | None = None
) -> Chain:
    """The chain [B, width] of rows given as (tokens, acceptance), each of its own length. Sampled iff log_probs is."""
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    acceptance = torch.zeros(len(rows), width)
    for row, (ids, chances) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        acceptance[row, : len(chances)] = torch.tensor(chances)
    length = torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int64)
    point_mass = None if log_probs is None else torch.zeros(len(rows), width, dtype=torch.bool)
    return Chain.build(tokens, length, acceptance, source=source, point_mass=point_mass, log_probs=log_probs)


@st.composite
def survivals(draw: st.DrawFn, *, max_batch: int = 4, max_width: int = 4) -> tuple[Tensor, Tensor]:
    """(survival [B, W], length [B]) of some batch: non-increasing rows, 0 past the length, many ties."""
    batch, width = draw(st.integers(1, max_batch)), draw(st.integers(1, max_width))
    chain = draw(chains(batch=batch, width=width))
    return chain.survival, chain.length


@st.composite
def cost_models(draw: st.DrawFn) -> CostModel:
    """Lines with and without a graph limit, staircases and interpolated tables; costs from flat to steep."""
    context = draw(st.sampled_from([0.0, 1e-5]))
    if draw(st.booleans()):
        options: dict[str, Any] = {}
        if draw(st.booleans()):
            options = {"graph_limit": draw(st.integers(1, 8)), "eager": {1: draw(_cost()), 20: draw(_cost())}}
        return LinearCost(draw(_cost()), draw(st.sampled_from([0.0, 0.01, 0.2, 5.0])), context, **options)
    sizes = sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=6)))
    seconds = [draw(_cost()) for _ in sizes]
    return StepCostTable(sizes, seconds, context, interpolate=draw(st.booleans()))


def _cost() -> st.SearchStrategy[float]:
    return st.floats(0.05, 4.0, allow_nan=False)


@st.composite
def _row(draw: st.DrawFn, width: int, vocab: int, min_length: int) -> tuple[list[int], list[float]]:
    length = draw(st.integers(min(min_length, width), width))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=length, max_size=length))
    return tokens, draw(st.lists(st.sampled_from(QUARTERS), min_size=length, max_size=length))


@st.composite
def _laws(draw: st.DrawFn, batch: int, width: int, vocab: int) -> Tensor:
    """Draft laws [batch, width, vocab], log-probabilities."""
    seed = draw(st.integers(0, 2**31))
    return torch.randn(batch, width, vocab, generator=torch.Generator().manual_seed(seed)).log_softmax(dim=-1)
