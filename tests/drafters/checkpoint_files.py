"""Two drafters of random weights, what they draft, and edits of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.drafters.dspark_cases import GREEDY, bound, feed, random_model, rows_of, tiny_config

MODEL = random_model(tiny_config())
REDUCED = random_model(tiny_config(draft_vocab_size=25, anchor_first=False))
TEXT = [1, 5, 9, 13, 2, 7, 7, 30]


def drafts(source: Any, **options: Any) -> list[int]:
    drafter = bound(source, **options)
    feed(drafter, 0, TEXT[:-1])
    return drafter.propose(rows_of([TEXT]), GREEDY).tokens[0].tolist()


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")


def shard(path: Path) -> None:
    """Splits model.safetensors in three, with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % 3 == number}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
