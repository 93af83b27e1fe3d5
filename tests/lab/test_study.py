"""Studies survive JSON and come back from files; bad ones are named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.lab.study import PLOT_KINDS, Plot, Series, Study, Table, load_studies, save_study, to_json
from tests.lab.pages import NUMBERS, studies

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
