"""Growth curves: exact exponents, sizes that do not fit left out by name, bytes as they are really allocated."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspark.cli import main
from hspark.core import SOURCE_MODEL
from hspark.drafters.base import Drafter
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.lab import scale_command
from hspark.lab.scale import Scale, StepSize
from hspark.lab.scale_report import QUICK, SECONDS, ScaleReport, Series, growth
from hspark.lab.scale_text import amount, check_plot
from hspark.target import CausalTarget
from tests.fixtures import PatternDrafter
from tests.saved_target import save_tiny_target
from tests.tiny import VOCAB, tiny_llama

SMALL = replace(
    QUICK,
    batches=(1, 2),
    contexts=(16, 64, 4096),
    slots=(0, 3, 40),
    scan_contexts=(32, 64),
    scan_rows=(1, 2),
    budget_rows=(1, 8),
    memory_rows=(1, 3),
    memory_lengths=(16, 40),
    step_batch=2,
    step_context=32,
    step_slots=3,
    repeats=2,
)


def ticking() -> Any:
    """A clock on which every look takes one second."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def small(drafter: Drafter | None = None, available: Any = lambda device: None, **options: Any) -> Scale:
    return Scale(tiny_llama(), drafter, SMALL, clock=ticking(), available=available, **options)


@given(
    exponent=st.floats(-2, 3), factor=st.floats(1e-6, 1e3), sizes=st.tuples(st.integers(1, 1000), st.integers(1, 1000))
)
def test_growth_finds_the_exponent_of_a_power_law(exponent: float, factor: float, sizes: tuple[int, int]) -> None:
    x, y = sizes
    found = growth((x, factor * x**exponent), (y, factor * y**exponent))
    if x == y:
        assert found is None
    else:
        assert found == pytest.approx(exponent, abs=1e-6)


def test_growth_without_a_logarithm() -> None:
    assert growth((0, 1.0), (2, 1.0)) is None
    assert growth((1, 0.0), (2, 1.0)) is None
    assert Series("none", [], []).exponents == []
    # Three slots are four tokens: a time proportional to tokens grows with exponent 1.
    assert Series("slots", [0, 3, 7], [1.0, 4.0, 8.0], shift=1).exponents == [None, pytest.approx(1), pytest.approx(1)]


def test_every_section_is_measured_and_what_does_not_fit_is_named() -> None:
    seen: list[str] = []
    batch, context, slots, scan, sizing, memory = small(progress=seen.append).sections()
    assert [series.name for series in batch.series] == ["plain step", "hybrid step, 3 slots a row"]
    assert [series.x for series in batch.series] == [[1, 2]] * 2
    for section in (batch, context, slots, scan, sizing):
        for series in section.series:
            assert series.values == [1.0] * len(series.x), "a run lies between two looks at the clock"
    for series in context.series:
        assert series.x == [16, 64]
        assert series.left_out == {4096: "the model has 512 positions"}
    assert [series.left_out for series in slots.series] == [{40: "chains have 15 slots"}] * 2
    assert [series.name for series in scan.series] == ["1 rows", "2 rows"]
    assert sizing.series[0].x == [1, 8]
    assert [series.exponents for series in memory.series] == [[None, pytest.approx(1, abs=0.1)]] * 2
    assert len(seen) == 4 + 6 + 6 + 4 + 2


def test_the_models_limit_itself_can_be_measured() -> None:
    scale = small()
    assert scale._unfit(StepSize(True, 1, 512, 3)) is None
    assert scale._length(512) == 512
    assert scale._step_seconds(StepSize(True, 1, 512, 3)) == 1.0


def test_sizes_without_memory_are_left_out() -> None:
    scale = small(available=lambda device: 50_000)
    series = scale.by_batch().series[1]
    assert series.x == [1]
    assert "GB are free" in series.left_out[2]
    assert len(scale.by_slots().series) == 2


@pytest.mark.parametrize("rows", [1, 3])
def test_bytes_are_those_that_are_allocated(rows: int) -> None:
    drafter = CausalLMDrafter(tiny_llama(1, num_hidden_layers=2))
    scale = small(drafter)
    target = CausalTarget(scale.model, rows, 40)
    assert scale.kv_bytes(rows, 40) == target.buffers.num_bytes() > 0
    drafter.bind(target.info("t"), rows, 40)
    assert scale.drafter_bytes(rows, 40) == drafter.lm.buffers.num_bytes() > 0
    assert small().drafter_bytes(rows, 40) == 0
    assert len(scale.memory().series) == 4


def test_a_point_takes_its_hooks_off_the_model() -> None:
    drafter = PatternDrafter({}, VOCAB, width=3, source=SOURCE_MODEL)
    drafter.taps = (0, 2)
    seen: list[torch.Size] = []
    drafter.observe = lambda features, row, position: seen.append(features.shape)  # type: ignore[method-assign]
    scale = small(drafter)
    before = [len(layer._forward_hooks) for layer in scale.model.model.layers]
    scale._step_seconds(StepSize(True, 2, 32, 3))
    assert seen == [torch.Size([8, 64])] * 3
    assert [len(layer._forward_hooks) for layer in scale.model.model.layers] == before


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(scale_command, "QUICK", SMALL)
    return ["bench", "scale", "--quick", "--dtype", "float32", "--model", str(save_tiny_target(tmp_path / "tiny"))]


def test_scale_for_people(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--drafter", options[-1]]) == 0
    out = capsys.readouterr().out
    assert "tiny, float32, on cpu" in out
    assert "model drafter: tiny" in out
    assert "points    medians of 2 runs after one warm-up" in out
    assert "left out: plain step at 4096: the model has 2048 positions" in out
    assert "draft_model, 3 rows" in out
    line = next(line for line in out.splitlines() if line.startswith("64 "))
    assert line.count(" ms x^") == 2
    assert amount(0.00123456, SECONDS) == "1.23 ms"


def test_scale_for_programs(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "scale.json"
    assert main([*options, "--json", "--repeats", "1", "--output", str(output)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(output.read_text())
    assert record["header"]["sizes"]["repeats"] == record["header"]["repeats"] == 1
    assert len(record["sections"]) == 6
    series = record["sections"][0]["series"][0]
    assert series["exponents"][0] is None
    assert series["exponents"][1] == pytest.approx(growth((1, series["values"][0]), (2, series["values"][1])))


def test_scale_draws_its_curves(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the figure is of the extra `lab`")
    path = tmp_path / "scale.svg"
    assert main([*options, "--plot", str(path)]) == 0
    assert path.read_text().lstrip().startswith("<?xml")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "repeats=0 is out of range"),
        (["--plot", "/dev/null/a.svg"], "plot='/dev/null/a.svg' cannot be written"),
        (["--plot", "figure.txt"], "plot='figure.txt' has no known ending; use one of .svg, .png, .pdf"),
        (["--output", "/dev/null/report.json"], "output='/dev/null/report.json' cannot be written"),
        (["--model", "nothing"], "model='nothing' is unknown"),
        (["--drafter", "/no/such/drafter"], "/no/such/drafter"),
        (["--threads", "0"], "threads=0 is out of range"),
    ],
)
def test_scale_refuses_before_it_works(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_figure_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    check_plot(None)
    with pytest.raises(ValueError, match=r"needs matplotlib; install it with `pip install 'hspark\[lab\]'`"):
        check_plot("a.svg")


def test_report_is_json() -> None:
    report = ScaleReport({"model": "m"}, small().sections())
    record = json.loads(json.dumps(report.to_dict()))
    assert [section["unit"] for section in record["sections"]] == ["seconds"] * 5 + ["bytes"]
