"""The strategies draw what they say, in every relation that the policies tell apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from hspark.core import Chain
from tests.assertions import assert_valid_chain
from tests.strategies import chain_of, chain_pairs, chains, cost_models, survivals


@given(chain_pairs(sampled=True), st.data())
@settings(max_examples=50)
def test_drawn_chains_keep_the_promises_of_chain(pair: tuple[Chain, Chain], data: st.DataObject) -> None:
    for chain in pair:
        assert_valid_chain(chain, vocab=3)
    assert pair[0].log_probs is not None
    assert pair[1].log_probs is None
    longer = data.draw(chains(batch=2, width=4, min_length=2))
    assert bool((longer.length >= 2).all())


# Any example will do: none is made smaller.
FIND = settings(max_examples=500, phases=[Phase.generate])


def _row_relation(pair: tuple[Chain, Chain]) -> str:
    """The relation of the first row."""
    d, g = (chain.tokens[0, : int(chain.length[0])].tolist() for chain in pair)
    if not g or not d:
        return "no match" if not g else "no draft"
    if g == d:
        return "equal"
    if g[: len(d)] == d:
        return "contains"
    return "contained" if d[: len(g)] == g else "diverges"


@pytest.mark.parametrize("relation", ["no match", "no draft", "equal", "contains", "contained", "diverges"])
def test_pairs_cover_every_relation(relation: str) -> None:
    found = find(chain_pairs(), lambda pair: _row_relation(pair) == relation, settings=FIND)
    assert _row_relation(found) == relation


@given(survivals(), cost_models())
@settings(max_examples=50)
def test_survivals_fall_and_costs_are_positive(drawn: tuple[torch.Tensor, torch.Tensor], cost: object) -> None:
    survival, length = drawn
    assert bool((survival.diff(dim=1) <= 0).all())
    assert bool((survival[torch.arange(survival.shape[1]) >= length[:, None]] == 0).all())
    assert bool((cost.step_cost(2, range(30)) > 0).all())  # type: ignore[attr-defined]


def test_chain_of_places_rows_of_different_lengths() -> None:
    chain = chain_of([([5, 6], [0.5, 0.5]), ([], [])], width=3, source=1)
    assert chain.tokens.tolist() == [[5, 6, 0], [0, 0, 0]]
    assert chain.survival.tolist() == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]
    assert chain.length.tolist() == [2, 0]
