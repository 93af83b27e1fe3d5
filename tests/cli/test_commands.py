"""The command line as a whole: help, versions, unknown words, interrupts, and errors in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import hspark
from hspark.cli import COMMANDS, main, run
from tests.cli.output import error_of


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in ((["--version"], hspark.__version__), (["--help"], "hspark demo")):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        assert expected in capsys.readouterr().out
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"\n  hspark {command}" in out
    assert "None" not in out


def test_unknown_commands_and_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "command='genrate' is unknown; use one of demo, generate" in error_of(["genrate"], capsys)
    assert "--wild" in error_of(["--wild"], capsys)
    assert "--wild" in error_of(["generate", "x", "--wild"], capsys)


def test_module_runs_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-m", "hspark", "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, f"hspark {hspark.__version__}")


def test_interrupt_ends_politely(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: Any) -> int:
        raise KeyboardInterrupt

    assert run(interrupted, []) == 130
    assert capsys.readouterr().err == "\nhspark: interrupted\n"


def test_an_interrupt_while_torch_is_imported_ends_politely() -> None:
    """A module that raises in place of torch, as Ctrl-C in its import does."""
    code = "import sys\nclass T:\n def find_spec(self, name, *_):\n  if name == 'torch': raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, T())\nfrom hspark.cli import main\nsys.exit(main(['generate', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "\nhspark: interrupted\n")


def test_reader_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)

        def write(argv: Any) -> int:
            print("text", flush=True)
            return 0

        assert run(write, []) == 1
        print("nobody is told twice", flush=True)
    assert capsys.readouterr().err == ""


def test_errors_of_several_lines_become_one(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(argv: Any) -> int:
        raise ValueError("one\n  two")

    assert run(fail, []) == 2
    assert capsys.readouterr().err == "hspark: error: one two\n"
