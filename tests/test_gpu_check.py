"""The GPU check runs whole on a CPU's stand-ins, so that it does not fail for its own mistakes where a GPU is."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hspark.lab.machine import copy_bandwidth

SCRIPT = Path(__file__).parents[1] / "examples" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a CPU for its GPU, a small target for its large one, and no real compiler."""
    torch._dynamo.reset()
    module = ModuleType("gpu_check")
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), vars(module))
    stand_ins: dict[str, Any] = {
        "CUDA": torch.device("cpu"),
        "LARGE": module.SMALL,
        "DRAFT_LAYERS": 1,
        "DRAFT_TAPS": (0, 2),
        "CONTEXT": 20,
        "copy_bandwidth": functools.partial(copy_bandwidth, size=1 << 20, repeats=1),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return module


def test_equality(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    params = script.SamplingParams
    monkeypatch.setattr(script, "SamplingParams", lambda **kw: params(**{**kw, "max_new_tokens": 6}))
    assert script.check_equality() == {"passed": True, "variants": 8, "differing": [], "lost_drafts": 0}


def test_drafts_lost_to_errors_fail_the_checks(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    params = script.SamplingParams
    monkeypatch.setattr(script, "SamplingParams", lambda **kw: params(**{**kw, "max_new_tokens": 2}))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no drafts here")

    monkeypatch.setattr(script.DSparkDrafter, "propose", broken)
    with pytest.warns(UserWarning, match="no drafts here"):
        equality = script.check_equality()
    assert not equality["passed"]
    assert not equality["differing"]
    assert equality["lost_drafts"] >= 8
    with pytest.warns(UserWarning, match="no drafts here"):
        assert not script.check_no_sync(False)["passed"]
    with pytest.warns(UserWarning, match="no drafts here"), pytest.raises(RuntimeError, match="lost their drafts"):
        script.measure_steps([1], 2, compiled=False)


def test_measurements(script: ModuleType) -> None:
    rows = script.measure_steps([1, 2], 2, compiled=False)
    assert [(row["batch"], row["policy"]) for row in rows] == [
        (batch, policy) for batch in (1, 2) for policy in ("vanilla", "model_only", "proposed")
    ]
    assert all(row["ms"] > 0 and row["over_floor"] > 0 for row in rows)
    [never] = script.measure_never_choose([2], 1, compiled=False)
    assert -100 < never["overhead_percent"] < 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code == 0
    assert "no CUDA GPU is visible" in capsys.readouterr().out
