"""`hspark bench` and `hspark demo`: reports for programs and for people, refusals, and one with the real model."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from hspark.cli import main
from hspark.lab.bench_command import show
from hspark.lab.observer import ProgressBar
from hspark.policy import LinearCost
from tests.cli.output import CODE, error_of


@pytest.fixture
def workload(tmp_path: Path) -> str:
    lines = [
        {"task_id": "a", "instruction": "Rename abc.", "input": "abc = 1\n"},
        {"task_id": "b", "turns": ["the the the"]},
        {"task_id": "c", "prompt": "abc"},
    ]
    path = tmp_path / "work.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_bench_for_programs(
    workload: str, common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    options = [workload, "--limit", "2", "--max-new-tokens", "6", "--arms", "ngram_only:3,transformers", "--json"]
    options += ["--baseline", "transformers"]
    assert main(["bench", *options, "--output", str(output), *common]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text())
    assert report["header"]["workload"]["kinds"] == {"edit": 1, "chat": 1}
    assert report["header"]["settings"]["max_new_tokens"] == 6
    (batch,) = report["batches"]
    assert [arm["name"] for arm in batch["arms"]] == ["vanilla", "ngram_only:3", "transformers"]
    assert [arm["compared"] for arm in batch["arms"]] == [2, 2, 2]
    assert batch["differences"] == []
    assert batch["runs"]["groups"] == [["a"], ["b"]]
    assert batch["baseline"] == "transformers"
    assert batch["arms"][2]["speedup"]["value"] == 1.0 != batch["arms"][0]["speedup"]["value"]


def test_an_interrupted_bench_reports_and_says_so(
    workload: str,
    common: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun: list[str] = []

    def begin(self: ProgressBar, arm: str, *_: object) -> None:
        begun.append(arm)
        if len(begun) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "begin", begin)
    output = tmp_path / "made" / "on the way" / "report.json"
    options = ["bench", workload, "--max-new-tokens", "4", "--arms", "ngram_only", "--output", str(output), *common]
    assert main(options) == 130
    assert "interrupted: of batch size 1 are reported 1 of 3 requests" in capsys.readouterr().out
    assert json.loads(output.read_text())["batches"][0]["runs"]["groups"] == [["a"]]


def test_a_report_that_cannot_be_written_has_been_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="report"):
        show({"a": 1}, "the tables", argparse.Namespace(json=False, output="/dev/null/report.json"))
    assert capsys.readouterr().out == "the tables\n"


def test_bench_for_people(workload: str, common: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [workload, "--max-new-tokens", "4", "--batch-sizes", "2", "--temperature", "1", "--seed", "4"]
    assert main(["bench", *options, *common]) == 0
    out = capsys.readouterr().out
    assert "work.jsonl: 3 requests (1 edit, 2 chat)" in out
    assert "temperature 1, seed 4" in out
    assert re.search(r"^vanilla +[\d.]+ +1\.00x", out, re.MULTILINE)
    assert "no difference from vanilla's first run in vanilla, ngram_only (3 outputs each)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "ngram"], "arm='ngram' is unknown; use one of"),
        (["--batch-sizes", "1,x"], "batch_sizes holds 'x'"),
        (["--batch-sizes", ","], "batch_sizes=() is empty"),
        (["--repeats", "0"], "repeats holds 0"),
        (["--limit", "0"], "limit=0 is out of range"),
        (["/no/such/file.jsonl"], "workload file '/no/such/file.jsonl' does not exist"),
        (["--output", "/dev/null/report.json"], "output='/dev/null/report.json' cannot be written"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--arms", "transformers", "--batch-sizes", "4"], "runs at batch size 1 only"),
        (["--baseline", "proposed:8"], "baseline='proposed:8' is not among the arms; use one of vanilla"),
        (
            ["--arms", "transformers", "--batch-sizes", "1,4", "--baseline", "transformers"],
            "baseline='transformers' runs at batch size 1 only",
        ),
        (["--threads", "-1"], "threads=-1 is out of range"),
        (["--model", "nothing"], "model='nothing' is unknown"),
        (["--output", "/dev"], "output='/dev' cannot be written (Is a directory)"),
        (["--threads", "100000"], "threads=100000 is out of range; use an integer from 1 to"),
        (["--drafter", "/no/such/drafter"], "drafter='/no/such/drafter' does not exist"),
        (["--drafter", "nothing"], "drafter='nothing' does not exist"),
    ],
)
def test_bench_refuses_before_it_works(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(["bench", *arguments], capsys)


def test_demo_shows_and_measures(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hspark.building.profile_step", lambda step, **_: LinearCost(1.0, 0.05))
    options = ["demo", "--model", tiny, "--dtype", "float32", "--limit", "2", "--max-new-tokens", "8"]
    assert main([*options, "--color", "always"]) == 0
    coloured = capsys.readouterr().out
    out = CODE.sub("", coloured)
    assert coloured != out
    assert "[1/2] builtin/0" in out
    assert "[2/2] builtin/1" in out
    assert re.search(r"^ngram_only +[\d.]+ +[\d.]+x +[\d.]+ +identical", out, re.MULTILINE)
    assert "no model drafter is known for this target, so there is no hybrid arm" in out
    assert main([*options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in report["batches"][0]["arms"]] == ["vanilla", "ngram_only"]


@pytest.mark.slow
def test_the_default_model_edits_with_accepted_copies(
    cost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the package is for: n-gram drafts copy from the program, some are accepted, and no token changes."""
    program = (
        "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n"
    )
    line = {"instruction": "Rename the function `total` to `add_up`.", "input": program}
    path = tmp_path / "edit.jsonl"
    path.write_text(json.dumps(line))
    options = [
        str(path),
        "--max-new-tokens",
        "48",
        "--dtype",
        "float32",
        "--cost",
        cost,
        "--arms",
        "ngram_only",
        "--json",
    ]
    assert main(["bench", *options]) == 0
    vanilla, ngram = json.loads(capsys.readouterr().out)["batches"][0]["arms"]
    assert (ngram["compared"], ngram["different"]) == (1, 0)
    assert ngram["tokens"] == vanilla["tokens"]
    assert ngram["drafters"]["ngram"]["accepted"] > 0
    assert ngram["acceptance_length"] > vanilla["acceptance_length"] == 1.0
