"""What a command writes: its colour codes, and the one line of a refusal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hspark.cli import main

CODE = re.compile("\033\\[[0-9;]*m")


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a command that is refused with status 2."""
    try:
        status: Any = main(arguments)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("hspark: error: ")
    assert err.count("\n") == 1
    return err
