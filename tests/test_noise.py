"""The counter-based noise: a pure function of its arguments, with the law and the independence that sampling needs.

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

from hspark.sampling import (
    CACHED_ELEMENTS,
    SLOTS_PER_ANCHOR,
    STREAM_ACCEPT,
    STREAM_COUPLED,
    STREAM_DRAFT,
    STREAM_RECOVER,
    _unit,
    gumbel_noise,
    slot_key,
    uniform_noise,
)
from hspark.verify.statistics import chi_square, miss_rate

FALSE_ALARM = 1e-6
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
    # a vocabulary of which a CPU works out two rows at a time
    wide = gumbel_noise(seeds[:5], positions[:5], CACHED_ELEMENTS // 2 - 7)
    for i in range(5):
        assert torch.equal(gumbel_noise(seeds[i], positions[i], CACHED_ELEMENTS // 2 - 7), wide[i])
    before = torch.get_rng_state()
    uniform_noise(seeds, positions)
    assert torch.equal(before, torch.get_rng_state())


def test_noise_is_finite_at_the_ends_of_the_hash() -> None:
    ends = _unit(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert bool(((ends > 0) & (ends < 1)).all())
    gumbel = -torch.log(-torch.log1p(-ends))
    assert bool(gumbel.isfinite().all())
    assert float(gumbel.max()) > 37  # 2^-55: the tail reaches as far as 53 bits can


# --- Its law ---


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
