"""The counter-based noise and the one logits → log-probabilities function.

Statistical tests here are deterministic: seeds are fixed, so a passing test passes always. FALSE_ALARM is the chance
that a correct generator would have failed on its seeds; beside each test stands a control that must fail.
"""

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

from hspark.config import SamplingParams
from hspark.sampling import (
    GREEDY_TEMPERATURE,
    SLOTS_PER_ANCHOR,
    STREAM_ACCEPT,
    STREAM_COUPLED,
    STREAM_DRAFT,
    STREAM_RECOVER,
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
from hspark.verify.statistics import chi_square, miss_rate
from tests.assertions import assert_one_graph

FALSE_ALARM = 1e-6
FULL = SamplingMode(sampled=True, filters=True)
STREAMS = (STREAM_COUPLED, STREAM_DRAFT, STREAM_ACCEPT, STREAM_RECOVER)
LAW = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
DRAWS = 200_000

MASK = 2**64 - 1


def _mix(x: int) -> int:
    """The finaliser of splitmix64 on unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _slow_unit(seed: int, position: int, stream: int, add: int) -> float:
    key = _mix((seed + 0x632BE59BD9B4E019) & MASK)
    key = _mix(key ^ _mix((position * 8 + stream + 0x1F123BB5159A55E5) & MASK))
    return min((_mix((key + add) & MASK) >> 11) / 2**53 + 2.0**-55, 1 - 2.0**-24)


# --- Noise: a pure function ---


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**48), st.sampled_from(STREAMS))
@settings(max_examples=50)
def test_noise_is_the_function_it_says(seed: int, position: int, stream: int) -> None:
    at = torch.tensor(seed), torch.tensor(position)
    slow = [_slow_unit(seed, position, stream, i * 0x9E3779B97F4A7C15) for i in range(5)]
    slow = [-math.log(-math.log1p(-u)) for u in slow]
    torch.testing.assert_close(gumbel_noise(*at, 5, stream), torch.tensor(slow), rtol=1e-5, atol=1e-5)
    uniform = uniform_noise(*at, stream)
    torch.testing.assert_close(
        uniform, torch.tensor(_slow_unit(seed, position, stream, 0x3C6EF372FE94F82B)), rtol=1e-6, atol=0
    )


def test_noise_depends_on_nothing_but_its_arguments() -> None:
    seeds, positions = torch.arange(6), torch.arange(6) * 7
    together = gumbel_noise(seeds, positions, 50)
    for i in range(6):
        assert torch.equal(gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 50)[0], together[i])
    # a smaller vocabulary is the start of a larger one, and shapes only arrange
    assert torch.equal(gumbel_noise(seeds, positions, 20), together[:, :20])
    assert torch.equal(gumbel_noise(seeds.view(2, 3), positions.view(2, 3), 50), together.view(2, 3, 50))
    before = torch.get_rng_state()
    uniform_noise(seeds, positions)
    assert torch.equal(before, torch.get_rng_state())


def test_noise_is_finite_at_the_ends_of_the_hash() -> None:
    from hspark.sampling import _unit

    ends = _unit(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert bool(((ends > 0) & (ends < 1)).all())
    gumbel = -torch.log(-torch.log1p(-ends))
    assert bool(gumbel.isfinite().all())
    assert float(gumbel.max()) > 37  # 2^-55: the tail reaches as far as 53 bits can


# --- Noise: its law ---


def _draws(noise: Tensor, law: Tensor = LAW) -> Tensor:
    return (law.log() + noise).argmax(-1)


def test_argmax_draws_follow_the_law() -> None:
    counters = torch.arange(DRAWS)
    zeros = torch.zeros_like(counters)
    for seed, position in ((counters, zeros), (zeros, counters), (zeros + 2**62, slot_key(counters, 3))):
        counts = torch.bincount(_draws(gumbel_noise(seed, position, 6)), minlength=6)
        assert chi_square(counts, LAW) > FALSE_ALARM
    # a law at a total variation of 0.01 would pass once in a thousand times
    assert miss_rate(0.01, DRAWS, 6, FALSE_ALARM) < 1e-3


def test_control_wrong_noise_is_caught() -> None:
    gumbel = gumbel_noise(torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64), 6)
    wrong = {
        "scaled": gumbel * 1.03,
        "normal": torch.randn(DRAWS, 6, generator=torch.Generator().manual_seed(0)) * 1.28,
    }
    for name, noise in wrong.items():
        assert chi_square(torch.bincount(_draws(noise), minlength=6), LAW) < FALSE_ALARM, name


def _joint(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Counts of pairs of draws [6, 6] and the law of independent ones."""
    pairs = torch.bincount(_draws(one) * 6 + _draws(two), minlength=36).view(6, 6)
    return pairs, LAW[:, None] * LAW


def test_streams_positions_seeds_and_slots_are_independent() -> None:
    counters, zeros = torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64)
    neighbours = [
        (gumbel_noise(zeros, counters * 2, 6, s), gumbel_noise(zeros, counters * 2, 6, t))
        for s in STREAMS
        for t in STREAMS
        if s < t
    ]
    neighbours += [
        (gumbel_noise(zeros, counters * 2, 6), gumbel_noise(zeros, counters * 2 + 1, 6)),
        (gumbel_noise(counters * 2, zeros, 6), gumbel_noise(counters * 2 + 1, zeros, 6)),
        (gumbel_noise(counters, zeros, 6), gumbel_noise(counters, zeros + 1, 6)),
        (gumbel_noise(zeros, slot_key(counters, 0), 6), gumbel_noise(zeros, slot_key(counters, 1), 6)),
        (gumbel_noise(zeros, slot_key(counters + 1, 0), 6), gumbel_noise(zeros, slot_key(counters, 1), 6)),
        (gumbel_noise(counters, zeros, 12)[:, :6], gumbel_noise(counters, zeros, 12)[:, 6:]),
    ]
    for one, two in neighbours:
        assert chi_square(*_joint(one, two)) > FALSE_ALARM


def test_control_dependent_noise_is_caught() -> None:
    zeros, counters = torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS)
    one = gumbel_noise(zeros, counters, 6)
    other = gumbel_noise(zeros, counters, 6, STREAM_DRAFT)
    shared = torch.where(counters[:, None] % 50 == 0, one, other)  # the same noise once in fifty times
    assert chi_square(*_joint(one, shared)) < FALSE_ALARM


@pytest.mark.parametrize("bits", [53, 12])
def test_the_tail_is_exponential(bits: int) -> None:
    """Of 4 million values, as many exceed x as exp(-exp(-x)) says, to x = 13; 12 bits are the control."""
    gumbel = gumbel_noise(torch.arange(4000), torch.arange(4000) + 17, 1000).flatten()
    if bits < 53:
        uniform = torch.exp(-torch.exp(-gumbel.double()))
        uniform = (uniform * 2**bits).floor().add(0.5) / 2**bits
        gumbel = -torch.log(-torch.log(uniform))
    edges = torch.arange(-2, 14, dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(gumbel.double(), edges), minlength=17)
    law = torch.cat([torch.zeros(1), torch.exp(-torch.exp(-edges)), torch.ones(1)]).diff()
    assert (chi_square(counts, law) > FALSE_ALARM) == (bits == 53)


def test_uniform_noise_is_uniform_and_reaches_small_values() -> None:
    uniform = uniform_noise(torch.zeros(2_000_000, dtype=torch.int64), torch.arange(2_000_000))
    counts = torch.histc(uniform.double(), 100, 0, 1)
    assert chi_square(counts, torch.full((100,), 0.01)) > FALSE_ALARM
    small = uniform < 2.0**-14  # about 122 of them: no coarser grid than float32 near 0
    assert chi_square(torch.tensor([int(small.sum()), int((~small).sum())]), torch.tensor([2.0**-14, 1 - 2.0**-14])) > (
        FALSE_ALARM
    )
    assert uniform[small].unique().numel() == int(small.sum())
    crude = (uniform * 64).floor() / 64 + 2.0**-7  # the control: six bits
    assert chi_square(torch.histc(crude.double(), 100, 0, 1), torch.full((100,), 0.01)) < FALSE_ALARM


def test_slot_keys_never_repeat_within_a_request() -> None:
    keys = slot_key(torch.arange(100)[:, None], torch.arange(SLOTS_PER_ANCHOR))
    assert keys.unique().numel() == keys.numel()


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
    for width in (1, 7, 64, 1000, 49_152):
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
