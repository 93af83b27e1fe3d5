"""The policies against a slow reference, on the paper's numbers, and as chains that others can work on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hspark.core import (
    REASON_CONTAINS,
    REASON_EXTENDED,
    REASON_NO_MATCH,
    REASON_ONLY,
    REASON_VALUE,
    SOURCE_FREE,
    SOURCE_MODEL,
    SOURCE_TARGET,
    Chain,
)
from hspark.policy import chain_value, choose_chain, is_prefix, policy, policy_names
from hspark.policy.merging import slots
from tests.assertions import assert_equal_trees, assert_one_graph, assert_valid_chain
from tests.policy.reference import reference, rows_of
from tests.strategies import chain_of, chain_pairs, chains, prices

Pair = tuple[Chain, Chain]


def _row(chain: Chain, b: int) -> Chain:
    """Row b as a batch of one."""
    return chain._replace(**{name: field[b : b + 1] for name, field in chain._asdict().items() if field is not None})


def _littered(chain: Chain, seed: int) -> Chain:
    """The same chain with other values where a chain's entries have no meaning."""
    generator = torch.Generator().manual_seed(seed)
    inside = slots(chain) < chain.length[:, None]
    tokens = torch.randint(0, 3, chain.tokens.shape, generator=generator)
    acceptance = torch.rand(chain.tokens.shape, generator=generator)
    return chain._replace(
        tokens=torch.where(inside, chain.tokens, tokens), acceptance=torch.where(inside, chain.acceptance, acceptance)
    )


@pytest.mark.parametrize("name", policy_names())
@given(pair=chain_pairs(), price=prices(), sampled=st.booleans(), data=st.data())
@settings(max_examples=60)
def test_equals_the_reference_row_by_row(
    name: str, pair: Pair, price: float, sampled: bool, data: st.DataObject
) -> None:
    model, free = (_littered(chain, data.draw(st.integers(0, 99))) for chain in pair)
    if sampled:
        laws = torch.zeros(*model.tokens.shape, 3).log_softmax(-1)
        model = model._replace(point_mass=torch.zeros_like(model.point_mass), log_probs=laws)
    options = {"score": data.draw(st.sampled_from([0.0, 0.5, 1.25, 3.0]))} if name == "threshold" else {}
    chosen = policy(name, **options)(model, free, torch.tensor(price))
    assert_valid_chain(chosen, vocab=3)
    assert chosen.width == max(model.width, free.width)
    # Widths and quarters are small, so survivals and values are exact on both sides and ties are ties.
    assert rows_of(chosen) == reference(name, model, free, price, **options)


@pytest.mark.parametrize("name", policy_names())
@given(pair=chain_pairs(sampled=True), price=prices())
@settings(max_examples=20)
def test_sampled_slots_keep_their_draft_law(name: str, pair: Pair, price: float) -> None:
    model, free = pair
    chosen = policy(name)(model, free, price)
    sampled = ~chosen.point_mass & (torch.arange(chosen.width) < chosen.length[:, None])
    assert bool((chosen.source[sampled] == SOURCE_MODEL).all())  # type: ignore[index]
    if bool(sampled.any()):
        assert chosen.log_probs is not None
        assert model.log_probs is not None
        assert chosen.log_probs.shape == (*chosen.tokens.shape, 3)
        inside = sampled[:, : model.width]
        assert torch.equal(chosen.log_probs[:, : model.width][inside], model.log_probs[inside])
    unsampled = policy(name)(model._replace(point_mass=torch.ones_like(model.point_mass), log_probs=None), free, price)
    assert unsampled.log_probs is None


@pytest.mark.parametrize("model_sampled", [False, True])
def test_a_sampled_model_free_chain_keeps_its_law_too(model_sampled: bool) -> None:
    """d wins the first row by value, g the second, and g goes on from d in the third."""
    laws = torch.randn(2, 3, 3, 5, generator=torch.Generator().manual_seed(0)).log_softmax(dim=-1)
    d = [([1, 2], [0.75, 0.75]), ([1, 2], [0.25, 0.25]), ([1, 2], [0.5, 0.5])]
    g = [([3, 3, 3], [0.25] * 3), ([3, 3, 3], [0.75] * 3), ([1, 2, 3], [0.5] * 3)]
    model = chain_of(d, 3, SOURCE_MODEL, laws[0] if model_sampled else None)
    free = chain_of(g, 3, SOURCE_FREE, laws[1])
    for name in ("proposed", "extension"):
        chosen = policy(name)(model, free, 0.0)
        assert chosen.log_probs is not None
        from_free = chosen.source == SOURCE_FREE
        sampled = slots(chosen) < chosen.length[:, None]
        sampled = sampled & (from_free | model_sampled)
        assert torch.equal(~chosen.point_mass & (slots(chosen) < chosen.length[:, None]), sampled)
        assert torch.equal(chosen.log_probs[sampled & from_free], laws[1][sampled & from_free])
        assert torch.equal(chosen.log_probs[sampled & ~from_free], laws[0][sampled & ~from_free])
        assert bool((sampled & from_free).any())
        assert bool((sampled & ~from_free).any()) is model_sampled


def test_a_slot_of_unknown_survival_is_worth_nothing() -> None:
    nan = float("nan")
    assert chain_value(torch.tensor([[0.75, nan, nan], [nan, nan, nan]]), 0.25).tolist() == [0.5, 0.0]
    broken = chain_of([([1, 2], [nan, nan])], 2, SOURCE_MODEL)
    match = chain_of([([3, 4], [0.5, 0.5])], 2, SOURCE_FREE)
    for name in ("proposed", "expected_length", "no_contains"):
        assert rows_of(policy(name)(broken, match, 0.125))[0].tokens == [3, 4]
    good = chain_of([([1, 2], [0.5, 0.5])], 2, SOURCE_MODEL)
    unknown = chain_of([([3, 4], [nan, nan])], 2, SOURCE_FREE)
    for name in ("proposed", "expected_length", "no_contains", "threshold"):
        assert rows_of(policy(name)(good, unknown, 0.125))[0].tokens == [1, 2]
    contained = policy("proposed")(broken, chain_of([([1, 2, 3], [0.5] * 3)], 3, SOURCE_FREE), 0.125)
    assert contained.survival.tolist() == [[0.5, 0.25, 0.125]]


@given(pair=chain_pairs(max_batch=4), price=prices())
@settings(max_examples=25)
def test_rows_do_not_see_each_other(pair: Pair, price: float) -> None:
    for name in policy_names():
        together = policy(name)(*pair, price)
        for b in range(pair[0].tokens.shape[0]):
            alone = policy(name)(_row(pair[0], b), _row(pair[1], b), price)
            assert_equal_trees(alone, _row(together, b))


@given(chain_pairs(max_batch=1, min_width=2), prices())
@settings(max_examples=100)
def test_contains_rule_gives_the_best_of_both_and_never_increases(pair: Pair, price: float) -> None:
    model, free = pair
    chosen = policy("proposed")(model, free, price)
    if int(chosen.reason[0]) != REASON_CONTAINS:  # type: ignore[index]
        return
    width, length = free.width, int(model.length)
    assert int(chosen.length) == int(free.length) > length >= 1
    assert bool((chosen.survival.diff(dim=1) <= 0).all())
    assert bool((chosen.survival[:, :width] >= free.survival).all())
    assert bool((chosen.survival[:, :length] >= model.survival[:, :length]).all())
    assert bool((chosen.source[0, : int(chosen.length)] == SOURCE_FREE).all())  # type: ignore[index]


def test_contains_rule_by_hand() -> None:
    model = chain_of([([7, 8], [0.5, 0.5])], 2, SOURCE_MODEL)
    free = chain_of([([7, 8, 9], [0.25, 0.75, 0.5])], 3, SOURCE_FREE)
    chosen = policy("proposed")(model, free, 0.0)
    assert chosen.survival.tolist() == [[0.5, 0.25, 0.125]]
    assert chosen.acceptance.tolist() == [[0.5, 0.5, 0.5]]


def test_an_exact_tie_goes_to_the_match() -> None:
    model = chain_of([([1, 2], [0.75, 0.5])], 2, SOURCE_MODEL)
    free = chain_of([([3, 4, 5, 6], [0.75, 0.5, 0.5, 0.5])], 4, SOURCE_FREE)
    chosen = policy("proposed")(model, free, 0.25)
    assert rows_of(chosen)[0].source == [SOURCE_FREE] * 4
    assert rows_of(policy("proposed")(model, free, 0.1875 - 1 / 64))[0].source == [SOURCE_FREE] * 4
    stronger = chain_of([([1, 2], [0.75, 0.75])], 2, SOURCE_MODEL)
    assert rows_of(policy("proposed")(stronger, free, 0.25))[0].source == [SOURCE_MODEL] * 2


EMPTY_CASES = {
    # policy: (reason, length) with no match; with no model draft; with neither. d has 2 tokens, g has 3.
    "proposed": [(REASON_NO_MATCH, 2), (REASON_VALUE, 3), (REASON_NO_MATCH, 0)],
    "expected_length": [(REASON_NO_MATCH, 2), (REASON_VALUE, 3), (REASON_NO_MATCH, 0)],
    "no_contains": [(REASON_NO_MATCH, 2), (REASON_VALUE, 3), (REASON_NO_MATCH, 0)],
    "ngram_first": [(REASON_NO_MATCH, 2), (REASON_ONLY, 3), (REASON_NO_MATCH, 0)],
    "threshold": [(REASON_NO_MATCH, 2), (REASON_VALUE, 0), (REASON_NO_MATCH, 0)],
    "extension": [(REASON_NO_MATCH, 2), (REASON_EXTENDED, 3), (REASON_NO_MATCH, 0)],
    "model_only": [(REASON_ONLY, 2), (REASON_ONLY, 0), (REASON_ONLY, 0)],
    "ngram_only": [(REASON_ONLY, 0), (REASON_ONLY, 3), (REASON_ONLY, 0)],
    "vanilla": [(REASON_ONLY, 0), (REASON_ONLY, 0), (REASON_ONLY, 0)],
}


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("empty_width", [0, 3])
def test_empty_chains(name: str, empty_width: int) -> None:
    model = chain_of([([1, 2], [0.5, 0.5])], 2, SOURCE_MODEL)
    free = chain_of([([3, 4, 5], [0.5, 0.5, 0.5])], 3, SOURCE_FREE)
    none = Chain.empty(1, empty_width)
    for (d, g), expected in zip([(model, none), (none, free), (none, none)], EMPTY_CASES[name], strict=True):
        chosen = policy(name)(d, g, 0.25)
        assert_valid_chain(chosen)
        assert (int(chosen.reason), int(chosen.length)) == expected  # type: ignore[arg-type]


def test_vanilla_is_nobodys_draft() -> None:
    model = chain_of([([1, 2], [0.5, 0.5])], 2, SOURCE_MODEL)
    chosen = policy("vanilla")(model, model, 0.0)
    assert chosen.source.tolist() == [[SOURCE_TARGET] * 2]  # type: ignore[union-attr]
    assert chosen.survival.sum() == 0


def _survivals(values: list[float], source: int) -> Chain:
    """One row with the given survivals and tokens that no other source drafts."""
    before = [1.0, *values[:-1]]
    return chain_of(
        [([source] * len(values), [s / b for s, b in zip(values, before, strict=True)])], len(values), source
    )


def test_the_papers_worked_example() -> None:
    """Table 8: at price 0.309, nine of fifteen n-gram slots above it with sum 4.35, all seven model slots with 5.58."""
    above = [4.35 / 9 + 0.04 * (4 - i) for i in range(9)]
    below = [1.52 / 6 + 0.02 * (2.5 - i) for i in range(6)]
    ngram = _survivals(above + below, SOURCE_FREE)
    model = _survivals([5.58 / 7 + 0.04 * (3 - i) for i in range(7)], SOURCE_MODEL)
    price = 0.309
    for chain, total, count, their_sum, value in ((ngram, 5.87, 9, 4.35, 1.57), (model, 5.58, 7, 5.58, 3.42)):
        worth = chain.survival > price
        assert int(worth.sum()) == count
        assert f"{float(chain.survival.sum()):.2f}" == f"{total:.2f}"
        assert f"{float(chain.survival[worth].sum()):.2f}" == f"{their_sum:.2f}"
        assert f"{float(chain_value(chain.survival, price)):.2f}" == f"{value:.2f}"
    assert rows_of(policy("expected_length")(model, ngram, price))[0].source == [SOURCE_FREE] * 15
    assert rows_of(policy("proposed")(model, ngram, price))[0].source == [SOURCE_MODEL] * 7


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("sampled", [False, True])
def test_compiles_to_one_graph(name: str, sampled: bool) -> None:
    laws = torch.zeros(2, 3, 11).log_softmax(-1) if sampled else None
    model = chain_of([([1, 2, 3], [0.5, 0.5, 0.5]), ([4], [0.9])], 3, SOURCE_MODEL, laws)
    free = chain_of([([1, 2, 3, 4, 5], [0.9] * 5), ([], [])], 5, SOURCE_FREE)
    assert_valid_chain(assert_one_graph(policy(name), model, free, torch.tensor(0.25)))


def test_nothing_is_read_back_to_the_host() -> None:
    """Fake tensors have no values, so whatever asked for one would raise."""
    with FakeTensorMode():
        model, free = (
            Chain.build(
                torch.ones(4, w, dtype=torch.int64), torch.ones(4, dtype=torch.int64), torch.rand(4, w), source=1
            )
            for w in (7, 15)
        )
        for name in policy_names():
            assert policy(name)(model, free, torch.tensor(0.3)).tokens.shape == (4, 15)


def test_batches_must_agree() -> None:
    with pytest.raises(ValueError, match="model_chain has 2 rows, free_chain 3"):
        policy("proposed")(Chain.empty(2, 1), Chain.empty(3, 1), 0.0)


@given(st.data(), prices())
@settings(max_examples=25)
def test_a_third_chain_joins_by_folding(data: st.DataObject, price: float) -> None:
    model, first = data.draw(chain_pairs(max_batch=2))
    second = data.draw(chains(batch=model.tokens.shape[0], width=5, source=SOURCE_FREE + 1))
    for name in policy_names():
        choose = policy(name)
        assert_equal_trees(choose_chain(choose, model, [first], price), choose(model, first, price))
        chosen = choose_chain(choose, model, [first, second], price)
        assert_valid_chain(chosen, vocab=3)
        assert chosen.width == max(model.width, first.width, 5)
        # A third drafter that drafts nothing changes nothing, the reasons included.
        nothing = choose_chain(choose, model, [first, Chain.empty(model.tokens.shape[0], 5)], price)
        assert rows_of(nothing) == rows_of(choose(model, first, price))


def test_the_third_chain_can_win_and_can_extend() -> None:
    model = chain_of([([1], [0.5])], 1, SOURCE_MODEL)
    first = chain_of([([1, 2], [0.5, 0.5])], 2, SOURCE_FREE)
    second = chain_of([([1, 2, 3], [0.5, 0.5, 0.5])], 3, 3)
    extended = rows_of(choose_chain(policy("extension"), model, [first, second], 0.0))[0]
    assert (extended.tokens, extended.source) == ([1, 2, 3], [SOURCE_MODEL, SOURCE_FREE, 3])
    kept = rows_of(choose_chain(policy("ngram_only"), model, [first, second], 0.0))[0]
    assert (kept.tokens, kept.source, kept.reason) == ([1, 2, 3], [3, 3, 3], REASON_ONLY)
    with pytest.raises(ValueError, match="at least one chain"):
        choose_chain(policy("proposed"), model, [], 0.0)


def test_is_prefix_examples() -> None:
    d = chain_of([([7, 8], [1.0, 1.0])] * 3 + [([], [])], 3, SOURCE_MODEL)
    g = chain_of([([7, 8, 9], [1.0] * 3), ([7, 8], [1.0] * 2), ([7, 9, 8], [1.0] * 3), ([5], [1.0])], 3, SOURCE_FREE)
    assert is_prefix(d, g).tolist() == [True, False, False, True]
