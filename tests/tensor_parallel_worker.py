"""What each process of the tensor-parallel test runs, under torchrun: MODEL_DIRECTORY OUTPUT_PREFIX."""

from __future__ import annotations

import json
import os
import sys

import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.dspark import DSparkDrafter
from tests.drafters.dspark_cases import random_model, tiny_config
from tests.tiny import VOCAB

PROMPTS = [[1, 2, 3] * 5, [5] * 20, [7]]


def texts(directory: str, tensor_parallel: bool) -> dict[str, list[list[int]]]:
    """Outputs at temperature 0, sampled with a seed, and sampled with a seed that is drawn; costs are measured."""
    config = tiny_config(hidden_size=32, vocab_size=VOCAB, mask_token_id=VOCAB - 1, num_target_layers=3)
    model = random_model(config)
    model.embed_tokens = model.lm_head = None  # taken from the target, whole
    speculator = HybridSpeculator.from_pretrained(
        directory,
        drafter=DSparkDrafter(model),
        dtype="float32",
        device="cpu",
        max_length=64,
        progress=False,
        tensor_parallel=tensor_parallel,
    )
    found = {}
    for name, params in {
        "greedy": SamplingParams(max_new_tokens=12),
        "seeded": SamplingParams(max_new_tokens=12, temperature=0.8, seed=3),
        "unseeded": SamplingParams(max_new_tokens=12, temperature=0.8),
    }.items():
        found[name] = [output.token_ids for output in speculator.generate(PROMPTS, params, progress=False)]
    found["kernels"] = [[int(hasattr(p, "full_tensor")) for p in speculator.engine.target.model.parameters()]]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, prefix = sys.argv[1:]
    with open(f"{prefix}{os.environ['RANK']}.json", "w") as file:
        json.dump(texts(directory, tensor_parallel=True), file)
