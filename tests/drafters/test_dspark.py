"""The DSpark drafter on its own: caches, rows, limits, vocabularies, and the law of what it draws."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspark.core import Chain, RowState
from hspark.drafters.dspark import DSparkDrafter, committed_counts
from hspark.drafters.dspark_context import buffer_bytes
from hspark.drafters.dspark_model import DSparkModel
from hspark.sampling import (
    STREAM_COUPLED,
    STREAM_DRAFT,
    SamplingMode,
    gumbel_noise,
    slot_key,
    target_log_probs,
)
from tests.assertions import assert_one_graph, assert_valid_chain
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

WINDOWED = {"windows": (4, None), "anchor_first": False, "draft_vocab_size": 25, "markov_head": "rnn"}
CONFIGS = {
    "anchor_first": tiny_config(),
    "bonus_windowed_reduced": tiny_config(**WINDOWED),
    "gemma": tiny_config(backbone="gemma4", key_is_value=True, logit_softcap=20.0, activation="gelu_pytorch_tanh"),
    "headless": tiny_config(
        markov_rank=0, markov_head="none", confidence_head=False, confidence_with_markov=False, attention_bias=True
    ),
    "gated": tiny_config(markov_head="gated", confidence_with_markov=False),
}
MODELS = {name: random_model(config, seed) for seed, (name, config) in enumerate(CONFIGS.items())}
TEXT = [(7 * i * i + 3 * i + 1) % 38 for i in range(40)]


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> DSparkModel:
    return MODELS[request.param]


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


# ---- the law ---------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "temperature": torch.tensor([0.0, 0.6, 1.0, 1e-6, 1.5, 1.0]),
    "top_k": torch.tensor([0, 0, 3, 0, 0, 5]),
    "top_p": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.8, 1.0]),
    "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1]),
    "repetition_penalty": torch.tensor([1.0, 1.3, 1.0, 1.0, 1.0, 1.0]),
    "frequency_penalty": torch.tensor([0.5, 0.0, 0.4, 0.0, 0.0, 0.0]),
    "presence_penalty": torch.tensor([0.0, 0.2, 0.0, 0.0, 0.0, 0.3]),
}
ALL_PARTS = SamplingMode(sampled=True, filters=True, penalties=True, bias=True)


def a_batch(model: DSparkModel, **options: object) -> tuple[DSparkDrafter, RowState]:
    drafter = bound(model, rows=6, **options)  # type: ignore[arg-type]
    for row in range(6):
        feed(drafter, row, TEXT[row : row + 8])
    bias = torch.zeros(6, 40)
    bias[:, 3], bias[2:, 11] = -100.0, 2.0
    texts = [TEXT[row : row + 9] for row in range(6)]
    return drafter, rows_of(texts, prompt_length=4, seed=torch.arange(6) + 70, bias=bias, **SETTINGS)


@pytest.mark.parametrize("noise", ["coupled", "independent"])
def test_reported_law_is_the_processed_law_and_the_noise_is_the_documented_one(model: DSparkModel, noise: str) -> None:
    """Each slot's law is `target_log_probs` of its corrected logits, with the row's own settings and history."""
    drafter, rows = a_batch(model, drafting="probabilistic", noise=noise)
    chain = drafter.propose(rows, ALL_PARTS)
    assert_valid_chain(chain, 40)
    assert chain.log_probs is not None
    anchor = rows.length - 1
    hidden = drafter._block(rows, anchor)
    lead = 1 if model.config.anchor_first else 2
    first = rows.tokens.gather(1, anchor[:, None]).expand(-1, lead)
    logits = model.base_logits(hidden) + model.markov_bias(torch.cat((first, chain.tokens[:, :-1]), 1), hidden)
    text = rows
    for slot in range(chain.width):
        full = torch.full((6, 40), -math.inf).index_copy(1, model.target_ids(), logits[:, lead - 1 + slot])
        expected = target_log_probs(full, rows.sampling, ALL_PARTS, committed_counts(text, 40))
        torch.testing.assert_close(chain.log_probs[:, slot], expected, rtol=1e-4, atol=1e-4)
        if noise == "coupled":
            drawn = gumbel_noise(rows.sampling.seed, anchor + 1 + slot, 40, STREAM_COUPLED)
        else:
            drawn = gumbel_noise(rows.sampling.seed, slot_key(anchor, slot), 40, STREAM_DRAFT)
        assert (expected + drawn).argmax(-1).tolist() == chain.tokens[:, slot].tolist()
        tokens = text.tokens.scatter(1, text.length[:, None], chain.tokens[:, slot : slot + 1])
        text = text._replace(tokens=tokens, length=text.length + 1)
    assert not bool((chain.tokens == 3).any())  # banned by its bias


def test_greedy_rows_draft_the_same_beside_sampled_ones(model: DSparkModel) -> None:
    """Temperature 0 and 1e-6 are greedy: point masses, and the tokens of a greedy drafter under the same settings."""
    drafter, rows = a_batch(model, drafting="probabilistic")
    chain = drafter.propose(rows, ALL_PARTS)
    greedy_drafter, _ = a_batch(model)
    plain = greedy_drafter.propose(rows, ALL_PARTS)
    assert plain.log_probs is None
    assert bool(plain.point_mass.all())
    greedy = torch.tensor([True, False, False, True, False, False])
    assert torch.equal(chain.point_mass, greedy[:, None].expand(chain.tokens.shape))
    assert torch.equal(chain.tokens[greedy], plain.tokens[greedy])
    assert chain.log_probs is not None
    picked = chain.log_probs[greedy].gather(-1, chain.tokens[greedy][..., None])
    assert bool((picked == 0).all())
    unsampled = drafter.propose(rows, ALL_PARTS._replace(sampled=False))
    assert unsampled.log_probs is None
    assert torch.equal(unsampled.tokens[greedy], plain.tokens[greedy])


def test_greedy_drafting_at_a_temperature_is_still_greedy() -> None:
    drafter = bound(MODELS["anchor_first"])
    feed(drafter, 0, TEXT[:8])
    warm = drafter.propose(rows_of([TEXT[:9]], temperature=2.0, seed=5), SAMPLED)
    assert torch.equal(warm.tokens, drafter.propose(rows_of([TEXT[:9]]), GREEDY).tokens)
    assert warm.log_probs is None


def test_coupled_noise_depends_on_the_position_and_independent_noise_on_the_step() -> None:
    """One step later the coupled noise of a position returns; independent noise never does."""
    at = {
        noise: {
            (anchor, slot): bound(MODELS["anchor_first"], drafting="probabilistic", noise=noise)._noise(
                rows_of([TEXT[:9]], seed=1), torch.tensor([anchor]), slot
            )
            for anchor, slot in ((8, 1), (9, 0))
        }
        for noise in ("coupled", "independent")
    }
    assert torch.equal(at["coupled"][8, 1], at["coupled"][9, 0])
    assert not torch.equal(at["independent"][8, 1], at["independent"][9, 0])
    assert not torch.equal(at["independent"][8, 1], at["coupled"][8, 1])


# ---- the device side -------------------------------------------------------------------------------------------------


def test_a_step_compiles_to_one_graph(model: DSparkModel) -> None:
    drafter, rows = a_batch(model, drafting="probabilistic")
    assert_one_graph(lambda: drafter.propose(rows, ALL_PARTS))


def test_a_greedy_step_compiles_to_one_graph() -> None:
    drafter, rows = a_batch(MODELS["bonus_windowed_reduced"])
    assert_one_graph(lambda: drafter.propose(rows, GREEDY))


def test_observing_compiles_to_one_graph(model: DSparkModel) -> None:
    drafter = bound(model)
    features, row = features_of(model.config, TEXT[:4]), torch.zeros(4, dtype=torch.int64)

    def observe() -> list[torch.Tensor]:
        drafter.observe(features, row, torch.arange(4))
        return [t for buffer in drafter.buffers for t in buffer]

    assert_one_graph(observe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_allocated_once_and_as_large_as_foretold(model: DSparkModel, dtype: torch.dtype) -> None:
    drafter = bound(model, rows=3, max_length=50, target=target_info(model.config, dtype=dtype))
    held = [t for buffer in drafter.buffers for t in buffer]
    assert sum(t.nbytes for t in held) == buffer_bytes(model.config, 3, 50, dtype)
    places = [t.data_ptr() for t in held]
    feed(drafter, 1, TEXT[:20])
    chain = drafter.propose(rows_of([TEXT[:1], TEXT[:21], TEXT[:1]], max_length=50), GREEDY)
    assert_valid_chain(chain, 40)
    assert places == [t.data_ptr() for buffer in drafter.buffers for t in buffer]
