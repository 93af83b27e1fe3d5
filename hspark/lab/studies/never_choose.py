"""What it costs to run the n-gram drafter and never choose it (section 5.6): a measurement, read from its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hspark.lab.studies.lab import Lab
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.studies.published import published
from hspark.lab.studies.statistics import Interval
from hspark.lab.study import Plot, Series, Study, Table


def never_choose(lab: Lab) -> Study:
    report = lab.options.overhead
    if report is None:
        raise LeftOutError(
            "never_choose is measured, not simulated, as a simulation has no time for drafting; run `hspark bench "
            "overhead --output FILE` and give the file with --overhead"
        )
    ratio = _ratio(report)
    shares = _shares(report)
    paper = published()["never_choose"]["relative_throughput"]
    rows: list[list[Any]] = [
        ["here", *ratio, None],
        *([name, None, None, None, value] for name, value in paper.items()),
    ]
    tables = [
        Table(
            "Throughput with an n-gram drafter that is run and never chosen, over the model drafter alone",
            ["on", "ratio", "95% low", "95% high", "ratio, the paper"],
            rows,
            f"The paper: {published()['never_choose']['from']}.",
        )
    ]
    plots = []
    if shares:
        tables.append(Table("Parts of a decode step", ["part", "time (ms)", "share of the step (%)"], shares))
        series = Series("share", [row[0] for row in shares], [row[2] for row in shares])
        plots.append(Plot("Parts of a decode step", "part", "share of the step (%)", [series], kind="bar"))
    sign = "costs" if ratio.value < 1 else "changes throughput by"
    level = "" if ratio.low is None or ratio.excludes_one else ", which is level: the interval includes no change"
    return Study(
        name="never_choose",
        title="",
        source="",
        question="What does the n-gram drafter cost where it is never used?",
        finding=f"Running the n-gram drafter without ever choosing it {sign} {abs(1 - ratio.value):.1%} of throughput "
        f"(ratio {ratio}){level}. The paper measures at most {1 - min(paper.values()):.1%}.",
        tables=tables,
        plots=plots,
        data={"measured": dict(ratio._asdict())},
    )


def _ratio(report: Mapping[str, Any]) -> Interval:
    found = report.get("never_choose") if isinstance(report, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(found.get("value"), int | float):
        raise LeftOutError(
            "overhead: the report has no never_choose.value; use one that `hspark bench overhead --output FILE` wrote "
            "with a model drafter"
        )
    return Interval(float(found["value"]), found.get("low"), found.get("high"))


def _shares(report: Mapping[str, Any]) -> list[list[Any]]:
    parts = (report.get("shares") or {}).get("parts") or []
    return [[part["part"], 1e3 * part["seconds"], 100 * part["share"]] for part in parts]
