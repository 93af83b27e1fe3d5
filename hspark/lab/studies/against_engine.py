"""The simulator against the engine: a benchmark's own groups, costs and settings replayed, and held against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hspark.building import settle
from hspark.config import EngineConfig
from hspark.lab.arms import ArmSpec, parse_arm
from hspark.lab.simulate import simulate
from hspark.lab.studies.fits import acceptance
from hspark.lab.studies.lab import Array, Lab
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.study import Plot, Series, Study, Table
from hspark.policy import AcceptanceEstimator, CostModel
from hspark.policy.cost import cost_from


class Pair(NamedTuple):
    """One arm, simulated and measured. length: tokens per request and step. speed: output tokens per second."""

    batch: int
    arm: str
    length: tuple[float, float]
    speed: tuple[float, float]


def against_engine(lab: Lab) -> Study:
    report = lab.options.bench
    if report is None:
        raise LeftOutError(
            "against_engine needs a benchmark of the recorded requests; run `hspark bench FILE --output REPORT` and "
            "give it with --bench"
        )
    header = _checked(report, lab)
    estimates = _estimates(header, lab)
    pairs = [pair for batch in report["batches"] for pair in _pairs(lab, header, batch, estimates)]
    if not pairs:
        raise LeftOutError("bench: the report has no policy with drafts and a measured cost; compare some")
    rows: list[list[Any]] = []
    worst_length = worst_speed = 0.0
    for pair in pairs:
        first = next(each for each in pairs if each.batch == pair.batch)
        over = tuple(mine / theirs for mine, theirs in zip(pair.speed, first.speed, strict=True))
        worst_length = max(worst_length, abs(_error(pair.length)))
        worst_speed = max(worst_speed, abs(_error(over)))
        rows.append([pair.batch, pair.arm, *pair.length, 100 * _error(pair.length), *pair.speed,
                     100 * _error(pair.speed), first.arm, *over, 100 * _error(over)])  # fmt: skip
    columns = ["batch", "policy", "tokens per step, simulated", "measured", "error (%)", "tokens/s, simulated",
               "tokens/s, measured", "error of tokens/s (%)", "speed-up over", "speed-up, simulated",
               "speed-up, measured", "error of the speed-up (%)"]  # fmt: skip
    note = (
        f"The benchmark: {header['model']} in {header['dtype']}, {header['workload']['requests']} requests of "
        f"{header['workload']['name']}, the same groups in the same order; the costs are those that it measured at its "
        "start. Decoding only, without the time spent on prompts."
    )
    return Study(
        name="against_engine",
        title="",
        source="",
        question="Does the simulator say what the engine does?",
        finding=f"Over {len(rows)} arms tokens per step are within {100 * worst_length:.1f}% of those measured, and "
        f"speed-ups over the first arm within {100 * worst_speed:.1f}%.",
        tables=[Table("Simulated and measured", columns, rows, note)],
        plots=[_plot(pairs)],
        data={"worst_length": worst_length, "worst_speedup": worst_speed},
    )


def _error(pair: tuple[float, ...]) -> float:
    return pair[0] / pair[1] - 1


def _checked(report: Mapping[str, Any], lab: Lab) -> dict[str, Any]:
    """The benchmark's header, if this table can say what it did."""
    header = report.get("header") if isinstance(report, Mapping) else None
    if not isinstance(header, dict) or "costs" not in header or "batches" not in report:
        raise LeftOutError("bench: the report has no header with costs; use one that `hspark bench --output` wrote")
    settings = header["settings"]
    if settings["temperature"] or settings["verify"] != "coupled":
        raise LeftOutError("bench: only greedy benchmarks with coupled verification are replayed; make one")
    names = {name for batch in report["batches"] for group in batch["runs"]["groups"] for name in group}
    if missing := sorted(names - set(lab.table.task_ids)):
        raise LeftOutError(f"bench: {len(missing)} of its requests are not in the table, {missing[0]!r} among them")
    place = {name: at for at, name in enumerate(lab.table.task_ids)}
    for name in sorted(names):
        if (limit := int(lab.table.limit[place[name]])) != settings["max_new_tokens"]:
            raise LeftOutError(
                f"bench: it ended outputs after {settings['max_new_tokens']} tokens, and the table {name!r} after "
                f"{limit}; record with the same --max-new-tokens"
            )
    return header


def _estimates(header: dict[str, Any], lab: Lab) -> Array:
    """The estimates that the engine made, at all positions of the table."""
    estimator, _ = AcceptanceEstimator.resolve(header["settings"]["estimator"], header["model"])
    limits = {key: getattr(estimator, key) for key in ("min_match", "max_match", "copy_cap")}
    if any(lab.table.info["ngram"][key] != value for key, value in limits.items()):
        raise LeftOutError(
            f"bench: its n-gram drafter had the limits {limits}, the table's had {lab.table.info['ngram']}; record "
            f"with --min-match {limits['min_match']}"
        )
    return acceptance(estimator, lab.table)


def _pairs(lab: Lab, header: dict[str, Any], batch: Mapping[str, Any], estimates: Array) -> list[Pair]:
    place = {name: at for at, name in enumerate(lab.table.task_ids)}
    groups = [lab.prepared(estimates, np.array([place[name] for name in g])) for g in batch["runs"]["groups"]]
    size, pairs = int(batch["batch_size"]), []
    for arm in batch["arms"]:
        spec = parse_arm(arm["name"])
        cost = None if spec.is_peer else _cost(header, size, spec)
        if cost is None:
            continue
        delay = _delay(header, spec)
        runs = [
            simulate(g, str(spec.policy), cost, batch_size=size, budget=spec.budget, budget_delay=delay) for g in groups
        ]
        tokens, steps = sum(int(run.tokens.sum()) for run in runs), sum(run.row_steps for run in runs)
        speed = tokens / sum(float(run.seconds.sum()) for run in runs)
        lengths, speeds = (tokens / steps, arm["acceptance_length"]), (speed, arm["decode_tokens_per_second"])
        pairs.append(Pair(size, spec.name, lengths, speeds))
    return pairs


def _cost(header: dict[str, Any], size: int, spec: ArmSpec) -> CostModel | None:
    """What the benchmark measured for the arm's drafters; None for an arm without any."""
    models = 0 if header["settings"]["drafter"] is None or not spec.needs_model else 1
    for record in header["costs"]:
        names = record["drafters"]
        if record["batch_size"] != size or len(names) != len(spec.drafter_names(None)) + models:
            continue
        if ("ngram" in names) == ("ngram" in spec.drafter_names(None)):
            values = {key: value for key, value in record.items() if key not in ("batch_size", "drafters")}
            return cost_from(values, "bench: a cost")
    return None


def _delay(header: dict[str, Any], spec: ArmSpec) -> int:
    """The age of the survivals that the arm sized its steps from."""
    settings = header["settings"]
    config = EngineConfig(
        policy=str(spec.policy),
        budget=spec.budget,
        budget_delay=settings["budget_delay"],
        drafting=settings["drafting"],
        allow_lossy=settings["allow_lossy"],
    )
    device = "cpu" if header["machine"]["device"] == "cpu" else "cuda"
    return settle(config, torch.device(device), settings["drafter"] is not None).budget_delay or 0


def _plot(pairs: list[Pair]) -> Plot:
    names: list[float | str] = [f"{pair.arm}, batch {pair.batch}" for pair in pairs]
    kinds = ("simulated", "measured")
    series = [Series(kind, names, [pair.speed[at] for pair in pairs]) for at, kind in enumerate(kinds)]
    return Plot("Decoding speed, simulated and measured", "policy", "tokens/s", series, kind="bar")
