"""The page of a report is well-formed, whole, self-contained and reproducible."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.lab import report
from hspark.lab.report import write_report
from hspark.lab.report_html import format_column, format_number, table_figure
from hspark.lab.study import Study, Table
from tests.lab.pages import NASTY, NUMBERS, Page, page, studies


def test_the_report_is_imported_without_matplotlib() -> None:
    code = "import sys, hspark.lab.report, hspark.lab.study; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


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


def test_the_key_is_shown_only_with_published_series(tmp_path: Path) -> None:
    text = write_report(studies()[:1], tmp_path / "report.html").read_text(encoding="utf-8")
    assert report._KEY[:20] not in text
