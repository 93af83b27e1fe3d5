"""One target over two processes decides and emits what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hspark import HybridSpeculator
from tests.tensor_parallel_worker import texts
from tests.tiny import tiny_llama


def test_two_processes_emit_what_one_does(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tiny_llama(0).save_pretrained(directory)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.tensor_parallel_worker", str(directory), str(tmp_path / "rank")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    alone = texts(str(directory), tensor_parallel=False)
    assert first == second  # also where the seed was drawn and the cost was measured
    assert any(first["kernels"][0])
    assert not any(alone["kernels"][0])
    for name in ("greedy", "seeded"):
        assert first[name] == alone[name]


def test_outside_torchrun_it_says_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    tiny_llama(0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel=True needs one process per device.*torchrun"):
        HybridSpeculator.from_pretrained(tmp_path, drafter=None, tensor_parallel=True)


def test_heads_that_do_not_divide_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(0).save_pretrained(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"num_attention_heads=4 cannot be divided by 3"):
        HybridSpeculator.from_pretrained(tmp_path, drafter=None, tensor_parallel=True)
