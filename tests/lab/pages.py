"""Studies with everything that a report can hold, and a reader of pages that refuses faulty ones."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hspark.lab.report import write_report
from hspark.lab.study import Plot, Series, Study, Table

NASTY = '<script src="https://example.org/x.js"></script> & "$x$" \'é\' ]]>'
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Fails on a tag closed out of turn, and collects what there is."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def studies() -> list[Study]:
    batches: list[float | str] = [1, 4, 16, 128]
    lines = Plot(
        "Speed-up by batch size", "batch size (requests)", "speed-up over vanilla (×)",
        [
            Series(
                "Hybrid Spark", batches,
                [2.5, 2.2, 1.7, math.nan], [2.4, 2.1, 1.6, math.nan], [2.6, 2.3, 1.8, math.nan],
            ),
            Series("Hybrid Spark (paper)", batches, [2.6, 2.4, 1.9, 1.3], published=True),
        ],
        log_x=True, log_y=True, note="Intervals are 95%.",
    )  # fmt: skip
    bars = Plot(
        "Ablations", "component removed", "share of the full throughput",
        [Series("here", ["price", "contains rule"], [0.9, 0.95], [0.8, 0.9], [1.0, 1.0]),
         Series("paper", ["price", "contains rule"], [0.92, 0.97], published=True)],
        kind="bar",
    )  # fmt: skip
    table = Table(
        "Acceptance length (tokens per step)",
        ["policy", "ours", "AL, paper", "steps", "interval"],
        [
            ["proposed", 5.182, 5.5, 123456, "1.20 [1.18, 1.22]"],
            ["vanilla", 1.0, 1.0, 7, None],
            [NASTY, -0.25, 1e-5, 0, "x"],
        ],
        note="Means of 3 repeats.",
    )
    return [
        Study("zebra", "Last by name", "", "Does an unknown study come last?"),
        Study(
            "policies", "Policies against each other", "Tables 1 and 13 of the paper", "Which policy is fastest?",
            f"The proposed one.\n\nBut see {NASTY}.", "hspark lab policies --batch-sizes 4,128", [table], [lines],
            {"nested": {"values": [1, 2.5, None]}, "text": NASTY}, 12.5,
        ),
        Study("acceptance", NASTY, NASTY, NASTY, command=NASTY, tables=[Table(NASTY, [NASTY], [])], plots=[bars]),
    ]  # fmt: skip


def page(tmp_path: Path, about: dict[str, Any] | None = None) -> Page:
    return Page(write_report(studies(), tmp_path / "report.html", about=about).read_text(encoding="utf-8"))


NUMBERS = st.floats(-1e300, 1e300)
