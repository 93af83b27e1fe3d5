"""Studies survive JSON; the page is well-formed, whole, self-contained, reproducible, with matplotlib and without."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.lab import report, report_plots
from hspark.lab.report import write_report
from hspark.lab.report_html import format_column, format_number, table_figure
from hspark.lab.report_plots import MOST_SVG_POINTS, draw_plot
from hspark.lab.study import PLOT_KINDS, Plot, Series, Study, Table, load_studies, save_study, to_json

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is the optional extra `lab`"
)
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
CELLS = st.one_of(st.none(), st.text(max_size=8), st.integers(-(10**9), 10**9), NUMBERS)


@st.composite
def any_study(draw: st.DrawFn) -> Study:
    columns = draw(st.lists(st.text(max_size=5), min_size=1, max_size=3))
    rows = draw(st.lists(st.lists(CELLS, min_size=len(columns), max_size=len(columns)), max_size=4))
    size = draw(st.integers(0, 5))
    ys = st.lists(NUMBERS, min_size=size, max_size=size)
    series = Series(draw(st.text(max_size=5)), list(range(size)), draw(ys), draw(ys), draw(ys), draw(st.booleans()))
    plot = Plot("t", "x", "y", [series], draw(st.sampled_from(PLOT_KINDS)), draw(st.booleans()), draw(st.booleans()))
    data = draw(st.dictionaries(st.text(max_size=5), CELLS, max_size=3))
    return Study(
        "name", draw(st.text()), "s", "q", draw(st.text()), "c", [Table("t", columns, rows)], [plot], data, 1.5
    )


@given(any_study())
def test_json_round_trip(study: Study) -> None:
    assert Study.from_dict(json.loads(to_json(study.to_dict()))) == study


def test_plain_lists_are_on_one_line() -> None:
    assert to_json({"a": [1, "x,\n y"], "b": [[2.5], {"c": []}]}).splitlines() == [
        "{", ' "a": [1, "x,\\n y"],', ' "b": [', "  [2.5],", "  {", '   "c": []', "  }", " ]", "}",
    ]  # fmt: skip


def test_the_report_is_imported_without_matplotlib() -> None:
    code = "import sys, hspark.lab.report, hspark.lab.study; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_saved_studies_come_back_in_a_fixed_order(tmp_path: Path) -> None:
    for study in studies():
        assert save_study(study, tmp_path) == tmp_path / f"{study.name}.json"
    (tmp_path / "other.json").write_text('{"something": "else"}')
    loaded = load_studies(tmp_path)
    assert [study.name for study in loaded] == ["acceptance", "policies", "zebra"]
    assert loaded[0] == studies()[2]
    assert math.isnan(loaded[1].plots[0].series[0].y[3])
    assert loaded[1].plots[0].series[0].y[:3] == [2.5, 2.2, 1.7]


def test_array_values_become_plain_numbers_and_gaps() -> None:
    cells: Any = [np.int64(3), np.float64(0.25)]
    ys: Any = np.array([0.5, np.nan], dtype=np.float32)
    series = Series("s", list(np.arange(2)), list(ys))
    table = Table("t", ["a", "b"], [cells])
    data: Any = {"array": np.ones((2, 2)), "bad": float("inf"), 4: (1, 2)}
    record = Study("s", "t", "", "q", tables=[table], plots=[Plot("p", "x", "y", [series])], data=data).to_dict()
    assert record["plots"][0]["series"][0]["x"] == [0, 1]
    assert record["plots"][0]["series"][0]["y"] == [0.5, None]
    assert record["tables"][0]["rows"] == [[3, 0.25]]
    assert record["data"] == {"array": [[1.0, 1.0], [1.0, 1.0]], "bad": None, "4": [1, 2]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table("t", ["a", "b"], [[1]]), "table 't', row 0 has 1 cells"),
        (lambda: Table("t", [], []), "table 't' has no columns"),
        (lambda: Series("s", [1, 2], [1.0]), "series 's': y has 1 values for 2 of x"),
        (lambda: Series("s", [1], [1.0], low=[0.5]), "series 's' has only one of low and high"),
        (lambda: Plot("p", "x", "y", []), "plot 'p' has no series"),
        (lambda: Plot("p", "x", "y", [Series("s", [1], [1.0])], kind="pie"), "kind='pie' is unknown; use one of line"),
        (lambda: Plot("p", "x", "y", [Series("s", [1, "a"], [1.0, 2.0])]), "plot 'p' mixes numbers and names"),
        (lambda: Plot("p", "x", "y", [Series("s", ["a"], [1.0])], log_x=True), "log_x needs numbers"),
        (lambda: Study("../x", "t", "s", "q"), "study name '../x' cannot name a file"),
        (lambda: Study("x", "t", "s", "q", data={"a": object()}).to_dict(), "which JSON cannot hold"),
        (lambda: Study.from_dict({"name": "x", "title": "t", "source": ""}), "a study needs the field 'question'"),
        (lambda: Study.from_dict({**studies()[0].to_dict(), "colour": 1}), "a study has no field 'colour'"),
        (lambda: load_studies("no/such/place"), "study directory 'no/such/place' does not exist"),
    ],
)
def test_bad_studies_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_bad_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no study"):
        load_studies(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is not a saved study"):
        load_studies(tmp_path)


def test_the_page_is_well_formed_and_whole(tmp_path: Path) -> None:
    found = page(tmp_path, about={"target": "SmolLM2", "machine": {"cores": 2, "name": NASTY}, "seed": None})
    assert found.count("section") == 3
    assert [text for tag, attrs in found.tags if tag == "section" and (text := attrs["id"])] == [
        "acceptance", "policies", "zebra",
    ]  # fmt: skip
    for text in (
        "Policies against each other", "Tables 1 and 13 of the paper", "Which policy is fastest?", "The proposed one.",
        "hspark lab policies --batch-sizes 4,128", "Made in 12.5 s by", "Means of 3 repeats.", "SmolLM2", "cores: 2",
    ):  # fmt: skip
        assert text in found.text
    assert found.text.count("alert") == 0
    assert found.text.count(NASTY) >= 7
    assert len(found.ids) == len(set(found.ids))


def test_every_number_of_a_table_is_shown(tmp_path: Path) -> None:
    cells = page(tmp_path).cells
    for text in ("5.182", "5.5", "123,456", "1.20 [1.18, 1.22]", "1.000", "–", "−0.250", "1e-05", "0", NASTY):
        assert text in cells


@given(st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=1, max_size=6))
def test_shown_numbers_are_the_numbers(rows: list[list[float]]) -> None:
    found = Page(table_figure(Table("t", ["a", "b"], [list(row) for row in rows]), 1))
    shown = [float(cell.replace(",", "").replace("−", "-")) for cell in found.cells[2:]]
    assert len(shown) == 2 * len(rows)
    for value, text in zip([value for row in rows for value in row], shown, strict=True):
        assert text == pytest.approx(value, rel=6e-3, abs=6e-5)


def test_number_formats() -> None:
    assert format_column([1.5, 2.25, None, 3, "x", float("nan")]) == ["1.50", "2.25", "–", "3", "x", "–"]
    assert format_column([0.00321, -5.1712]) == ["0.0032", "−5.1712"]
    assert [format_number(v) for v in (1234.5, 0.0, 12.0, -1e-6)] == ["1,234", "0", "12", "−1e-06"]


def test_numbers_stand_right_and_the_papers_apart(tmp_path: Path) -> None:
    heads = [attrs.get("class") for tag, attrs in page(tmp_path).tags if tag == "th"][1:]
    assert heads == [None, "n", "n published", "n", None]
    compared = Page(table_figure(Table("t", ["b", "ours / paper"], [["5%", "1 x"]]), 1))
    kinds = [attrs.get("class") for tag, attrs in compared.tags if tag == "td"]
    assert kinds == [None, "n"]


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text = write_report(studies(), tmp_path / "report.html").read_text(encoding="utf-8")
    found = Page(text)
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in found.tags}
    for tag, attrs in found.tags:
        for name in ("src", "href", "xlink:href", "data", "poster", "srcset"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,")) or value == "report.json", (
                tag,
                name,
            )
    style = re.sub(r"url\(#[^)]*\)", "", text)
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    first = write_report(studies(), tmp_path / "a" / "report.html").read_bytes()
    second = write_report(list(reversed(studies())), tmp_path / "b" / "report.html").read_bytes()
    assert first == second
    assert (tmp_path / "a" / "report.json").read_bytes() == (tmp_path / "b" / "report.json").read_bytes()


def test_the_json_behind_it(tmp_path: Path) -> None:
    write_report(studies(), tmp_path / "report.html", title="T", about={"seed": 3})
    record = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (record["title"], record["about"]) == ("T", {"seed": 3})
    assert Study.from_dict(record["studies"][0]) == studies()[2]


def test_bad_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a page; use a name that ends in \.html"):
        write_report(studies(), tmp_path / "report.pdf")
    with pytest.raises(ValueError, match="studies=\\[\\] is empty"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="studies holds 'zebra' twice"):
        write_report([studies()[0]] * 2, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_all_but_the_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name.split(".")[0] == "matplotlib" else real(name, *rest)

    monkeypatch.setattr(report_plots.importlib.util, "find_spec", find_spec)
    found = page(tmp_path)
    assert "they need matplotlib, which pip install hspark[lab] brings" in found.text
    assert (found.count("svg"), found.count("img"), found.count("table")) == (0, 0, 2)
    assert "5.182" in found.cells
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["studies"][1]["plots"]


@needs_matplotlib
def test_plots_are_drawn_with_their_words_as_text(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert found.count("svg") == 2
    assert found.count("figcaption") == 4
    assert "need matplotlib" not in found.text
    for text in ("batch size (requests)", "speed-up over vanilla (×)", "Hybrid Spark (paper)", "128", "contains rule"):
        assert text in found.text
    assert "Dashed lines, hollow markers" in found.text
    assert (tmp_path / "report.html").stat().st_size < 150_000


@needs_matplotlib
def test_published_values_are_dashed_hollow_and_of_their_series_colour() -> None:
    ours, theirs = Series("DSpark", [1, 2], [1.0, 2.0]), Series("DSpark (paper)", [1, 2], [1.5, 2.5], published=True)
    other = Series("n-gram", [1, 2], [3.0, 4.0])
    published, second, first = report_plots._styles([theirs, other, ours])
    assert published == first == report_plots._styles([other, ours])[1]
    assert second != first
    both = draw_plot(Plot("p", "x", "y", [ours, theirs]), "a")
    alone = draw_plot(Plot("p", "x", "y", [ours]), "a")
    assert "stroke-dasharray" in both
    assert "stroke-dasharray" not in alone


@needs_matplotlib
@pytest.mark.parametrize("kind", PLOT_KINDS)
@pytest.mark.parametrize("named", [False, True])
def test_every_kind_of_plot_is_drawn(kind: str, named: bool) -> None:
    x: list[float | str] = [f"a rather long name, number {i}" for i in range(9)] if named else list(range(9))
    y = [math.nan, 0.0, *range(1, 8)]
    series = [Series(f"{NASTY} {i}", x, list(y), [v - 0.5 for v in y], [v + 0.5 for v in y], i == 1) for i in range(2)]
    markup = draw_plot(Plot("p", "$x_1$ (tokens)", NASTY, series, kind, log_y=True), "f7")
    found = Page(markup)
    assert found.count("svg") == 1
    assert "$x_1$ (tokens)" in found.text
    assert all(identifier.startswith("f7-") for identifier in found.ids)
    targets = re.findall(r'(?:href="#|url\(#)([^")]+)', markup)
    assert set(targets) == set(found.ids)
    assert draw_plot(Plot("p", "$x_1$ (tokens)", NASTY, series, kind, log_y=True), "f7") == markup


@needs_matplotlib
def test_many_points_become_a_picture() -> None:
    def plot(points: int) -> str:
        return draw_plot(Plot("p", "x", "y", [Series("s", list(range(points)), [1.0] * points)], "scatter"), "f1")

    assert plot(MOST_SVG_POINTS).startswith("<svg")
    picture = plot(MOST_SVG_POINTS + 1)
    assert picture.startswith('<img alt="" src="data:image/png;base64,')
    assert picture == plot(MOST_SVG_POINTS + 1)


def test_the_key_is_shown_only_with_published_series(tmp_path: Path) -> None:
    text = write_report(studies()[:1], tmp_path / "report.html").read_text(encoding="utf-8")
    assert report._KEY[:20] not in text
