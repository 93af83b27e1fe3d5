"""What will be needed is known before it is allocated, and what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hspark import memory
from hspark.drafters import NgramDrafter
from hspark.drafters.dspark import DSparkDrafter
from hspark.graphs import state_tensors
from hspark.kv_buffers import KVBuffers
from hspark.policy import policy
from hspark.rows import new_rows
from hspark.step import DecodeStep
from hspark.target import CausalTarget
from hspark.verify import verifier
from tests.drafters.dspark_cases import random_model, tiny_config
from tests.tiny import FAMILIES, VOCAB, tiny_llama


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_is_what_is_allocated(family: str, dtype: torch.dtype) -> None:
    target = CausalTarget(FAMILIES[family]().to(dtype), 3, 40)
    assert KVBuffers.needed(target.buffers.shapes, 3, 40, dtype) == target.buffers.num_bytes()


def test_too_much_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    needed = KVBuffers.needed(CausalTarget(model, 1, 64).buffers.shapes, 8, 64, torch.float32)
    free = needed // 2 + memory.logits_bytes(8, VOCAB)
    monkeypatch.setattr(memory, "free_memory", lambda _device: free)
    monkeypatch.setattr(KVBuffers, "__init__", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"max_batch_size=8 and max_length=64 need .* for example max_batch_size=4 or"):
        CausalTarget(model, 8, 64)


def test_what_fits_or_is_unknown_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (None, memory.logits_bytes(2, VOCAB) + (1 << 20)):
        monkeypatch.setattr(memory, "free_memory", lambda _device, free=free: free)
        assert CausalTarget(tiny_llama(), 2, 64).rows == 2


def in_group(root: Path, path: str, names: tuple[str, str], limit: object, used: int, stat: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(f"{value}\n")


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    """A container's limit, which the machine's own free memory does not show; caches are given back when needed."""
    own, root = tmp_path / "own", tmp_path / "root"
    second, first = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    in_group(root, "outer", second, 1000, 700, "anon 400\ninactive_file 300")
    in_group(root, "outer/inner", second, "max", 650, "inactive_file 300")
    in_group(root, "memory/box", first, 500, 900, "total_inactive_file 50")

    def free(text: str) -> list[int]:
        own.write_text(text)
        return memory._free_in_groups(root, own)

    assert free("0::/outer/inner\n") == [600]
    assert free("9:name=systemd:/\n4:cpu,memory:/box/gone\n0::/\n") == [0]
    assert free("0::/\n") == [], "no limit"
    assert memory._free_in_groups(root, tmp_path / "nothing") == []
    assert (memory.free_memory(torch.device("cpu")) or 1) > 0


def test_everything_a_step_writes_is_state() -> None:
    """The tensors whose addresses are promised to CUDA graphs: rows, target, drafter; the rest is made anew."""
    model = tiny_llama()
    config = tiny_config(hidden_size=32, vocab_size=VOCAB, mask_token_id=VOCAB - 1, num_target_layers=3)
    drafter: Any = DSparkDrafter(random_model(config))
    target = CausalTarget(model, 2, 32)
    step = DecodeStep(target, policy("proposed"), verifier("coupled"), drafter, NgramDrafter())
    for part in step.drafters:
        part.bind(target.info("tiny"), 2, 32)
    rows = new_rows(2, 32, target.device)
    held = {tensor.data_ptr() for tensor in state_tensors(rows, step)}
    assert rows.tokens.data_ptr() in held
    assert {t.data_ptr() for t in (*target.buffers.keys, *target.buffers.values)} <= held
    assert {t.data_ptr() for pair in drafter.buffers for t in pair} <= held
