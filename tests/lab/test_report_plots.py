"""The plots of a report, with matplotlib and without."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hspark.lab import report_plots
from hspark.lab.report_plots import MOST_SVG_POINTS, draw_plot
from hspark.lab.study import PLOT_KINDS, Plot, Series
from tests.lab.pages import NASTY, Page, page

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is the optional extra `lab`"
)


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
