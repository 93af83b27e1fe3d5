"""Rejection verification: accept probabilities, residuals, and the corners where floating point bites."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspark.core import SOURCE_MODEL, Chain
from hspark.sampling import STREAM_DRAFT, gumbel_noise, slot_key
from hspark.verify import RejectionVerifier, Seeds, Verdict, pack, verifier
from hspark.verify.rule import Rule, Slot
from hspark.verify.statistics import chi_square
from tests.verify.cases import random_case

REJECTION = RejectionVerifier()
FALSE_ALARM = 1e-6


@given(st.integers(0, 2**32))
@settings(max_examples=40)
def test_follows_the_rule_in_float64(seed: int) -> None:
    """Accept probabilities and residuals of every slot, point masses and samples mixed, against the exact rule."""
    case = random_case(seed, sampled=True)
    assert case.chain.log_probs is not None
    batch, width = case.chain.tokens.shape
    kept = torch.full((batch,), width)
    layout = pack(kept, torch.ones(batch, dtype=torch.bool), width, batch * (width + 1))
    log_probs = case.laws[layout.row, layout.offset]
    accept = REJECTION.accept_probs(log_probs, layout, case.chain)
    for k in range(width):
        slot = Slot(
            case.laws[:, k].double().exp(),
            case.chain.log_probs[:, k].double().exp(),
            case.chain.tokens[:, k],
            case.chain.point_mass[:, k],
        )
        torch.testing.assert_close(accept[:, k].double(), Rule().accept(slot), rtol=1e-5, atol=1e-6)
        residual = REJECTION.residual_log_probs(case.laws[:, k], case.chain, torch.full((batch,), k))
        torch.testing.assert_close(residual.softmax(-1).double(), Rule().residual(slot), rtol=1e-4, atol=1e-6)


def _draw(target: Tensor, draft: Tensor, copies: int, width: int = 1, sampled: bool = True) -> tuple[Tensor, Verdict]:
    """Many copies of one row: drafts [copies, width] from draft [V], verified against target [V] at every slot."""
    counters, vocab = torch.arange(copies), target.shape[0]
    seed, anchor = counters, torch.full_like(counters, 3)
    key = slot_key(anchor[:, None], torch.arange(width))
    noise = gumbel_noise(seed[:, None].expand(copies, width), key, vocab, STREAM_DRAFT)
    tokens = (draft.log() + noise).argmax(-1) if sampled else draft.argmax().expand(copies, width)
    chain = Chain.build(
        tokens,
        torch.full_like(counters, width),
        torch.ones(copies, width),
        source=SOURCE_MODEL,
        point_mass=torch.full((copies, width), not sampled),
        log_probs=draft.log().expand(copies, width, vocab),
    )
    layout = pack(torch.full_like(counters, width), counters >= 0, width, copies * (width + 1))
    laws = target.log().expand(layout.row.shape[0], vocab)
    return tokens, verifier("rejection")(laws, layout, chain, torch.full_like(counters, width), Seeds(seed, anchor))


TARGET = torch.tensor([0.55, 0.25, 0.15, 0.05])


@pytest.mark.parametrize(
    "draft",
    [[0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.1, 0.8], [0.0, 0.5, 0.5, 0.0], [0.55, 0.25, 0.15, 0.05]],
    ids=["uniform", "opposed", "with zeros", "equal"],
)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "argmax"])
def test_one_slot_keeps_the_law_and_accepts_what_theory_says(draft: list[float], sampled: bool) -> None:
    copies = 100_000
    law = torch.tensor(draft)
    tokens, verdict = _draw(TARGET, law, copies, sampled=sampled)
    first = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.token)
    assert chi_square(torch.bincount(first, minlength=4), TARGET) > FALSE_ALARM
    expected = float(torch.minimum(TARGET, law).sum()) if sampled else float(TARGET[law.argmax()])
    deviation = math.sqrt(expected * (1 - expected) / copies)
    assert abs(float((verdict.accepted > 0).float().mean()) - expected) <= 5 * deviation + 1e-9


def test_control_argmax_drafts_taken_for_samples_are_caught() -> None:
    """The same drafts with the wrong flag: excess mass on the argmax."""
    draft = torch.tensor([0.4, 0.3, 0.2, 0.1])
    copies = 100_000
    counters = torch.arange(copies)
    chain = Chain.build(
        torch.zeros(copies, 1, dtype=torch.int64),
        torch.ones_like(counters),
        torch.ones(copies, 1),
        source=SOURCE_MODEL,
        point_mass=torch.zeros(copies, 1, dtype=torch.bool),
        log_probs=draft.log().expand(copies, 1, 4),
    )
    layout = pack(torch.ones_like(counters), counters >= 0, 1, 2 * copies)
    verdict = REJECTION(
        TARGET.log().expand(2 * copies, 4), layout, chain, torch.ones_like(counters), Seeds(counters, counters)
    )
    first = torch.where(verdict.accepted > 0, 0, verdict.token)
    assert chi_square(torch.bincount(first, minlength=4), TARGET) < FALSE_ALARM


def test_a_drafter_that_is_the_target_is_always_accepted() -> None:
    _, verdict = _draw(TARGET, TARGET.clone(), 10_000, width=3)
    assert bool((verdict.accepted == 3).all())


def test_tokens_the_draft_law_excludes_do_not_break_the_rule() -> None:
    """A drafted token outside its own reported law, and outside the target too: rejected, and recovered validly."""
    draft, target = torch.tensor([1.0, 0.0, 0.0]).log(), torch.tensor([0.5, 0.5, 0.0]).log()
    chain = Chain.build(
        torch.tensor([[2]]),
        torch.tensor([1]),
        torch.ones(1, 1),
        source=SOURCE_MODEL,
        point_mass=torch.tensor([[False]]),
        log_probs=draft.view(1, 1, 3),
    )
    layout = pack(torch.tensor([1]), torch.tensor([True]), 1, 2)
    for seed in range(20):
        seeds = Seeds(torch.tensor([seed]), torch.tensor([0]))
        verdict = REJECTION(target.expand(2, 3), layout, chain, torch.tensor([1]), seeds)
        assert verdict.accepted.tolist() == [0]
        assert verdict.token.tolist() == [1]  # (target - draft)^+ has mass on 1 alone


def test_a_nan_draft_law_costs_acceptance_only() -> None:
    """Rejected always, recovered from the target itself: slower, and still exact."""
    _, verdict = _draw(TARGET, torch.full((4,), math.nan), 50_000)
    assert not bool(verdict.accepted.any())
    assert chi_square(torch.bincount(verdict.token, minlength=4), TARGET) > FALSE_ALARM


def test_draft_laws_may_cover_the_first_slots_only() -> None:
    """A sampled chain with a tail of point masses: the tail's missing laws change nothing."""
    case = random_case(21, batch=50, sampled=True)
    points = case.chain.point_mass.clone()
    points[:, 2:] = True
    assert case.chain.log_probs is not None
    full = case.chain._replace(point_mass=points)
    short = full._replace(log_probs=case.chain.log_probs[:, :2])
    one = REJECTION(case.log_probs, case.layout, full, case.kept, case.seeds)
    two = REJECTION(case.log_probs, case.layout, short, case.kept, case.seeds)
    assert torch.equal(one.accepted, two.accepted)
    assert torch.equal(one.token, two.token)


def test_noise_is_fresh_in_every_step() -> None:
    """Whether a slot is accepted says nothing about the next step's slot, not even for the same position."""
    copies = 50_000
    counters = torch.arange(copies)
    chain = Chain.build(
        torch.zeros(copies, 1, dtype=torch.int64), counters * 0 + 1, torch.ones(copies, 1), source=SOURCE_MODEL
    )
    layout = pack(counters * 0 + 1, counters >= 0, 1, 2 * copies)
    law = torch.full((2 * copies, 2), 0.5).log()
    outcomes = [
        REJECTION(law, layout, chain, counters * 0 + 1, Seeds(counters, torch.full_like(counters, anchor))).accepted
        for anchor in (8, 9)
    ]
    counts = torch.bincount(outcomes[0] * 2 + outcomes[1], minlength=4)
    assert chi_square(counts, torch.full((4,), 0.25)) > FALSE_ALARM
    same = torch.bincount(outcomes[0] * 3, minlength=4)  # the control: the same noise again
    assert chi_square(same, torch.full((4,), 0.25)) < FALSE_ALARM
