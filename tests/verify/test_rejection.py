"""Rejection verification: accept probabilities, residuals, and the corners where floating point bites."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspark.core import SOURCE_MODEL, Chain
from hspark.sampling import STREAM_ACCEPT, STREAM_DRAFT, STREAM_RECOVER, gumbel_noise, slot_key, uniform_noise
from hspark.verify import RejectionVerifier, Seeds, Verdict, pack, verifier
from hspark.verify.rule import Rule, Slot
from hspark.verify.statistics import chi_square
from tests.verify.cases import Case, expected_match, random_case

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


def _plain_step(case: Case, b: int) -> tuple[int, int]:
    """Row b of a step in plain Python: accepted count and token. Each slot of each step has noise of its own: a uniform
    number for acceptance, and one Gumbel vector for the token at the slot where the row stops."""
    seed, anchor = case.seeds.seed[b], case.seeds.anchor[b]
    k, kept = 0, min(int(case.kept[b]), int(case.chain.length[b]))
    weights = case.laws[b, kept].double().exp()
    while k < kept:
        draft = case.laws[b, k] if case.chain.log_probs is None else case.chain.log_probs[b, k]
        slot = Slot(
            case.laws[b : b + 1, k].double().exp(),
            draft[None].double().exp(),
            case.chain.tokens[b : b + 1, k],
            case.chain.point_mass[b : b + 1, k],
        )
        if float(uniform_noise(seed, slot_key(anchor, k), STREAM_ACCEPT)) >= float(Rule().accept(slot)):
            weights = Rule().residual(slot)[0]
            break
        k += 1
    noise = gumbel_noise(seed, slot_key(anchor, k), case.laws.shape[-1], STREAM_RECOVER)
    return k, int((weights.log() + noise).argmax())


@pytest.mark.parametrize("sampled", [True, False])
def test_draws_with_the_noise_of_each_slot(sampled: bool) -> None:
    """Fixed seeds: no uniform number is within rounding of its threshold."""
    stops = set()
    for seed in range(25):
        case = random_case(seed, sampled=sampled, sharp=3.0)
        verdict = REJECTION(*case.arguments)
        for b in range(6):
            assert (int(verdict.accepted[b]), int(verdict.token[b])) == _plain_step(case, b), (seed, b)
        stops |= set(zip(verdict.accepted.tolist(), case.kept.tolist(), strict=True))
    assert {(0, 2), (1, 2), (2, 2), (1, 1)} <= stops  # recovered at different slots, and bonus tokens


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=30)
def test_greedy_compares_with_the_argmax(seed: int, sampled: bool) -> None:
    """Any monotone transform of the logits will do, and drafts that are not the argmax are refused."""
    case = random_case(seed, sampled=sampled)
    verdict = REJECTION(case.log_probs * 3 - 7, *case.arguments[1:], greedy=True)
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == expected_match(case, case.laws.argmax(-1))


@given(st.integers(0, 2**32), st.integers(0, 4), st.booleans())
@settings(max_examples=30)
def test_a_count_past_the_chain_is_that_of_the_chain(seed: int, short: int, sampled: bool) -> None:
    """Accepted count and token: after the last draft comes a bonus token, not one recovered from filler."""
    case = random_case(seed, batch=20, sampled=sampled, sharp=0.3)
    chain = case.chain._replace(length=case.chain.length.clamp(max=short))
    kept = torch.full((20,), 4)
    layout = pack(kept, torch.ones(20, dtype=torch.bool), 4, 100)
    log_probs = case.laws[layout.row, layout.offset]
    one = REJECTION(log_probs, layout, chain, kept, case.seeds)
    two = REJECTION(log_probs, layout, chain, chain.length, case.seeds)
    assert torch.equal(one.accepted, two.accepted)
    assert torch.equal(one.token, two.token)


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
