"""What the tests of the benchmark share: a tiny target, random prompts, and a cost."""

from __future__ import annotations

from typing import Any

import torch

from hspark.lab.runs import BenchPrompt
from hspark.models import LoadedTarget
from hspark.policy import LinearCost
from tests.tiny import VOCAB, tiny_llama

COST = LinearCost(1.0, 0.05)


def tiny_target(**changes: Any) -> LoadedTarget:
    return LoadedTarget("tiny", tiny_llama(**changes), None, (), None)


def random_prompts(count: int, seed: int = 0) -> list[BenchPrompt]:
    """Alternating kinds, different lengths."""
    generator = torch.Generator().manual_seed(seed)
    kinds = ["edit", "chat"]
    return [
        BenchPrompt(f"p{i}", kinds[i % 2], torch.randint(0, VOCAB, (5 + i,), generator=generator).tolist())
        for i in range(count)
    ]
