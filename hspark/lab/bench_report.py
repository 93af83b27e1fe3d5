"""What a benchmark found: sums, ratios with their intervals, and how often drafts were right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hspark.core import DrafterMetrics, RequestMetrics
from hspark.lab.intervals import stretch
from hspark.lab.runs import BatchRuns, BenchPrompt, Difference, GroupRun

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """A ratio of two arms' speeds and its 95 % interval over groups; no interval from fewer than two."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class DrafterSummary:
    """One drafter's tokens over all requests.

    drafted, verified, accepted: tokens in kept chains, sent to the target, delivered. acceptance_by_position: of the
    verified tokens whose predecessors were all accepted, the share accepted. survival_by_position: of all verified
    tokens at the position, the share accepted. None where there are none.
    """

    drafted: int
    verified: int
    accepted: int
    acceptance_by_position: list[float | None]
    survival_by_position: list[float | None]
    verified_by_position: list[int]


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one batch size, over all repeats.

    tokens_per_second counts all the time, decode_tokens_per_second leaves out the time spent on prompts, and
    prefill_tokens_per_second is of prompt tokens in that time. speedup and decode_speedup are over the baseline arm.
    by_kind: the speed-up for each kind of prompt. forward_seconds: decoding time per forward of the target, with all
    that belongs to it. acceptance_length: output tokens per request and step. mean_running: requests per engine step.
    slots_per_step, mean_budget: draft slots, over the batch; mean_price: lambda, expected tokens per slot. compared,
    different: outputs held against vanilla's, and how many differ. What an arm does not have is None.
    """

    name: str
    requests: int
    tokens: int
    seconds: float
    prefill_seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float
    speedup: Ratio
    decode_speedup: Ratio
    by_kind: dict[str, Ratio]
    speedup_by_repeat: list[float]
    prefill_tokens_per_second: float | None = None
    forward_seconds: float | None = None
    acceptance_length: float | None = None
    steps: int | None = None
    mean_running: float | None = None
    slots_per_step: float | None = None
    mean_budget: float | None = None
    mean_price: float | None = None
    drafters: dict[str, DrafterSummary] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    different: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BatchSummary:
    """All arms at one batch size. runs: the raw timings. baseline: the arm that speed-ups are over."""

    batch_size: int
    arms: list[ArmSummary]
    differences: list[Difference]
    runs: dict[str, Any]
    baseline: str = "vanilla"

    def arm(self, name: str) -> ArmSummary:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class BenchReport:
    """header: machine, versions, workload and settings, JSON-ready."""

    header: dict[str, Any]
    batches: list[BatchSummary]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


def summarise(batch: BatchRuns, prompts: Sequence[BenchPrompt], baseline: str = "vanilla") -> BatchSummary:
    arms = [_summarise_arm(name, batch, prompts, baseline) for name in batch.runs]
    return BatchSummary(batch.batch_size, arms, batch.differences, batch.record(prompts), baseline)


def _summarise_arm(name: str, batch: BatchRuns, prompts: Sequence[BenchPrompt], baseline: str) -> ArmSummary:
    runs = [run for repeat in batch.runs[name] for run in repeat]
    metrics = [each for run in runs for each in run.metrics]
    total = _times(batch.runs[name]).sum(axis=(0, 1))
    steps, tokens = sum(run.steps for run in runs), sum(run.tokens for run in runs)
    row_steps = sum(each.steps for each in metrics)
    drafters = summarise_drafters(metrics)
    own = batch.runs[name], batch.runs[baseline]
    prefill_seconds = sum(run.prefill_seconds for run in runs)
    prompt_tokens = sum(len(prompts[index].token_ids) for group in batch.groups for index in group)
    kinds = dict.fromkeys(batch.kinds)
    pick = {kind: [index for index, each in enumerate(batch.kinds) if each == kind] for kind in kinds}
    return ArmSummary(
        name=name,
        requests=sum(len(run.token_ids) for run in runs),
        tokens=tokens,
        seconds=float(total[1]),
        prefill_seconds=prefill_seconds,
        tokens_per_second=_divide(tokens, total[1]) or 0.0,
        decode_tokens_per_second=_divide(total[2], total[3]) or 0.0,
        speedup=speed_ratio(*own),
        decode_speedup=speed_ratio(*own, decode=True),
        by_kind={kind: speed_ratio(*own, groups=groups) for kind, groups in pick.items()},
        speedup_by_repeat=[speed_ratio([a], [b]).value for a, b in zip(*own, strict=True)],
        prefill_tokens_per_second=_divide(prompt_tokens * len(batch.runs[name]), prefill_seconds),
        forward_seconds=_divide(total[3], sum(run.forwards for run in runs)),
        acceptance_length=_divide(tokens, row_steps),
        steps=steps if metrics else None,
        mean_running=_divide(row_steps, steps),
        slots_per_step=_divide(sum(run.slots for run in runs), steps),
        mean_budget=_divide(sum(run.budget for run in runs), steps) if drafters else None,
        mean_price=_divide(sum(run.price for run in runs), steps) if drafters else None,
        drafters=drafters,
        reasons=_add_up([each.reasons for each in metrics]),
        compared=batch.compared.get(name, 0),
        different=sum(difference.arm == name for difference in batch.differences),
        errors=[error for run in runs for error in run.errors],
    )


def _divide(above: float, below: float) -> float | None:
    return float(above / below) if below else None


def _add_up(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name, 0) for each in counts) for name in names}


# -- speed ---------------------------------------------------------------------------------------------------------


def _times(repeats: Sequence[Sequence[GroupRun]]) -> np.ndarray:
    """float64 [repeats, groups, 4]: tokens, seconds, decode tokens, decode seconds."""
    return np.array([[(r.tokens, r.seconds, r.decode_tokens, r.decode_seconds) for r in runs] for runs in repeats])


def speed_ratio(
    arm: Sequence[Sequence[GroupRun]],
    baseline: Sequence[Sequence[GroupRun]],
    *,
    decode: bool = False,
    groups: Sequence[int] | None = None,
) -> Ratio:
    """Tokens per second of `arm` over those of `baseline`, [repeat][group] each, of all groups or the given ones.

    The interval resamples groups, the same ones for both arms, with all repeats of a group together, and is widened for
    few groups (`stretch`): it says how much the ratio depends on which prompts were drawn, and includes the noise of
    the machine from group to group.
    """
    columns = slice(2, 4) if decode else slice(0, 2)
    # [arm or baseline, groups, tokens or seconds]
    sums = np.stack([_times(arm).sum(axis=0), _times(baseline).sum(axis=0)])[..., columns]
    if groups is not None:
        sums = sums[:, list(groups)]
    value = float(_ratio(sums.sum(axis=1)[:, None])[0])
    count = sums.shape[1]
    if count < 2:
        return Ratio(value)
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    ends = np.quantile(_ratio(sums[:, drawn].sum(axis=2)), [0.025, 0.975])
    low, high = (value * (end / value) ** stretch(count) if value else end for end in ends)  # ratios multiply
    return Ratio(value, float(low), float(high))


def _ratio(sums: np.ndarray) -> np.ndarray:
    """sums [arm or baseline, n, tokens or seconds] -> [n]; 0 where the baseline or the arm has no tokens or no time."""
    speed = np.divide(sums[..., 0], sums[..., 1], out=np.zeros(sums.shape[:2]), where=sums[..., 1] > 0)
    return np.divide(speed[0], speed[1], out=np.zeros(speed.shape[1]), where=speed[1] > 0)


# -- drafts --------------------------------------------------------------------------------------------------------


def summarise_drafters(metrics: Sequence[RequestMetrics]) -> dict[str, DrafterSummary]:
    """Every drafter's counts, added up over requests."""
    names = dict.fromkeys(name for each in metrics for name in each.drafters)
    return {
        name: _summarise_drafter([each.drafters[name] for each in metrics if name in each.drafters]) for name in names
    }


def _summarise_drafter(counts: Sequence[DrafterMetrics]) -> DrafterSummary:
    verified = _columns([each.verified_by_position for each in counts])
    accepted = _columns([each.accepted_by_position for each in counts], len(verified))
    reached = _columns([each.reached_by_position for each in counts], len(verified))
    return DrafterSummary(
        drafted=sum(each.drafted for each in counts),
        verified=sum(each.verified for each in counts),
        accepted=sum(each.accepted for each in counts),
        acceptance_by_position=[_divide(a, r) for a, r in zip(accepted, reached, strict=True)],
        survival_by_position=[_divide(a, v) for a, v in zip(accepted, verified, strict=True)],
        verified_by_position=verified,
    )


def _columns(rows: Sequence[Sequence[int]], width: int = 0) -> list[int]:
    """Sums by position of lists of different lengths."""
    width = max([width, *map(len, rows)])
    return [sum(row[at] for row in rows if at < len(row)) for at in range(width)]
