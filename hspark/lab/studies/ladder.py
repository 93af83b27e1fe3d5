"""The estimator with fewer terms (tables 6 and 7), and with the coefficients of other models (section 5.5)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hspark.lab.studies.estimator import calibration
from hspark.lab.studies.lab import Lab
from hspark.lab.studies.plotting import interval_series
from hspark.lab.studies.published import published
from hspark.lab.studies.serving import pooled, relative
from hspark.lab.studies.statistics import Interval, interval
from hspark.lab.study import Plot, Series, Study, Table
from hspark.policy.fitting import LEVELS

# Orders of the requests that a throughput is taken over.
SEEDS = 2
FULL = 6


def ladder(lab: Lab) -> Study:
    batch = lab.options.batch_sizes[-1]
    paper = published()["ladder"]["relative_throughput"]
    estimates = {level: lab.refit(level) for level in LEVELS}
    loss = {level: interval(lab.log_loss(each)) for level, each in estimates.items()}
    error = {level: calibration(lab.grades.of(each), lab.grades.label) for level, each in estimates.items()}
    policies = ("ngram_only", "proposed") if lab.has_model else ("ngram_only",)
    ratios = {name: _throughputs(lab, name, batch, estimates, FULL) for name in policies}
    rows: list[list[Any]] = []
    for level, terms in LEVELS.items():
        row: list[Any] = [level, terms, *loss[level], error[level]]
        for name in policies:
            row += list(ratios[name][level])
        rows.append([*row, paper[str(level)]])
    columns = ["rung", "terms", "log-loss (nats per matched step)", "95% low", "95% high", "ECE"]
    for name in policies:
        columns += [f"{name}, throughput over rung 6", "95% low", "95% high"]
    first, best = ratios["ngram_only"][1], min(loss, key=lambda level: loss[level].value)
    order = [loss[level].value for level in LEVELS]
    falling = all(above >= below for above, below in pairwise(order))
    return Study(
        name="ladder",
        title="",
        source="",
        question="Which terms does the estimator need?",
        finding=f"With one shared intercept the n-gram drafter reaches {first} of the full estimator's throughput at "
        f"batch {batch} (the paper: {paper['1']}). Log-loss per matched step goes from {loss[1].value:.3f} with rung 1 "
        f"to {loss[FULL].value:.3f} with rung 6, "
        + ("falling with every rung." if falling else f"not at every rung; it is lowest with rung {best}."),
        tables=[
            Table(
                f"Six estimators, and n-gram drafts priced with them at batch {batch}",
                [*columns, "ngram_only, the paper (table 6)"],
                rows,
                f"{lab.fit_note} {lab.cost_note}",
            )
        ],
        plots=_ladder_plots(list(loss.values()), ratios, batch),
        data={"matched_positions": int(lab.matched.sum()), "graded_slots": len(lab.grades.row), "batch_size": batch},
    )


def _ladder_plots(loss: list[Interval], ratios: dict[str, dict[Any, Interval]], batch: int) -> list[Plot]:
    names: list[float | str] = [f"{level}" for level in LEVELS]
    paper = published()["ladder"]["relative_throughput"]
    theirs = Series("paper, ngram_only, batch 128", names, [paper[str(level)] for level in LEVELS], published=True)
    ours = [interval_series(name, names, list(values.values())) for name, values in ratios.items()]
    held_out = interval_series("held out", names, loss)
    return [
        Plot("Log-loss by rung", "rung", "log-loss (nats per matched step)", [held_out], kind="bar"),
        Plot(f"Throughput by rung, batch {batch}", "rung", "throughput over rung 6", [*ours, theirs]),
    ]


def transfer(lab: Lab) -> Study:
    own, paper = "own fit", published()["transfer"]
    estimates = {own: lab.own} | lab.presets
    policies = ("ngram_only", "proposed") if lab.has_model else ("ngram_only",)
    rows: list[list[Any]] = []
    series: list[Series] = []
    values: dict[str, list[float]] = {name: [] for name in policies}
    for batch in lab.options.batch_sizes:
        for name in policies:
            ratios = _throughputs(lab, name, batch, estimates, own)
            rows += [[batch, name, fit, *ratio] for fit, ratio in ratios.items() if fit != own]
            values[name] += [ratio.value for fit, ratio in ratios.items() if fit != own]
            if batch == lab.options.batch_sizes[-1]:
                series.append(
                    interval_series(name, [f for f in ratios if f != own], [r for f, r in ratios.items() if f != own])
                )
    spread = " and ".join(f"{min(v):.3f} to {max(v):.3f} with {name}" for name, v in values.items())
    return Study(
        name="transfer",
        title="",
        source="",
        question="What does it cost to use an estimator that was fitted on another model?",
        finding=f"With published coefficients of other models, throughput is {spread} relative to the own fit, over "
        f"batches of {', '.join(map(str, lab.options.batch_sizes))}. The paper finds {paper['low']} to {paper['high']} "
        "for Qwen3-4B served with coefficients of Qwen3-8B or Llama-3.1-8B.",
        tables=[
            Table(
                "Throughput with published coefficients, relative to the own fit",
                ["batch", "policy", "coefficients of", "throughput over own fit", "95% low", "95% high"],
                rows,
                f"{lab.own_note} {lab.cost_note} The paper's range: {paper['low']}-{paper['high']} ({paper['from']}).",
            )
        ],
        plots=[
            Plot(
                f"Throughput with published coefficients, batch {lab.options.batch_sizes[-1]}",
                "coefficients of",
                "throughput over own fit",
                series,
                kind="scatter",
            )
        ],
        data={"row_steps": lab.options.row_steps},
    )


def _throughputs(lab: Lab, policy: str, batch: int, estimates: dict[Any, Any], reference: Any) -> dict[Any, Interval]:
    """Throughput with each estimate over that with the reference, in the same orders of requests."""
    served = {}
    for name, each in estimates.items():
        prepared = lab.prepared(each)
        served[name] = [lab.serve_prepared(prepared, policy, batch, seed=seed) for seed in range(SEEDS)]
    base = pooled(served[reference])
    return {name: interval(relative(pooled(parts), base, lab.bootstrap)) for name, parts in served.items()}
