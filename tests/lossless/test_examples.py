"""The teaching examples run and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_why_lossless(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "why_lossless.py"), run_name="__main__")
    text = capsys.readouterr().out
    rows = {line[:34].strip(): line[34:].split() for line in text.splitlines() if line.startswith("  ")}
    assert rows["target"] == rows["together"] == rows["together, over every draft"]
    assert "total variation from the target" in text


def test_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "lossy.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert text.count("total variation 0.2") == 3  # 0.281, 0.250, 0.250
    assert text.count("2000 of 2000 outputs equal plain decoding") == 3
