"""Acceptance length and speed-up by the length of the context (figure 9)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hspark.lab.studies.lab import Lab
from hspark.lab.studies.plotting import interval_series
from hspark.lab.studies.serving import Served
from hspark.lab.studies.statistics import Interval, divided, interval
from hspark.lab.study import Plot, Study, Table

Array = NDArray[Any]
BUCKETS = 4
POLICIES = ("model_only", "ngram_only", "proposed")


def context_edges(lab: Lab) -> Array:
    """int64 [K + 1]: contexts (prompt and output tokens) that cut the positions into up to four equal parts.

    Bucket k holds contexts from edge k up to, but not including, edge k + 1.
    """
    context = _contexts(lab)
    inner = np.quantile(context, np.arange(1, BUCKETS) / BUCKETS, method="higher").astype(np.int64)
    return np.unique(np.concatenate([[context.min()], inner, [context.max() + 1]]))


def _contexts(lab: Lab) -> Array:
    table = lab.table
    return table.prompt_length[table.output].astype(np.int64) + table.position


def context_length(lab: Lab) -> Study:
    batch, edges = lab.options.batch_sizes[0], context_edges(lab)
    names = POLICIES if lab.has_model else ("ngram_only",)
    served = {name: lab.serve(name, batch) for name in (*names, "vanilla")}
    base = "model_only" if lab.has_model else "vanilla"
    parts = [f"{low}-{high - 1}" for low, high in pairwise(edges.tolist())]
    in_table = np.histogram(_contexts(lab), bins=edges)[0]
    length = {name: [interval(a) for a in _ratios(lab, served[name], edges, "length")] for name in names}
    speed = {name: _ratios(lab, each, edges, "speed") for name, each in served.items()}
    over = {
        n: [interval(divided(a, b)) for a, b in zip(speed[n], speed[base], strict=True)] for n in names if n != base
    }
    plain = {n: [interval(divided(a, b)) for a, b in zip(speed[n], speed["vanilla"], strict=True)] for n in names}
    rows: list[list[Any]] = []
    for index, part in enumerate(parts):
        for name in names:
            ratio: Any = over[name][index] if name in over else (1.0, None, None)
            rows.append([part, int(in_table[index]), name, *length[name][index], *ratio, plain[name][index].value])
    columns = ["context (tokens)", "positions", "policy", "tokens per step", "95% low", "95% high",
               f"speed-up over {base}", "95% low", "95% high", "speed-up over vanilla"]  # fmt: skip
    main = "proposed" if "proposed" in over else "ngram_only"
    ends = length[main][0], length[main][-1]
    return Study(
        name="context_length",
        title="",
        source="",
        question="Does the gain depend on how much context there is to copy from?",
        finding=f"At batch {batch}, {main} emits {ends[0]} tokens per step at contexts of {parts[0]} tokens and "
        f"{ends[1]} at {parts[-1]}; its speed-up over {base} goes from {over[main][0]} to {over[main][-1]}. The "
        f"contexts here are {edges[0]} to {edges[-1] - 1} tokens, against the paper's 1,000 to 8,000, and a longer "
        "context is also a later place in the output.",
        tables=[Table(f"By context, batch {batch}", columns, rows, lab.cost_note)],
        plots=[
            _plot("Acceptance length by context", "tokens per step and request", parts, length),
            _plot(f"Speed-up over {base} by context", f"speed-up over {base}", parts, over),
        ],
        data={"edges": edges.tolist(), "batch_size": batch},
    )


def _ratios(lab: Lab, served: Served, edges: Array, kind: str) -> list[Array]:
    """By bucket of context: tokens per step ("length") or per second ("speed"), each [1 + R]."""
    context = lab.table.prompt_length[served.output].astype(np.int64) + served.position
    bucket = np.searchsorted(edges, context, side="right") - 1
    whole = np.ones_like(served.seconds) if kind == "length" else served.seconds
    found = []
    for index in range(len(edges) - 1):
        inside = bucket == index
        part, rest = (served.summed(np.where(inside, values, 0)) for values in (served.tokens, whole))
        found.append(lab.bootstrap.ratio(part, rest))
    return found


def _plot(title: str, label: str, parts: list[str], values: dict[str, list[Interval]]) -> Plot:
    series = [interval_series(name, parts, each) for name, each in values.items()]
    return Plot(title, "context (tokens, quarters of the positions)", label, series, kind="bar")
