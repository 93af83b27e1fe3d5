"""Policies against each other, by batch size and temperature (tables 1, 13 and 14)."""

from __future__ import annotations

from typing import Any

from hspark.lab.studies.lab import Lab, StudyOptions
from hspark.lab.studies.plotting import interval_series
from hspark.lab.studies.published import published
from hspark.lab.studies.serving import Served, relative
from hspark.lab.studies.statistics import Interval, interval
from hspark.lab.study import Plot, Series, Study, Table

POLICIES = ("proposed", "ngram_first", "extension", "threshold", "model_only", "ngram_only", "vanilla")
BASELINE = "model_only"
_WORKLOADS = ("NextCoder 15-20%", "MT-Bench")


def policies(lab: Lab) -> Study:
    lab.need_model("policies")
    labs = {"0": lab}
    if lab.options.sampled is not None:
        labs["1"] = _sampled(lab)
        labs["1"].need_model("policies at T = 1")
    rows: list[list[Any]] = []
    plots: list[Plot] = []
    ratios: dict[str, dict[int, dict[str, Interval]]] = {}
    fastest: dict[int, str] = {}
    for temperature, own in labs.items():
        ratios[temperature] = {}
        for batch in lab.options.batch_sizes:
            served = {name: own.serve(name, batch) for name in POLICIES}
            found = {n: interval(relative(each, served[BASELINE], own.bootstrap)) for n, each in served.items()}
            if own is lab:
                fastest[batch] = _fastest(lab, served)
            plain = {n: interval(relative(each, served["vanilla"], own.bootstrap)) for n, each in served.items()}
            ratios[temperature][batch] = found
            rows += [_row(temperature, batch, served[n], found[n], plain[n]) for n in POLICIES]
        plots.append(_plot(temperature, ratios[temperature]))
    kind = str((lab.table.info.get("drafter") or {}).get("drafting", "greedy"))
    columns = ["T", "batch", "policy", "throughput over model_only", "95% low", "95% high", "over vanilla",
               "tokens per step", "slots per request", "share of n-gram chains", "price (tokens per slot)",
               *(f"over model_only, the paper: {name}" for name in _WORKLOADS)]  # fmt: skip
    note = f"Drafting: {kind}. The paper: {published()['policies']['from']}. {lab.own_note} {lab.cost_note}"
    return Study(
        name="policies",
        title="",
        source="",
        question="Which rule of choosing between the two drafters is fastest, and does the batch size matter?",
        finding=_finding(ratios["0"], fastest) + _sampled_finding(ratios.get("1", {})),
        tables=[Table("Policies in simulation", columns, rows, note)],
        plots=plots,
        data={"row_steps": lab.options.row_steps, "sampled_outputs": labs["1"].table.outputs if "1" in labs else 0},
    )


def _sampled(lab: Lab) -> Lab:
    """The table at T = 1 under the same cost, its estimates from its own prompts or from what was given."""
    assert lab.options.sampled is not None
    given = lab.options
    options = StudyOptions(
        train=given.train,
        estimator=given.estimator,
        cost=lab.cost,
        batch_sizes=given.batch_sizes,
        budget_delay=given.budget_delay,
        row_steps=given.row_steps,
        resamples=given.resamples,
    )
    return Lab(given.sampled, options)  # type: ignore[arg-type]


def _row(temperature: str, batch: int, served: Served, ratio: Interval, plain: Interval) -> list[Any]:
    paper = published()["policies"]
    theirs = [paper[name].get(str(batch), {}).get(served.name, {}).get(temperature) for name in _WORKLOADS]
    shares = [served.acceptance_length, served.slots_per_request, served.free_share, served.price]
    return [int(temperature), batch, served.name, *ratio, plain.value, *shares, *theirs]


def _plot(temperature: str, ratios: dict[int, dict[str, Interval]]) -> Plot:
    shown = [name for name in POLICIES if name not in (BASELINE, "vanilla")]
    series = [interval_series(f"batch {b}", shown, [found[n] for n in shown]) for b, found in ratios.items()]
    paper = published()["policies"]["NextCoder 15-20%"]
    for batch in ratios:
        values = {name: each[temperature] for name, each in paper.get(str(batch), {}).items()}
        if values:
            title = f"paper, NextCoder 15-20%, batch {batch}"
            series.append(Series(title, list(values), list(values.values()), published=True))
    title = f"Throughput of policies over the model drafter alone, T = {temperature}"
    return Plot(title, "policy", "throughput over model_only", series, kind="bar")


def _fastest(lab: Lab, served: dict[str, Served]) -> str:
    """Who is fastest, in words; "level" where the interval over prompts between the first two includes 1."""
    ranked = sorted(served, key=lambda name: -served[name].tokens_per_second)
    first, *others = ranked
    level = [n for n in others if not interval(relative(served[first], served[n], lab.bootstrap)).excludes_one]
    return f"{first} is fastest" if not level else f"{first} is fastest, level with {', '.join(level)}"


def _finding(ratios: dict[int, dict[str, Interval]], fastest: dict[int, str]) -> str:
    words = []
    for batch, found in ratios.items():
        own = found["proposed"]
        level = "" if own.low is None or own.excludes_one else " (level: its interval includes 1)"
        words.append(
            f"At batch {batch} the proposed policy has {own} of the model drafter's throughput{level}, ngram_first "
            f"{found['ngram_first'].value:.3f}, extension {found['extension'].value:.3f}; {fastest[batch]}."
        )
    return " ".join(words)


def _sampled_finding(ratios: dict[int, dict[str, Interval]]) -> str:
    found = ", ".join(f"{each['proposed']} at batch {batch}" for batch, each in ratios.items())
    return f" At T = 1 the proposed policy has {found} of the model drafter's throughput." if found else ""
