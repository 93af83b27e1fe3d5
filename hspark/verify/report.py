"""What `check` found, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-10  # total variation; rounding alone stays below 1e-14
FALSE_ALARM = 1e-6  # of a whole `check`, over all its tests
BIAS = 0.1  # the total variation for which the miss rate is stated
MOST_MISSED = 0.05  # a test that passes BIAS more often has too few samples to judge anything


@dataclass(frozen=True)
class Report:
    """What `check` found in one setting, or over several: then every count is their sum and `parts` holds them.

    examples: worlds tried; sampled_examples: those in which the verifier's own code ran on at least `samples` copies
    (over several settings, the fewest of any).
    verified_slots: draft slots that it verified, over all copies. joint_steps: steps of a batch in which two or more
    requests had such slots.
    worst_total_variation: over the enumerated examples, None if nothing was enumerated; worst_seed: the example.
    mismatches: outputs that are not what the same seed gives without drafts, None if the verifier does not claim it.
    tests: chi-square tests made; worst_p_value: the smallest of them, None without any; a test rejects below
    FALSE_ALARM / tests. miss_rate: how often the weakest of them passes a law at total variation BIAS.
    by_rule: why the combination loses exactness with any verifier that depends on the drafts, None if it does not.
    verdict_error: what is wrong with the form of the verifier's answers. failures: why not lossless.
    """

    verifier: str
    policy: str
    drafting: str
    temperature: str
    examples: int = 0
    worst_total_variation: float | None = None
    worst_seed: int | None = None
    mismatches: int | None = None
    sampled_examples: int = 0
    samples: int = 0
    verified_slots: int = 0
    joint_steps: int = 0
    tests: int = 0
    worst_p_value: float | None = None
    miss_rate: float | None = None
    by_rule: str | None = None
    verdict_error: str | None = None
    failures: tuple[str, ...] = ()
    parts: tuple[Report, ...] = ()

    @property
    def lossless(self) -> bool:
        return not self.failures


def find_failures(report: Report, tests: int, drafts: bool) -> tuple[str, ...]:
    """Why a report of one setting is not one of a lossless combination.

    tests: over which the false-alarm rate is shared out. drafts: whether the policy uses a drafter.
    """
    if report.verdict_error is not None:
        return (f"the verifier's answer is malformed: {report.verdict_error}",)
    if report.by_rule is not None:
        return (f"lossy by rule, whatever verifier of this kind is used: {report.by_rule}",)
    found = []
    if report.worst_total_variation is not None and not report.worst_total_variation < TOLERANCE:
        found.append(
            f"total variation {report.worst_total_variation:.3g} from the target (example {report.worst_seed})"
        )
    if report.mismatches:
        found.append(f"{report.mismatches} outputs differ from plain decoding with the same seed")
    if report.worst_p_value is not None and report.worst_p_value < FALSE_ALARM / tests:
        found.append(
            f"samples reject the target's law (p = {report.worst_p_value:.3g} < {FALSE_ALARM:g} / {tests} tests)"
        )
    return (*found, *_not_judged(report, drafts))


def _not_judged(report: Report, drafts: bool) -> list[str]:
    """What kept the verifier's code from being judged. A policy without drafters has no slots to verify."""
    if not report.sampled_examples and report.mismatches is None:
        return ["not judged: the verifier's own code did not run; use sampled of at least 1"]
    if drafts and not report.verified_slots:
        return ["not judged: no draft slot was verified in any example; use worlds with drafts and a budget for them"]
    if report.miss_rate is not None and report.miss_rate > MOST_MISSED:
        return [
            f"not judged: samples={report.samples} let a total variation of {BIAS:g} pass with a probability of up to "
            f"{report.miss_rate:.2g}; use more"
        ]
    return []


def merge(verifier: str, policy: str, parts: Sequence[Report]) -> Report:
    """One report of several settings; a single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]

    def names(values: Sequence[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    distances = [(p.worst_total_variation, p.worst_seed) for p in parts if p.worst_total_variation is not None]
    distance, seed = max(distances, key=lambda pair: pair[0], default=(None, None))
    return Report(
        verifier,
        policy,
        names([part.drafting for part in parts]),
        names([part.temperature for part in parts]),
        examples=sum(part.examples for part in parts),
        worst_total_variation=distance,
        worst_seed=seed,
        mismatches=_sum([part.mismatches for part in parts]),
        sampled_examples=sum(part.sampled_examples for part in parts),
        samples=min(part.samples for part in parts),
        verified_slots=sum(part.verified_slots for part in parts),
        joint_steps=sum(part.joint_steps for part in parts),
        tests=sum(part.tests for part in parts),
        worst_p_value=min((p.worst_p_value for p in parts if p.worst_p_value is not None), default=None),
        miss_rate=max((p.miss_rate for p in parts if p.miss_rate is not None), default=None),
        by_rule=next((part.by_rule for part in parts if part.by_rule is not None), None),
        verdict_error=next((part.verdict_error for part in parts if part.verdict_error is not None), None),
        failures=tuple(
            f"T {part.temperature}, {part.drafting} drafts, policy {part.policy!r}: {failure}"
            for part in parts
            for failure in part.failures
        ),
        parts=tuple(parts),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
