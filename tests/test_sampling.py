"""The one logits → log-probabilities function: filters, penalties, greedy rows, NaN, one threshold for all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hspark import sampling
from hspark.config import SamplingParams
from hspark.sampling import (
    GREEDY_TEMPERATURE,
    RANKED,
    STREAM_DRAFT,
    SamplingMode,
    SamplingState,
    TokenCounts,
    argmax,
    gumbel_noise,
    process_logits,
    slot_key,
    target_log_probs,
    uniform_noise,
)
from tests.assertions import assert_one_graph

FULL = SamplingMode(sampled=True, filters=True)


# --- Filters ---


def _state(n: int, **values: float | int | Tensor) -> SamplingState:
    state = SamplingState.defaults(n)
    given_values = {
        name: torch.as_tensor(value, dtype=getattr(state, name).dtype).expand(n).clone()
        for name, value in values.items()
    }
    return state._replace(**given_values)


def _slow_filter(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Plain Python: the filters one after the other, each on the renormalised rest."""
    probs = [math.exp((x - max(logits)) / temperature) for x in logits]
    total = sum(probs)
    probs = [p / total for p in probs]
    if top_k:
        bar = sorted(probs, reverse=True)[min(top_k, len(probs)) - 1]
        probs = [p if p >= bar else 0.0 for p in probs]
    total = sum(probs)
    probs = [p / total for p in probs]
    if top_p < 1:
        before, bar = 0.0, max(probs)
        for p in sorted(probs, reverse=True):
            if before < top_p:
                bar = p
            before += p
        probs = [p if p >= bar else 0.0 for p in probs]
    if min_p > 0:
        probs = [p if p >= min_p * max(probs) * (1 - 1e-6) else 0.0 for p in probs]
    total = sum(probs)
    return [p / total for p in probs]


def _near_an_edge(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether rounding could decide about a token: a partial sum near top_p, or a probability near min_p."""
    probs = _slow_filter(logits, temperature, top_k, 1.0, 0.0)
    sums = [sum(sorted(probs, reverse=True)[:i]) for i in range(1, len(probs))]
    return any(abs(s - top_p) < 1e-4 for s in sums) or any(abs(p / max(probs) - min_p) < 1e-4 for p in probs)


@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=12),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.integers(0, 14),
    st.sampled_from([0.05, 0.3, 0.61, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.13, 0.6, 1.0]),
)
def test_filters_equal_the_slow_ones(quarters: list[int], heat: float, top_k: int, top_p: float, min_p: float) -> None:
    """Small integer logits make ties common; tied tokens stay or go together."""
    logits = [q / 4 for q in quarters]
    if _near_an_edge(logits, heat, top_k, top_p, min_p if min_p < 1 else 0.0):
        return
    state = _state(1, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p)
    law = target_log_probs(torch.tensor([logits]), state, FULL).exp()[0]
    torch.testing.assert_close(law, torch.tensor(_slow_filter(logits, heat, top_k, top_p, min_p)), rtol=1e-4, atol=1e-6)
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)


def test_filters_equal_transformers() -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.zeros(64, 1, dtype=torch.int64)
    for heat, top_k, top_p, min_p in [(0.8, 10, 0.9, 0.05), (1.0, 0, 0.5, 0.0), (1.5, 3, 1.0, 0.0), (0.6, 0, 1.0, 0.2)]:
        scores = TemperatureLogitsWarper(heat)(ids, logits)
        if top_k:
            scores = TopKLogitsWarper(top_k)(ids, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(ids, scores)
        if min_p:
            scores = MinPLogitsWarper(min_p)(ids, scores)  # type: ignore[arg-type]
        law = target_log_probs(logits, _state(64, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p), FULL)
        torch.testing.assert_close(law.exp(), scores.softmax(-1), rtol=1e-4, atol=1e-6)


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.5, 2.0, 6.0]),
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 40, 700, RANKED, RANKED + 1]),
            st.sampled_from([0.3, 0.95, 0.9999, 1.0]),
            st.sampled_from([0.0, 0.1]),
        ),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=60, deadline=None)
def test_looking_at_the_most_probable_tokens_only_changes_no_bit(
    seed: int, spread: float, filters: list[tuple[int, float, float]]
) -> None:
    """Ties and flat laws that reach past the ranked tokens included: there, all are sorted after all."""
    logits = torch.randn(len(filters), 2 * RANKED + 3, generator=torch.Generator().manual_seed(seed)) * spread
    logits[0] = (logits[0] * 2).round() / 2
    top_k, top_p, min_p = (torch.tensor(values) for values in zip(*filters, strict=True))
    state = _state(len(filters), temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    law = target_log_probs(logits, state, FULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "RANKED", logits.shape[1])
        assert torch.equal(law, target_log_probs(logits, state, FULL))
    alone = [target_log_probs(logits[i : i + 1], state.take(torch.tensor([i])), FULL) for i in range(len(filters))]
    assert torch.equal(law, torch.cat(alone))


def test_the_filters_sort_a_vocabulary_only_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.arange(4 * RANKED).float()[None]
    monkeypatch.setattr(Tensor, "sort", lambda *_, **__: pytest.fail("sorted"))
    peaked = target_log_probs(logits, _state(1, temperature=1.0, top_p=0.9), FULL)
    assert int(peaked.isfinite().sum()) == 3  # 0.632 + 0.233 + 0.086
    with pytest.raises(pytest.fail.Exception):
        target_log_probs(logits * 0, _state(1, temperature=1.0, top_p=0.9), FULL)


def test_neutral_filters_change_nothing_and_extreme_ones_leave_the_best_token() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    plain = target_log_probs(logits, _state(5, temperature=0.7), SamplingMode(sampled=True))
    everything = SamplingMode(sampled=True, filters=True, penalties=True, bias=True)
    counts = TokenCounts(torch.ones(5, 30, dtype=torch.bool), torch.ones(5, 30, dtype=torch.int64))
    torch.testing.assert_close(target_log_probs(logits, _state(5, temperature=0.7), everything, counts), plain)
    for extreme in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        law = target_log_probs(logits, _state(5, temperature=0.7, **extreme), FULL)
        assert torch.equal(law.argmax(-1), logits.argmax(-1))
        assert torch.equal((law > -math.inf).sum(-1), torch.ones(5, dtype=torch.int64))


# --- Penalties and bias ---


def test_repetition_penalty_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, ids = torch.randn(8, 20, generator=generator), torch.randint(20, (8, 6), generator=generator)
    in_prompt = torch.zeros(8, 20, dtype=torch.bool).scatter_(1, ids[:, :3], True)
    in_output = torch.zeros(8, 20, dtype=torch.int64).scatter_add_(1, ids[:, 3:], torch.ones(8, 3, dtype=torch.int64))
    ours = process_logits(
        logits, _state(8, repetition_penalty=1.3), SamplingMode(penalties=True), TokenCounts(in_prompt, in_output)
    )
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone()))


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.zeros(1, 4)
    counts = TokenCounts(torch.tensor([[True, True, False, False]]), torch.tensor([[0, 1, 3, 0]]))
    state = _state(1, presence_penalty=0.5, frequency_penalty=0.25)
    out = process_logits(logits, state, SamplingMode(penalties=True), counts)
    assert out.tolist() == [[0.0, -0.75, -1.25, 0.0]]
    with pytest.raises(ValueError, match="counts is None"):
        process_logits(logits, state, SamplingMode(penalties=True), None)


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.tensor([[4.0, 0.0, 1.0]]).expand(20_000, 3)
    bias = torch.tensor([[-100.0, 0.0, 0.0]]).expand(20_000, 3)
    state = _state(20_000, temperature=1.0, min_p=0.2)._replace(bias=bias)
    law = target_log_probs(logits, state, SamplingMode(sampled=True, filters=True, bias=True))
    counters = torch.arange(20_000)
    drawn = (law + gumbel_noise(counters, counters, 3)).argmax(-1)
    assert set(drawn.unique().tolist()) == {1, 2}


# --- Greedy ---


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.sampled_from([0.0, 1e-6, 1e-5]))
def test_greedy_is_the_lowest_id_among_the_best(values: list[int], temperature: float) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    for mode in (SamplingMode(), SamplingMode(sampled=True), FULL):
        law = target_log_probs(logits, _state(1, temperature=temperature, top_k=2, top_p=0.5), mode)
        assert law[0].exp().tolist() == [float(i == values.index(max(values))) for i in range(len(values))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_lowest_of_equals_at_any_width(dtype: torch.dtype) -> None:
    """Ties that lie in different lanes of a vectorised reduction included; a NaN counts as the largest."""
    generator = torch.Generator().manual_seed(0)
    for width in (1, 7, 64, 512, 640, 1000, 49_152, 151_936):
        scores = torch.randint(-3, 2, (20, width), generator=generator).to(dtype)
        for row, found in zip(scores.tolist(), argmax(scores).tolist(), strict=True):
            assert found == row.index(max(row))
        scores[:, width // 2] = math.nan
        assert argmax(scores).tolist() == [width // 2] * 20


def test_one_threshold_decides_what_is_greedy() -> None:
    logits = torch.tensor([[0.0, 1e-7, 0.0]]).expand(3, 3)
    heats = [GREEDY_TEMPERATURE / 2, GREEDY_TEMPERATURE, math.nextafter(1.01e-5, 1)]
    law = target_log_probs(logits, _state(3, temperature=torch.tensor(heats)), SamplingMode(sampled=True)).exp()
    for row, heat in zip(law, heats, strict=True):
        assert (
            (row.max() == 1)
            == SamplingParams(temperature=heat).greedy
            == (not SamplingParams(temperature=heat).mode.sampled)
        )


def test_rows_keep_their_own_temperature() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(4))
    heats = [0.0, 1.0, 0.0, 0.7]
    together = target_log_probs(logits, _state(4, temperature=torch.tensor(heats)), FULL)
    for i, heat in enumerate(heats):
        alone = target_log_probs(logits[i : i + 1], _state(1, temperature=heat), SamplingMode(sampled=heat > 0))
        torch.testing.assert_close(together[i : i + 1], alone)


# --- NaN, precision, compilation ---


@pytest.mark.parametrize("mode", [SamplingMode(), SamplingMode(sampled=True), FULL])
def test_a_nan_stays_in_its_row(mode: SamplingMode) -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(5))
    logits[1, 4] = math.nan
    for heat in (0.0, 1.0):
        law = target_log_probs(logits, _state(3, temperature=heat, top_k=3), mode)
        assert bool(law[1].isnan().all())
        assert not bool(law[[0, 2]].isnan().any())


def test_masked_logits_stay_out_of_the_law() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.0, -math.inf]])
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.999), (4, 0.9999)):
        law = target_log_probs(logits, _state(1, temperature=1.0, top_k=top_k, top_p=top_p), FULL)
        torch.testing.assert_close(law.exp(), logits.softmax(-1))


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(6)).bfloat16()
    law = target_log_probs(logits, _state(2, temperature=1.0), FULL)
    assert law.dtype == torch.float32
    torch.testing.assert_close(law, logits.float().log_softmax(-1))


def test_everything_compiles_to_one_graph() -> None:
    logits, state = torch.randn(4, 7), _state(4, temperature=0.9, top_k=3, top_p=0.8, min_p=0.1, repetition_penalty=1.2)
    state = state._replace(bias=torch.zeros(4, 7))
    counts = TokenCounts(torch.rand(4, 7) < 0.5, torch.randint(3, (4, 7)))
    everything = SamplingMode(True, True, True, True)

    def draw(logits: Tensor, state: SamplingState, counts: TokenCounts, position: Tensor) -> Tensor:
        law = target_log_probs(logits, state, everything, counts)
        noise = gumbel_noise(state.seed, slot_key(position, 1), 7, STREAM_DRAFT)
        return (law + noise).argmax(-1) + (uniform_noise(state.seed, position) < 0.5)

    assert_one_graph(draw, logits, state, counts, torch.arange(4))
