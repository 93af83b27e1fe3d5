"""What the training tests share: a tiny target, outputs of it, and a store of its hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hspark.lab.outputs import RecordedOutput
from hspark.train.data import FeatureStore
from tests.tiny import VOCAB, tiny_llama

TAPS = (-1, 0, 1)
# A run of `hspark train` that takes a second.
OPTIONS = ["--device", "cpu", "--sequences", "2", "--micro-batch", "2", "--anchors", "4", "--vocabulary", "0"]
OPTIONS += ["--layers", "1", "--markov-rank", "4", "--block-size", "3", "--taps", "2", "--steps", "3"]


def tiny_outputs(count: int = 12, seed: int = 0, length: int = 24) -> list[RecordedOutput]:
    """Sequences in which every token follows from the one before it, so that a drafter has something to learn."""
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(99))
    outputs = []
    for number in range(count):
        tokens = [int(torch.randint(VOCAB, (), generator=generator))]
        prompt = int(torch.randint(3, 8, (), generator=generator))
        for _ in range(prompt + length - 1):
            tokens.append(int(successor[tokens[-1]]))
        outputs.append(
            RecordedOutput(tuple(tokens[:prompt]), tuple(tokens[prompt:]), float(number % 4 == 3), f"made/{number}")
        )
    return outputs


def tiny_store(folder: Path, target: Any | None = None, **options: Any) -> FeatureStore:
    outputs = tiny_outputs(**options)
    store = FeatureStore.create(folder, outputs, [f"group {o.task_id}" for o in outputs], TAPS, 32)
    store.fill(target or tiny_llama(), max_tokens=100)
    return store


def write_outputs(path: Path, count: int = 30) -> str:
    """An outputs file for `--outputs`."""
    records = [
        {
            "task_id": output.task_id,
            "temperature": output.temperature,
            "prompt": f"Prompt {number}",
            "output_token_ids": list(output.output_token_ids),
        }
        for number, output in enumerate(tiny_outputs(count))
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)
