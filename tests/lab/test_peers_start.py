"""Start-up of every engine that is compared, the machine's figures, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark.cli import main
from hspark.lab import peers_command
from hspark.lab.machine import copy_bandwidth
from hspark.lab.peers import Peers, peer_settings, start_jobs
from hspark.lab.startup import StartJob, StartUp, measure_start, peak_memory, run_job
from hspark.memory import free_memory
from hspark.policy import LinearCost
from tests.lab.fake_llama import counter, install_fake_llama
from tests.saved_target import save_tiny_target

COST = LinearCost(1.0, 0.05)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_target(tmp_path_factory.mktemp("peers") / "tiny"))


@pytest.fixture
def cost(tmp_path: Path) -> str:
    COST.save(tmp_path / "cost.json")
    return str(tmp_path / "cost.json")


def test_every_arm_has_a_start_job(tiny: str, cost: str) -> None:
    settings = peer_settings(max_new_tokens=100, drafter=tiny, cost=cost)
    peers = Peers(None, "helper", Path("f.gguf"))
    jobs = start_jobs("model", "float32", "cpu", 2, [1, 2], 128, settings, peers)
    assert {name: job.kind for name, job in jobs.items()} == {
        "transformers": "transformers",
        "transformers-lookup": "transformers",
        "vanilla": "hspark",
        "ngram_only": "hspark",
        "model_only": "hspark",
        "proposed": "hspark",
        "transformers-assistant": "transformers",
        "llama.cpp": "llama.cpp",
        "llama.cpp-lookup": "llama.cpp",
    }
    assert {job.new_tokens for job in jobs.values()} == {32}
    assert (jobs["vanilla"].settings["drafter"], jobs["proposed"].settings["drafter"]) == (None, tiny)
    assert jobs["transformers-lookup"].lookup == 10
    assert jobs["transformers-assistant"].assistant == "helper"
    assert [name for name, job in jobs.items() if job.gguf] == ["llama.cpp", "llama.cpp-lookup"]


def test_each_kind_of_job_reaches_its_first_token(tiny: str, cost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = install_fake_llama(monkeypatch, counter)
    make: dict[str, Any] = {"model": tiny, "dtype": "float32", "device": "cpu", "prompt": [1, 2], "new_tokens": 3}
    kinds: list[dict[str, Any]] = [
        {"kind": "hspark", "settings": {"cost": cost, "drafter": tiny}},
        {"kind": "transformers", "lookup": 10},
        {"kind": "transformers", "assistant": tiny},
        {"kind": "llama.cpp", "gguf": "f.gguf", "lookup": 10},
    ]
    for kind in kinds:
        begun = time.time() - 5.0
        start = run_job(StartJob(**make, capacity=64, **kind), begun)
        assert start.seconds is not None
        assert start.loading_seconds is not None
        assert start.seconds >= start.loading_seconds + 5.0 > 5.0
        assert start.device_peak_bytes is None
    assert [fake.options["model_path"] for fake in opened] == ["f.gguf"]
    with pytest.raises(ValueError, match="kind='vllm' is unknown; use one of 'hspark'"):
        run_job(StartJob("vllm", tiny, "float32", "cpu", [1], 2, 64), 0.0)


def test_a_start_runs_in_a_process_of_its_own(tiny: str, cost: str) -> None:
    job = StartJob("hspark", tiny, "float32", "cpu", [1, 2], 2, 64, settings={"cost": cost, "policy": "ngram_only"})
    start = measure_start(job)
    assert start.error is None
    assert start.seconds is not None
    assert start.loading_seconds is not None
    assert start.seconds > start.loading_seconds > 0
    if sys.platform == "linux":
        assert start.peak_bytes is not None
        assert 50e6 < start.peak_bytes < 5e9


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\n  ...\nValueError: no such model\n\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    start = measure_start(StartJob("hspark", "/no/such/model", "float32", "cpu", [1], 2, 64))
    assert start == StartUp(error="its process ended with status 1: ValueError: no such model")


def test_machine_figures() -> None:
    assert copy_bandwidth(CPU, size=1 << 20, repeats=2) > 0
    if sys.platform == "linux":
        assert (free_memory(CPU) or 0) > 1 << 20
        before = peak_memory()
        assert before is not None
        block = torch.ones(64 << 20, dtype=torch.uint8)
        assert block.sum() == 64 << 20
        assert (peak_memory() or 0) >= max(before, 64 << 20)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt": "abc abc"}\n{"instruction": "Rename abc.", "input": "abc = 1"}\n')
    return str(path)


@pytest.fixture
def common(tiny: str, cost: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("hspark.lab.peers.copy_bandwidth", lambda device: 1e9)
    return ["--model", tiny, "--dtype", "float32", "--cost", cost, "--max-new-tokens", "4"]


def test_peers_command_without_llama(
    workload: str, common: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    started: list[str] = []

    def start(job: StartJob) -> StartUp:
        started.append(job.kind)
        return StartUp(1.25, 0.75, 7_000_000)

    monkeypatch.setattr(peers_command, "measure_start", start)
    assert main(["bench", "peers", workload, "--limit", "1", *common]) == 0
    out = capsys.readouterr().out
    assert started == ["transformers"] * 2 + ["hspark"] * 2
    assert "left out  transformers-assistant: no --assistant was given" in out
    assert "left out  llama.cpp: llama-cpp-python is not installed" in out
    assert out.count("1.2") >= 4


def test_peers_command_for_programs(
    workload: str,
    common: list[str],
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_fake_llama(monkeypatch, counter)
    output = tmp_path / "peers.json"
    options = [workload, "--no-startup", "--assistant", tiny, "--drafter", tiny, "--json", "--output", str(output)]
    assert main(["bench", "peers", *options, *common]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(output.read_text())
    assert list(record["peers"])[2:] == ["vanilla", "ngram_only", "model_only", "proposed", "transformers-assistant"]
    assert record["peers"]["proposed"]["start"] is None
    assert (
        "was not loaded from a .gguf file; give one of the same weights with --gguf" in record["missing"]["llama.cpp"]
    )
    given = tmp_path / "given.gguf"
    given.touch()
    options = [workload, "--no-startup", "--gguf", str(given), "--json"]
    assert main(["bench", "peers", *options, *common]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"llama.cpp", "llama.cpp-lookup"} < set(record["peers"])
    assert record["batches"][0]["differences"], "the stand-in counts, so its text must be reported as different"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gguf", "/no/such.gguf"], "gguf='/no/such.gguf' is no file"),
        (["--output", "/dev/null/report.json"], "output='/dev/null/report.json' cannot be written"),
        (["--limit", "0"], "limit=0 is out of range"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--repeats", "0"], "repeats holds 0"),
        (["--llama-dtype", "int8"], "llama_dtype='int8' is unknown; use one of bfloat16, float16, float32"),
        (["--model", "nothing"], "model='nothing' is unknown"),
        (["/no/such/file.jsonl"], "workload file '/no/such/file.jsonl' does not exist"),
    ],
)
def test_peers_command_refuses_before_it_works(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
