"""How often sampled drafts are accepted: rejection and coupled verification side by side, against their theory.

With D the total variation between the draft law and the target's: rejection accepts 1 - D. Coupled verification accepts
when argmax(log draft + noise) = argmax(log target + noise), which for Gumbel noise has the probability
sum_i 1 / sum_j max(target_j / target_i, draft_j / draft_i), at least (1 - D) / (1 + D) and at most 1 - D.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hspark.core import SOURCE_MODEL, Chain
from hspark.sampling import STREAM_COUPLED, STREAM_DRAFT, gumbel_noise, slot_key
from hspark.verify import Seeds, pack, verifier

COPIES = 40_000


def _coupled_acceptance(target: Tensor, draft: Tensor) -> float:
    """The probability that both argmaxes agree, from the races of exponential clocks that Gumbel noise is."""
    total = 0.0
    for i in range(len(target)):
        if target[i] > 0 and draft[i] > 0:
            total += 1 / float(torch.maximum(target / target[i], draft / draft[i]).sum())
    return total


def _accepted(name: str, target: Tensor, draft: Tensor, shared: bool) -> float:
    """The measured rate for one slot with sampled drafts, which share the noise of their position or do not."""
    seed, anchor, vocab = torch.arange(COPIES), torch.full((COPIES,), 7), len(target)
    stream, key = (STREAM_COUPLED, anchor + 1) if shared else (STREAM_DRAFT, slot_key(anchor, 0))
    tokens = (draft.log() + gumbel_noise(seed, key, vocab, stream)).argmax(-1)[:, None]
    one = torch.ones_like(seed)
    chain = Chain.build(
        tokens,
        one,
        torch.ones(COPIES, 1),
        source=SOURCE_MODEL,
        point_mass=torch.zeros(COPIES, 1, dtype=torch.bool),
        log_probs=draft.log().expand(COPIES, 1, vocab),
    )
    layout = pack(one, one > 0, 1, 2 * COPIES)
    verdict = verifier(name)(target.log().expand(2 * COPIES, vocab), layout, chain, one, Seeds(seed, anchor))
    return float(verdict.accepted.float().mean())


def _pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for closeness in (0.0, 0.3, 0.6, 0.9, 1.0):
        target = (torch.randn(8, generator=generator) * 1.5).softmax(-1)
        other = (torch.randn(8, generator=generator) * 1.5).softmax(-1)
        pairs.append((target, closeness * target + (1 - closeness) * other))
    return pairs


@pytest.mark.parametrize("pair", range(5))
def test_acceptance_follows_theory(pair: int) -> None:
    """Each measured rate within five standard deviations of theory: a false alarm once in two million."""
    target, draft = _pairs()[pair]
    distance = 0.5 * float((target - draft).abs().sum())
    theory = {"rejection": 1 - distance, "coupled": _coupled_acceptance(target, draft)}
    assert (1 - distance) / (1 + distance) - 1e-6 <= theory["coupled"] <= 1 - distance + 1e-6
    for name, expected in theory.items():
        measured = _accepted(name, target, draft, shared=name == "coupled")
        deviation = math.sqrt(max(expected * (1 - expected), 0.0) / COPIES)
        assert abs(measured - expected) <= 5 * deviation + 1e-5, (name, measured, expected)
    # The control: without the shared noise, two independent draws agree less often than theory says of shared ones.
    independent = float((target * draft).sum())
    assert _accepted("coupled", target, draft, shared=False) == pytest.approx(independent, abs=0.013)
    assert independent < theory["coupled"] - 0.05


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=10))
def test_coupled_acceptance_lies_between_its_bounds(weights: list[tuple[int, int]]) -> None:
    target, draft = torch.tensor(weights, dtype=torch.float64).T
    target, draft = target / target.sum(), draft / draft.sum()
    distance = 0.5 * float((target - draft).abs().sum())
    rate = _coupled_acceptance(target, draft)
    assert (1 - distance) / (1 + distance) - 1e-12 <= rate <= 1 - distance + 1e-12


def test_point_mass_drafts_are_accepted_alike() -> None:
    """For a deterministic draft both verifiers accept with the target's probability of it: no choice costs speed."""
    target = torch.tensor([0.45, 0.3, 0.2, 0.05])
    seed = torch.arange(COPIES)
    one = torch.ones_like(seed)
    layout = pack(one, one > 0, 1, 2 * COPIES)
    for token in range(4):
        chain = Chain.build(one[:, None] * token, one, torch.ones(COPIES, 1), source=SOURCE_MODEL)
        deviation = math.sqrt(float(target[token] * (1 - target[token])) / COPIES)
        for name in ("rejection", "coupled"):
            verdict = verifier(name)(target.log().expand(2 * COPIES, 4), layout, chain, one, Seeds(seed, seed * 0))
            assert abs(float(verdict.accepted.float().mean()) - float(target[token])) < 5 * deviation
