"""`check` on verifiers that it does not know: what it must catch by default, and what it must not call lossless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hspark.policy import LinearCost, policy
from hspark.verify import Chain, Layout, RejectionVerifier, Report, Seeds, Verdict, World, check
from hspark.verify.controls import NoResidual, ResidualMinusDraftedToken
from hspark.verify.coupled import CoupledVerifier
from hspark.verify.exact import Sizing
from hspark.verify.examples import busy_example, lossy_examples, random_world
from hspark.verify.report import FALSE_ALARM, find_failures
from tests.lossless.foreign import (
    AcceptsAllWhenGreedy,
    Foreign,
    NeighboursShareUniforms,
    OneUniformPerRow,
    SameUniformsInEveryStep,
)


class _Renamed:
    """A verifier that the suite knows nothing of."""

    name = "renamed"

    def __init__(self, inner: Any, **changes: Any) -> None:
        self.inner, self.changes = inner, changes

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Any:
        return self.inner(log_probs, layout, chain, kept, seeds, greedy=greedy)


@pytest.fixture(scope="module")
def right() -> Report:
    return check(Foreign(), "proposed")


@pytest.mark.slow
def test_a_right_verifier_passes_the_default_check_which_says_what_it_judged(right: Report) -> None:
    """A false alarm once in a million runs, over all 120 tests."""
    assert right.lossless, right.failures
    settings = [(part.temperature, part.drafting, part.policy) for part in right.parts]
    assert settings == [
        (">0", "greedy", "proposed"),
        (">0", "probabilistic", "extension"),  # "proposed" reads the samples
        ("0", "greedy", "proposed"),
        ("0", "probabilistic", "proposed"),
    ]
    assert right.examples == right.sampled_examples == 4 * 20
    assert right.tests == 2 * 20 + 2 * 2 * 20  # at temperature 0 with and without greedy=True
    assert right.samples == 2000
    assert right.parts[0].samples == 10_000
    assert right.miss_rate is not None
    assert right.miss_rate < 1e-4
    for part in right.parts:
        assert part.verified_slots > 100_000
        assert part.joint_steps > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        NeighboursShareUniforms(),
        OneUniformPerRow(),
        SameUniformsInEveryStep(),
        AcceptsAllWhenGreedy(),
        ResidualMinusDraftedToken(),
    ],
    ids=lambda wrong: wrong.name,
)
def test_the_default_check_catches(wrong: Any) -> None:
    report = check(wrong, "proposed")
    assert not report.lossless
    assert "samples reject the target's law" in report.failures[0]


def test_the_greedy_flag_is_judged_at_temperature_0() -> None:
    """Both ways of drafting; without the flag the same verifier is right there."""
    for drafting in ("greedy", "probabilistic"):
        options: dict[str, Any] = {"drafting": drafting, "greedy_target": True, "examples": 8, "samples": 1000}
        assert check(Foreign(), "model_only", **options).lossless
        report = check(AcceptsAllWhenGreedy(), "model_only", **options)
        assert report.worst_p_value == 0.0
        assert report.tests == 16


@pytest.mark.parametrize("name", ["proposed", "model_only", "ngram_only"])
def test_busy_examples_verify_every_slot_of_several_requests_at_once(name: str) -> None:
    worlds = [busy_example(2, (2, 4, 2, 3, 2))]
    report = check(Foreign(), name, drafting="greedy", worlds=worlds, samples=5000)
    assert report.joint_steps >= 5000  # all copies, in the first step at least
    assert report.verified_slots >= 2 * 2 * 5000
    assert report.lossless, report.failures


def test_what_a_single_request_does_not_show() -> None:
    """The control of the one above: shared noise shows in the joint law of two requests only."""
    options: dict[str, Any] = {"drafting": "greedy", "samples": 5000}
    assert not check(
        NeighboursShareUniforms(), "model_only", worlds=[busy_example(2, (2, 4, 2, 3, 2))], **options
    ).lossless
    alone = check(NeighboursShareUniforms(), "model_only", worlds=[busy_example(2, (2, 4, 2, 3, 1))], **options)
    assert alone.joint_steps == 0


# --- Nothing judged ---


def test_nothing_judged_is_not_lossless() -> None:
    for name in ("rejection", Foreign()):
        report = check(name, "proposed", drafting="greedy", greedy_target=False, examples=2, sampled=0)
        assert not report.lossless
        assert "not judged: the verifier's own code did not run" in report.failures[0]
        assert report.sampled_examples == report.tests == 0
    world, _ = busy_example(0)
    for idle in (Sizing(budget=0), Sizing(budget=5)):
        tried = (
            world
            if idle.budget == 0
            else replace(world, model_length=world.model_length * 0, free_length=world.free_length * 0)
        )
        report = check(NoResidual(), "proposed", drafting="greedy", worlds=[(tried, idle)], samples=3000)
        assert report.failures[0].startswith("not judged: no draft slot was verified")
        assert report.verified_slots == 0
    few = check(Foreign(), "proposed", drafting="greedy", greedy_target=False, examples=2, samples=1)
    assert "not judged: samples=1 let a total variation of 0.1 pass" in few.failures[0]


def test_a_policy_without_drafters_is_plain_decoding() -> None:
    """There are no slots to verify, and the tokens that the verifier draws are judged."""
    options: dict[str, Any] = {"drafting": "greedy", "greedy_target": False, "examples": 2, "samples": 5000}
    assert check(Foreign(), "vanilla", **options).lossless

    class Uniform(Foreign):
        def __call__(self, log_probs: Tensor, *arguments: Any, **options: Any) -> Verdict:
            return super().__call__(torch.zeros_like(log_probs), *arguments, **options)

    assert "samples reject" in check(Uniform(), "vanilla", **options).failures[0]


def test_counts_say_what_was_judged() -> None:
    report = check(Foreign(), "model_only", drafting="greedy", greedy_target=False, examples=2, sampled=5, samples=5000)
    assert (report.examples, report.sampled_examples, report.tests) == (2, 2, 2)
    report = check(Foreign(), "model_only", drafting="greedy", greedy_target=False, examples=3, sampled=1, samples=5000)
    assert (report.examples, report.sampled_examples, report.tests) == (3, 1, 1)


def test_the_false_alarm_rate_is_shared_by_all_tests() -> None:
    report = Report("v", "p", "greedy", ">0", sampled_examples=1, verified_slots=1, worst_p_value=FALSE_ALARM / 2)
    assert find_failures(report, 1, True)
    assert not find_failures(report, 3, True)


# --- Whose fault it is ---


def test_a_combination_that_is_lossy_by_rule_is_not_the_verifiers_fault() -> None:
    options: dict[str, Any] = {"drafting": "probabilistic", "greedy_target": False, "examples": 2, "samples": 3000}
    (failure,) = check(Foreign(), "proposed", **options).failures
    assert failure.startswith("lossy by rule, whatever verifier of this kind is used: policy='proposed'")
    assert 'verify="Foreign"' in failure
    example = lossy_examples()[2]
    worlds = [(example.world, example.sizing)]
    (failure,) = check(Foreign(), "model_only", drafting="probabilistic", worlds=worlds, samples=3000).failures
    assert "budget_delay=0" in failure


def test_a_false_claim_of_coupling_is_caught() -> None:
    options: dict[str, Any] = {"drafting": "greedy", "greedy_target": False, "examples": 2, "sampled": 0}
    report = check(_Renamed(RejectionVerifier()), "model_only", coupled=True, **options)
    assert report.mismatches
    assert "differ from plain decoding" in report.failures[0]


def test_the_claim_that_no_draft_matters_is_compared_with_decoding_without_drafts() -> None:
    """Any noise will do, if it is a function of seed and position; `proposed` may then read the samples."""

    class Independent(_Renamed):
        depends_on_drafts = False

    options: dict[str, Any] = {"drafting": "probabilistic", "greedy_target": False, "examples": 2, "samples": 5000}
    shifted = CoupledVerifier(lambda seed, position, size, stream: CoupledVerifier().noise(seed + 1, position, size, 7))
    report = check(Independent(shifted), "proposed", **options)
    assert (report.lossless, report.mismatches) == (True, 0)
    report = check(Independent(RejectionVerifier()), "model_only", **options)
    assert report.mismatches
    assert check(_Renamed(RejectionVerifier()), "model_only", **options).mismatches is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v._replace(accepted=v.accepted + 9), "accepted is"),
        (lambda v: v._replace(token=v.token + 9), "token is"),
        (lambda v: v._replace(token=v.token.float()), "token is torch.float32"),
        (lambda v: v._replace(accepted=v.accepted[:, None]), "accepted is torch.int64 of shape"),
        (tuple, "it returned tuple without a tensor 'accepted'"),
    ],
)
def test_malformed_answers_are_failures(change: Any, words: str) -> None:
    class Malformed(RejectionVerifier):
        name = "malformed"

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return change(super().__call__(*arguments, **options))

    report = check(Malformed(), "proposed", examples=1, samples=500)
    assert len(report.failures) == 4
    assert f"the verifier's answer is malformed: {words}" in report.failures[0]


def test_bad_input_is_refused_by_name() -> None:
    cases: list[tuple[tuple[Any, Any], dict[str, Any], str]] = [
        (("typical", "proposed"), {}, "verify='typical'"),
        ((object(), "proposed"), {}, "verifier=<object"),
        ((RejectionVerifier, "proposed"), {}, "verifier=RejectionVerifier is a class; use an instance"),
        ((lambda *arguments: None, "proposed"), {}, "verifier=<function"),
        (("coupled", "best"), {}, "policy='best'"),
        (("coupled", type(policy("proposed"))), {}, "policy=Proposed is not a policy"),
        (("coupled", object()), {}, "policy=<object"),
        (("coupled", "proposed"), {"drafting": "soft"}, "drafting='soft'"),
        (("coupled", "proposed"), {"examples": 0}, "examples=0"),
        (("coupled", "proposed"), {"sampled": -1}, "sampled=-1"),
        (("coupled", "proposed"), {"samples": True}, "samples=True"),
        (("coupled", "proposed"), {"shapes": ()}, r"shapes=\(\) is empty"),
        (("coupled", "proposed"), {"worlds": []}, "worlds is empty"),
        (("coupled", "proposed"), {"worlds": [busy_example(0)], "greedy_target": True}, "greedy_target=True"),
        (("coupled", "proposed"), {"worlds": [busy_example(0), busy_example(0, greedy=True)]}, "worlds holds targets"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            check(*arguments, **options)


@pytest.mark.parametrize("lookup", [0, 2])
def test_worlds_without_a_model_drafter(lookup: int) -> None:
    """K = 0, with and without a model-free drafter beside it."""
    world = random_world(1, (2, 3, 0, lookup, 2))
    assert isinstance(world, World)
    assert (world.model_width, world.width) == (0, lookup)
    for drafting in ("greedy", "probabilistic"):
        worlds = [(world, Sizing(budget=4)), (world, Sizing(cost=LinearCost(1.0, 0.1), delay=1))]
        report = check(
            "rejection", "ngram_only" if lookup else "vanilla", drafting=drafting, worlds=worlds, samples=5000
        )
        assert report.lossless, report.failures
        assert report.worst_total_variation is not None
