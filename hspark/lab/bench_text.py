"""A benchmark's report as text for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hspark.config import PAPER_DELAY
from hspark.lab.bench_report import ArmSummary, BatchSummary, BenchReport, Ratio
from hspark.lab.runs import Difference

# Differences listed one by one; the JSON report has all of them.
_LISTED = 8


def render(report: BenchReport) -> str:
    """Header, and for each batch size the speeds, the drafts and whatever differed."""
    parts = [render_header(report.header)]
    parts += [_render_batch(batch) for batch in report.batches]
    return "\n\n".join(parts)


def render_header(header: dict[str, Any]) -> str:
    machine, settings, workload = header["machine"], header["settings"], header["workload"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = [value for value in (machine["load_average"], machine["load_average_after"]) if value is not None]
    kinds = ", ".join(f"{count} {kind}" for kind, count in workload["kinds"].items())
    heat = f"temperature {settings['temperature']:g}, seed {settings['seed']}" if settings["temperature"] else "greedy"
    estimator = header["estimator"].removeprefix("estimator: ").partition(". ")[0]
    drafter = Path(settings["drafter"]).name if settings["drafter"] else "none"
    delay = settings["budget_delay"]
    if delay is None:
        delay = f"0 (on a CPU) or {PAPER_DELAY}"
    lines = [
        f"{header['model']}, {header['dtype']}, on {machine['device']}; {versions}",
        f"machine   {machine['processor']}, {machine['system']}; cores: {machine['cores']}, threads: "
        f"{machine['threads']}" + (f"; load average {' -> '.join(map(str, load))}" if load else ""),
        f"workload  {workload['name']}: {workload['requests']} requests ({kinds}), {workload['prompt_tokens']} prompt "
        f"tokens; up to {settings['max_new_tokens']} new tokens, {heat}; repeats: {settings['repeats']}",
        f"drafts    model drafter: {drafter}; n-gram estimator: {estimator}",
        f"sizing    {settings['verify']} verification, survivals {delay} steps old, cost: "
        f"{'measured at start-up' if settings['cost'] == 'auto' else settings['cost']}",
        *(f"note      {note}" for note in header["notes"]),
    ]
    return "\n".join(lines)


Row = TypeVar("Row")
Column = tuple[str, Callable[[ArmSummary], str]]


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def ratio(value: Ratio) -> str:
    interval = "" if value.low is None else f" [{value.low:.2f}, {value.high:.2f}]"
    return f"{value.value:.2f}x{interval}"


def same_text(arm: ArmSummary) -> str:
    """How the arm's outputs compare with vanilla's."""
    if not arm.compared:
        return "not comparable"
    return f"{arm.different} of {arm.compared} differ" if arm.different else "identical"


SPEED: list[Column] = [
    ("arm", lambda arm: arm.name),
    ("tok/s", lambda arm: number(arm.tokens_per_second, 1)),
    ("speed-up", lambda arm: ratio(arm.speedup)),
    ("decode tok/s", lambda arm: number(arm.decode_tokens_per_second, 1)),
    ("decode speed-up", lambda arm: ratio(arm.decode_speedup)),
    ("text", same_text),
]
DRAFTS: list[Column] = [
    ("arm", lambda arm: arm.name),
    ("AL", lambda arm: number(arm.acceptance_length)),
    ("running", lambda arm: number(arm.mean_running)),
    ("slots/step", lambda arm: number(arm.slots_per_step)),
    ("budget", lambda arm: number(arm.mean_budget)),
    ("price", lambda arm: number(arm.mean_price, 3)),
]


def table(columns: Sequence[tuple[str, Callable[[Row], str]]], items: Sequence[Row]) -> str:
    """Aligned columns, the first to the left; a line for every item."""
    rows = [[title for title, _ in columns]] + [[value(item) for _, value in columns] for item in items]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _kind_ratio(kind: str) -> Callable[[ArmSummary], str]:
    return lambda arm: ratio(arm.by_kind[kind])


def _render_batch(batch: BatchSummary) -> str:
    kinds = list(batch.arms[0].by_kind)
    speed = list(SPEED)
    if len(kinds) > 1:
        speed[3:3] = [(kind, _kind_ratio(kind)) for kind in kinds]
    parts = [
        f"batch size {batch.batch_size}, {len(batch.runs['groups'])} groups; speed-ups are over {batch.baseline}, "
        "with 95 % bootstrap intervals over groups",
        table(speed, batch.arms),
        table(DRAFTS, [arm for arm in batch.arms if arm.steps is not None]),
    ]
    if acceptance := _acceptance(batch):
        parts.append(acceptance)
    parts.append("\n".join(verdicts(batch)))
    return "\n\n".join(parts)


def _acceptance(batch: BatchSummary) -> str:
    """Acceptance by position for every arm and drafter."""
    lines = []
    for arm in batch.arms:
        for name, drafter in arm.drafters.items():
            values = " ".join("  - " if value is None else f"{value:.2f}" for value in drafter.acceptance_by_position)
            share = f"{drafter.accepted} of {drafter.verified} verified ({drafter.drafted} drafted)"
            lines.append(f"  {arm.name}, {name}: {share}\n    {values}")
    title = "acceptance of draft tokens by position (of those whose predecessors were all accepted)"
    return "\n".join([title, *lines]) if lines else ""


def verdicts(batch: BatchSummary) -> list[str]:
    """What a reader must not miss: slower arms, differing texts, failed requests."""
    lines = []
    for arm in batch.arms:
        high = arm.speedup.value if arm.speedup.high is None else arm.speedup.high
        if arm.name != batch.baseline and high < 1:
            lines.append(f"slower than {batch.baseline}: {arm.name}, {ratio(arm.speedup)}")
        slow = [kind for kind, each in arm.by_kind.items() if each.value < 1 <= arm.speedup.value]
        lines += [f"slower than {batch.baseline} on {kind}: {arm.name}, {ratio(arm.by_kind[kind])}" for kind in slow]
        lines += [f"failed request in {arm.name}: {error}" for error in dict.fromkeys(arm.errors)]
    compared = {arm.name: arm.compared for arm in batch.arms if arm.compared}
    if not batch.differences:
        count = max(compared.values(), default=0)
        lines.append(f"texts: no difference from vanilla's first run in {', '.join(compared)} ({count} outputs each)")
        return lines
    ties = sum(difference.near_tie is True for difference in batch.differences)
    lines.append(f"texts: {len(batch.differences)} outputs leave vanilla's, {ties} of them at a near-tie of the target")
    lines += [_difference(difference) for difference in batch.differences[:_LISTED]]
    if len(batch.differences) > _LISTED:
        lines.append(f"  ... and {len(batch.differences) - _LISTED} more; the JSON report lists all")
    return lines


def _difference(difference: Difference) -> str:
    def shown(token: int | None, text: str | None) -> str:
        if token is None:
            return "the end"
        return f"{token}" if text is None else f"{text!r}"

    margin = ""
    if difference.margin is not None:
        margin = f", margin {difference.margin:.2g}" + (" (near-tie)" if difference.near_tie else " (no tie)")
    expected = shown(difference.expected, difference.expected_text)
    got = shown(difference.got, difference.got_text)
    return f"  {difference.arm}, {difference.task_id}, token {difference.position}: {got} for {expected}{margin}"
