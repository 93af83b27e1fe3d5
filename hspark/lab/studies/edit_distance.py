"""Speed-up over plain decoding by how much of the program an answer changes (figures 1 and 5, table 11)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hspark.lab.editing import BUCKET_PERCENT, bucket, output_distance
from hspark.lab.studies.lab import Lab
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.studies.plotting import interval_series
from hspark.lab.studies.published import published
from hspark.lab.studies.serving import relative
from hspark.lab.studies.statistics import Bootstrap, Interval, interval
from hspark.lab.study import Plot, Series, Study, Table

Array = NDArray[Any]
# Outputs that a bucket has at least; neighbours are merged until it has.
SMALLEST = 8
# name -> (policy, budget, what it is called)
ARMS = {
    "model_only": ("model_only", "adaptive", "model drafter"),
    "ngram_all": ("ngram_only", "all", "n-gram, every draft verified"),
    "ngram_only": ("ngram_only", "adaptive", "n-gram, adaptive verification"),
    "proposed": ("proposed", "adaptive", "hybrid"),
}


class Part(NamedTuple):
    """Outputs int64 [n] whose distance is at least `low` and below `high` per cent; mean: their mean distance."""

    low: int
    high: int
    outputs: Array
    mean: float

    @property
    def name(self) -> str:
        return f"{self.low}-{self.high}%"


def distances(lab: Lab) -> Array:
    """float64 [M]: normalised distance between the program of each output's request and its code; NaN without one."""
    programs, decode = lab.options.programs, lab.options.decode
    if not programs or decode is None:
        raise LeftOutError(
            "edit_distance needs the programs that the requests edit; give the workload file, with --workload"
        )
    found = np.full(lab.table.outputs, np.nan)
    for index, task_id in enumerate(lab.table.task_ids):
        if task_id in programs:
            tokens = lab.table.token[lab.table.start[index] : lab.table.start[index + 1]]
            found[index] = output_distance(programs[task_id], decode(tokens.tolist()))
    if np.isnan(found).all():
        raise LeftOutError(
            "edit_distance: no output answers an edit of the workload; give the workload it was recorded on"
        )
    return found


def merged_buckets(distance: Array, smallest: int = SMALLEST) -> list[Part]:
    """5% buckets, joined with their right neighbours until each has `smallest` outputs (the last: with its left)."""
    known = np.flatnonzero(~np.isnan(distance))
    edges = np.array([bucket(float(distance[m])) for m in known])
    parts: list[tuple[int, int, list[int]]] = []
    low, waiting = 0, []
    for edge in sorted({*edges.tolist()}):
        waiting += known[edges == edge].tolist()
        if len(waiting) >= smallest:
            parts.append((low, edge + BUCKET_PERCENT, waiting))
            low, waiting = edge + BUCKET_PERCENT, []
    if waiting:
        end = max(int(edges.max()) + BUCKET_PERCENT, low + BUCKET_PERCENT)
        before = parts.pop() if parts else (0, 0, [])
        parts.append((before[0], end, before[2] + waiting))
    return [Part(a, b, np.sort(np.array(m)), float(distance[m].mean())) for a, b, m in parts]


def edit_distance(lab: Lab) -> Study:
    lab.need_model("edit_distance")
    distance, batch = distances(lab), lab.options.batch_sizes[0]
    parts = merged_buckets(distance)
    found: dict[str, list[Interval]] = {name: [] for name in ARMS}
    over: list[Interval] = []
    for part in parts:
        prepared = lab.prepared(outputs=part.outputs)
        numbers = np.unique(lab.prompts[part.outputs], return_inverse=True)[1]
        bootstrap = Bootstrap(numbers, lab.options.resamples)
        plain = lab.serve_prepared(prepared, "vanilla", batch)
        served = {n: lab.serve_prepared(prepared, policy, batch, budget) for n, (policy, budget, _) in ARMS.items()}
        for name, each in served.items():
            found[name].append(interval(relative(each, plain, bootstrap)))
        over.append(interval(relative(served["proposed"], served["model_only"], bootstrap)))
    rows: list[list[Any]] = []
    for index, part in enumerate(parts):
        for name, (_, _, title) in ARMS.items():
            rows.append([part.name, len(part.outputs), 100 * part.mean, title, *found[name][index]])
    columns = [
        "edit distance",
        "outputs",
        "mean distance (%)",
        "drafting",
        "speed-up over vanilla",
        "95% low",
        "95% high",
    ]
    note = _note(lab, batch, int(np.isnan(distance).sum()))
    return Study(
        name="edit_distance",
        title="",
        source="",
        question="How does the speed-up depend on how much of the program the answer keeps?",
        finding=_finding(parts, found, over, batch),
        tables=[
            Table("Speed-up by edit distance", columns, rows, note),
            Table(
                "Hybrid over the model drafter alone",
                ["edit distance", "outputs", "hybrid over model drafter", "95% low", "95% high"],
                [[part.name, len(part.outputs), *ratio] for part, ratio in zip(parts, over, strict=True)],
            ),
        ],
        plots=[_plot(parts, found, batch)],
        data={"edited_outputs": int((~np.isnan(distance)).sum()), "batch_size": batch, "smallest_bucket": SMALLEST},
    )


def _note(lab: Lab, batch: int, missing: int) -> str:
    without = f" {missing} outputs without a program are left out." if missing else ""
    return (
        f"Buckets of {BUCKET_PERCENT}% are joined until each has {SMALLEST} outputs. Each is served on its own at "
        f"batch {batch}.{without} {lab.cost_note}"
    )


def _plot(parts: list[Part], found: dict[str, list[Interval]], batch: int) -> Plot:
    x = [100 * part.mean for part in parts]
    series = [interval_series(ARMS[name][2], x, values) for name, values in found.items()]
    paper = published()["edit_distance"]
    for name, values in paper.get(str(batch), {}).items():
        middle: list[float | str] = [BUCKET_PERCENT * (index + 0.5) for index in range(len(values))]
        series.append(Series(f"paper, {ARMS[name][2]}", middle, values, published=True))
    return Plot(
        f"Speed-up over vanilla decoding by edit distance, batch {batch}",
        "normalised edit distance (%)",
        "speed-up over vanilla decoding",
        series,
        note=f"Ours at each bucket's mean distance. The paper: {paper['from']}.",
    )


def _finding(parts: list[Part], found: dict[str, list[Interval]], over: list[Interval], batch: int) -> str:
    def ends(name: str) -> str:
        values = found[name]
        return f"{values[0].value:.2f}" + (f" and {values[-1].value:.2f}" if len(parts) > 1 else "")

    where = f"{parts[0].name}" + (f" and {parts[-1].name}" if len(parts) > 1 else "")
    words = [
        f"At batch {batch}, where {where} of the program is changed, the hybrid decodes {ends('proposed')} times as "
        f"fast as vanilla decoding, the model drafter alone {ends('model_only')}, n-grams alone {ends('ngram_only')}."
    ]
    best = sum(
        found["proposed"][i].value >= max(found[name][i].value for name in ("model_only", "ngram_only", "ngram_all"))
        for i in range(len(parts))
    )
    words.append(f"The hybrid is at least as fast as each drafter alone in {best} of {len(parts)} buckets.")
    gain = f"{over[0]}" + (f" in the first bucket and {over[-1]} in the last" if len(parts) > 1 else "")
    words.append(f"Over the model drafter its throughput is {gain}.")
    return " ".join(words)
