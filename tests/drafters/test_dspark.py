"""The DSpark drafter on its own: caches, rows, limits, and vocabularies."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspark.core import Chain, RowState
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_model import DSparkModel
from hspark.sampling import SamplingMode
from tests.assertions import assert_valid_chain
from tests.drafters.dspark_cases import (
    GREEDY,
    SAMPLED,
    bound,
    features_of,
    feed,
    random_model,
    rows_of,
    target_info,
    tiny_config,
)
from tests.drafters.dspark_models import CONFIGS, MODELS, TEXT


def fresh(model: DSparkModel, text: list[int], mode: SamplingMode = GREEDY, rows: RowState | None = None) -> Chain:
    """What a drafter proposes that has only ever seen `text`."""
    drafter = bound(model)
    feed(drafter, 0, text[:-1])
    return drafter.propose(rows_of([text]) if rows is None else rows, mode)


def assert_same_chain(left: Chain, right: Chain, row: int = 0) -> None:
    """Row `row` of `left` equals row 0 of `right`."""
    assert left.tokens[row].tolist() == right.tokens[0].tolist()
    assert int(left.length[row]) == int(right.length[0])
    torch.testing.assert_close(left.acceptance[row], right.acceptance[0], rtol=1e-4, atol=1e-5)


# ---- caches ----------------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5),
    prompt=st.integers(1, 12),
)
@settings(max_examples=40)
def test_drafts_after_partial_acceptance_equal_those_of_a_fresh_drafter(
    name: str, steps: list[tuple[int, int]], prompt: int
) -> None:
    """Each step shows the drafter `kept` draft positions, of which the first `accepted` hold the right tokens."""
    model = MODELS[name]
    drafter = bound(model)
    feed(drafter, 0, TEXT[: prompt - 1])
    length = prompt
    for kept, accepted in steps:
        accepted = min(kept, accepted)
        seen = TEXT[length - 1 : length + accepted] + [39 - t for t in TEXT[length + accepted : length + kept]]
        feed(drafter, 0, seen, length - 1)
        length += accepted + 1
        assert_same_chain(drafter.propose(rows_of([TEXT[:length]]), GREEDY), fresh(model, TEXT[:length]))


def test_rows_are_independent(model: DSparkModel) -> None:
    """Any row of a batch of different lengths drafts what it drafts alone, prompt chunks interleaved."""
    lengths = [1, 2, 7, 19, 33]
    drafter = bound(model, rows=len(lengths))
    for start in range(0, 40, 6):
        for row, length in enumerate(lengths):
            feed(drafter, row, TEXT[row:][start : min(start + 6, length - 1)], start)
    chain = drafter.propose(rows_of([TEXT[row : row + length] for row, length in enumerate(lengths)]), GREEDY)
    assert_valid_chain(chain, model.config.vocab_size)
    for row, length in enumerate(lengths):
        assert_same_chain(chain, fresh(model, TEXT[row : row + length]), row)


def test_a_recycled_row_remembers_nothing(model: DSparkModel) -> None:
    """Neither an earlier, longer request nor one that went to NaN shows in the next request of the row."""
    drafter = bound(model, rows=2)
    feed(drafter, 0, TEXT[5:40])
    broken = features_of(model.config, TEXT[:30]) * math.nan
    drafter.observe(broken, torch.zeros(30, dtype=torch.int64), torch.arange(30))
    feed(drafter, 0, TEXT[:8])
    chain = drafter.propose(rows_of([TEXT[:9], TEXT[:1]]), GREEDY)
    assert_same_chain(chain, fresh(model, TEXT[:9]))
    assert_same_chain(chain, fresh(model, TEXT[:1]), 1)


def test_a_row_with_broken_features_still_gives_valid_chains_and_spares_the_others(model: DSparkModel) -> None:
    drafter = bound(model, rows=2)
    for row in (0, 1):
        feed(drafter, row, TEXT[:8])
    drafter.observe(features_of(model.config, TEXT[:2]) * math.inf, torch.zeros(2).long(), torch.arange(2))
    chain = drafter.propose(rows_of([TEXT[:9], TEXT[:9]]), GREEDY)
    assert_valid_chain(chain, model.config.vocab_size)
    assert_same_chain(chain, fresh(model, TEXT[:9]), 1)


def test_a_row_whose_block_overflows_abstains(model: DSparkModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = bound(model, rows=3)
    whole = drafter._block

    def broken(rows: RowState, anchor: Tensor) -> Tensor:
        hidden = whole(rows, anchor).clone()
        hidden[0, 0, 0], hidden[1, -1, -1] = math.nan, math.inf
        return hidden

    monkeypatch.setattr(drafter, "_block", broken)
    assert drafter.propose(rows_of([TEXT[:1]] * 3), GREEDY).length.tolist() == [0, 0, drafter.width]


def test_padding_goes_to_the_dump_column(model: DSparkModel) -> None:
    drafter = bound(model, rows=2)
    feed(drafter, 0, TEXT[:12])
    before = [tuple(t.clone() for t in buffer) for buffer in drafter.buffers]
    drafter.observe(features_of(model.config, TEXT[:3]), torch.zeros(3, dtype=torch.int64), torch.full((3,), 64))
    end = drafter.scratch + drafter.columns
    for old, new in zip(before, drafter.buffers, strict=True):
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a[:, :, :end], b[:, :, :end])


@pytest.mark.parametrize("limit", [13, 16, 40, 64, 1000])
def test_the_context_limit_changes_nothing_but_the_cost(model: DSparkModel, limit: int) -> None:
    drafter = bound(model)
    feed(drafter, 0, TEXT[:12])
    drafter.context_limit = limit
    assert_same_chain(drafter.propose(rows_of([TEXT[:13]]), GREEDY), fresh(model, TEXT[:13]))


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_a_drafter_past_its_positions_abstains_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(tiny_config(max_positions=16))
    with caplog.at_level(logging.WARNING):
        drafter = bound(model, rows=2, max_length=64)
        feed(drafter, 0, TEXT[:30])
        feed(drafter, 1, TEXT[:8])
        lengths = []
        for length in range(1, 31):
            chain = drafter.propose(rows_of([TEXT[:length], TEXT[:9]]), GREEDY)
            lengths.append(int(chain.length[0]))
            assert_same_chain(chain, fresh(random_model(tiny_config(max_positions=64)), TEXT[:9]), 1)
    # A block of 5 whose anchor is at 11 ends at position 15, the last one.
    assert lengths == [5] * 12 + [0] * 18
    assert len([r for r in caplog.records if "16 positions" in r.getMessage()]) == 1


def test_a_row_that_ran_past_the_limit_leaves_no_trace() -> None:
    model = random_model(tiny_config(max_positions=16))
    drafter = bound(model, max_length=64)
    feed(drafter, 0, TEXT[:40])
    feed(drafter, 0, TEXT[3:9])
    assert_same_chain(drafter.propose(rows_of([TEXT[3:10]]), GREEDY), fresh(model, TEXT[3:10]))


def test_no_warning_while_the_limit_is_out_of_reach(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bound(random_model(tiny_config(max_positions=64)), max_length=64)
    assert not caplog.records


@pytest.mark.parametrize("anchor_first", [True, False])
def test_shorter_chains_are_beginnings_and_longer_ones_are_refused(anchor_first: bool) -> None:
    model = random_model(tiny_config(anchor_first=anchor_first))
    whole = fresh(model, TEXT[:9])
    width = model.config.width
    assert whole.width == width == (5 if anchor_first else 4)
    for length in range(1, width + 1):
        drafter = bound(model, length=length)
        feed(drafter, 0, TEXT[:8])
        assert drafter.width == length
        assert drafter.propose(rows_of([TEXT[:9]]), GREEDY).tokens.tolist() == whole.tokens[:, :length].tolist()
    with pytest.raises(ValueError, match=rf"length={width + 1} is more .* block_size=5 yield {width} draft tokens"):
        DSparkDrafter(model, length=width + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"length": 0},
        {"length": -1},
        {"length": True},
        {"length": 2.0},
        {"drafting": "sampled"},
        {"noise": "none"},
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}.*use"):
        DSparkDrafter(MODELS["anchor_first"], **options)  # type: ignore[arg-type]


def test_windows_are_honoured() -> None:
    """Keys beyond the window have no weight in windowed layers, and do have some in layers that see everything."""
    windowed, full = random_model(tiny_config(windows=(4, 4))), random_model(tiny_config())
    differs = []
    for model in (windowed, full):
        chains = []
        for first in (TEXT[0], TEXT[0] + 1):
            drafter = bound(model)
            feed(drafter, 0, [first, *TEXT[1:12]])
            chains.append(drafter.propose(rows_of([[first, *TEXT[1:13]]]), GREEDY).acceptance)
        differs.append(not torch.equal(*chains))
    assert differs == [False, True]


# ---- vocabularies ----------------------------------------------------------------------------------------------------


def test_an_unknown_token_reads_as_the_mask() -> None:
    model = random_model(tiny_config(mask_token_id=7))
    drafter = bound(model, rows=2, target=target_info(model.config, vocab_size=64))
    for anchors in ([40, 7], [63, 7]):
        chain = drafter.propose(rows_of([[anchor] for anchor in anchors]), GREEDY)
        assert chain.tokens[0].tolist() == chain.tokens[1].tolist()
        torch.testing.assert_close(chain.acceptance[0], chain.acceptance[1])


@pytest.mark.parametrize("target_vocab", [36, 40, 64])
@pytest.mark.parametrize("name", ["anchor_first", "bonus_windowed_reduced"])
def test_vocabularies_that_differ_by_padding(name: str, target_vocab: int) -> None:
    """Ids are compared over the common range: what one side lacks is neither drafted nor a reason to fail."""
    model = MODELS[name]
    drafter = bound(model, rows=30, target=target_info(model.config, vocab_size=target_vocab), drafting="probabilistic")
    anchors = [[(5 * row) % target_vocab] for row in range(30)]  # some past the drafter's own vocabulary
    chain = drafter.propose(rows_of(anchors, temperature=3.0, seed=torch.arange(30)), SAMPLED)
    assert_valid_chain(chain, min(target_vocab, 40))
    assert chain.log_probs is not None
    assert chain.log_probs.shape[-1] == target_vocab
    assert bool((chain.log_probs[..., 40:] == -math.inf).all())
    greedy = bound(model, rows=30, target=target_info(model.config, vocab_size=target_vocab))
    assert_valid_chain(greedy.propose(rows_of(anchors), GREEDY), min(target_vocab, 40))
