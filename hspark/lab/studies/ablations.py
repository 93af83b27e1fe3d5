"""One part taken out at a time: the two selection rules, and each feature of the estimator (figure 6)."""

from __future__ import annotations

from typing import Any

from hspark.lab.studies.estimator import calibration, gap
from hspark.lab.studies.fits import REMOVABLE
from hspark.lab.studies.lab import Lab
from hspark.lab.studies.plotting import interval_series
from hspark.lab.studies.published import published
from hspark.lab.studies.serving import Served, pooled, relative
from hspark.lab.studies.statistics import Interval, interval, mean_interval
from hspark.lab.study import Plot, Series, Study, Table

RULES = {"contains rule": "no_contains", "slot price": "expected_length"}
WHOLE = "nothing"


def ablations(lab: Lab) -> Study:
    lab.need_model("ablations")
    batch, seeds = lab.options.batch_sizes[-1], range(lab.options.seeds)
    served = {WHOLE: [lab.serve("proposed", batch, seed=seed) for seed in seeds]}
    for removed, policy in RULES.items():
        served[removed] = [lab.serve(policy, batch, seed=seed) for seed in seeds]
    reference = _reference(lab, served[WHOLE], batch)
    losses: dict[str, Interval] = {}
    errors: dict[str, float] = {}
    for removed in REMOVABLE:
        estimates = lab.refit(without=removed)
        losses[removed] = interval(gap(estimates, lab.refit(), lab))
        errors[removed] = calibration(lab.grades.of(estimates), lab.grades.label)
        prepared = lab.prepared(estimates)
        served[removed] = [lab.serve_prepared(prepared, "proposed", batch, seed=seed) for seed in seeds]
    bases = {name: served[WHOLE] if name in RULES else reference for name in served if name != WHOLE}
    by_seed = {name: _by_seed(served[name], base) for name, base in bases.items()}
    by_prompt = {n: interval(relative(pooled(served[n]), pooled(base), lab.bootstrap)) for n, base in bases.items()}
    paper = published()["ablations"]
    rows: list[list[Any]] = []
    for name in bases:
        loss = losses.get(name, (None, None, None))
        whole = pooled(served[name])
        theirs = paper["relative_throughput"].get(RULES.get(name, ""))
        rows.append([name, *by_seed[name], by_prompt[name].low, by_prompt[name].high, whole.acceptance_length,
                     whole.free_share, *loss, errors.get(name), theirs])  # fmt: skip
    full = pooled(served[WHOLE])
    return Study(
        name="ablations",
        title="",
        source="",
        question="What does throughput lose when one part of the method is taken out?",
        finding=_finding(by_seed, batch, full, len(seeds)),
        tables=[
            Table(
                f"One part taken out, batch {batch}, {len(seeds)} orders of the requests",
                ["taken out", "throughput over all of it", "95% low, orders", "95% high, orders", "95% low, prompts",
                 "95% high, prompts", "tokens per step", "share of n-gram chains", "log-loss added per matched step",
                 "95% low", "95% high", "ECE", "throughput ratio, the paper"],
                rows,
                f"With nothing taken out: {full.acceptance_length:.3f} tokens per step, {full.free_share:.3f} of the "
                f"chains from n-grams. The paper's values: {paper['from']}. {lab.fit_note} {lab.cost_note}",
            )
        ],
        plots=_plots(by_seed, losses, paper, batch),
        data={"batch_size": batch, "seeds": len(seeds), "by_seed": {n: _ratios(served[n], bases[n]) for n in bases}},
    )  # fmt: skip


def _reference(lab: Lab, whole: list[Served], batch: int) -> list[Served]:
    """What refits are compared with: a refit, also where another estimator was given."""
    if lab.options.estimator is None:
        return whole
    prepared = lab.prepared(lab.refit())
    return [lab.serve_prepared(prepared, "proposed", batch, seed=seed) for seed in range(len(whole))]


def _ratios(parts: list[Served], base: list[Served]) -> list[float]:
    return [part.tokens_per_second / own.tokens_per_second for part, own in zip(parts, base, strict=True)]


def _by_seed(parts: list[Served], base: list[Served]) -> Interval:
    return mean_interval(_ratios(parts, base))


def _plots(ratios: dict[str, Interval], losses: dict[str, Interval], paper: dict[str, Any], batch: int) -> list[Plot]:
    theirs = [float(paper["relative_throughput"][policy]) for policy in RULES.values()]
    throughput = [
        interval_series("on this table", list(ratios), list(ratios.values())),
        Series("paper, NextCoder 40-45%, batch 128", list(RULES), theirs, published=True),
    ]
    loss = [interval_series("on this table", list(losses), list(losses.values()))]
    return [
        Plot(f"Throughput with one part taken out, batch {batch}", "taken out", "throughput, ablated over full",
             throughput, kind="scatter", note="Intervals over the orders of the requests."),
        Plot("Log-loss added when a feature is taken out", "taken out", "nats per matched step", loss, kind="bar",
             note="Intervals over prompts."),
    ]  # fmt: skip


def _finding(ratios: dict[str, Interval], batch: int, full: Served, seeds: int) -> str:
    cost = {name: each for name, each in ratios.items() if each.high is not None and each.high < 1}
    words = [
        f"At batch {batch}, over {seeds} orders of the requests, throughput without the contains rule is "
        f"{ratios['contains rule']} and without the slot price {ratios['slot price']} of the whole method's."
    ]
    features = [name for name in cost if name not in RULES]
    if features:
        words.append("Of the estimator's features these cost something when taken out: " + ", ".join(
            f"{name} ({cost[name].value:.3f})" for name in features) + ".")  # fmt: skip
    else:
        words.append("No feature of the estimator costs throughput when it alone is taken out.")
    words.append(f"The whole method emits {full.acceptance_length:.2f} tokens per step.")
    return " ".join(words)
