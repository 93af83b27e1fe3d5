"""The default model, end to end: one seed gives one text, whatever drafts, chooses or checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.known import known_drafter
from hspark.drafters.opening import open_drafter
from hspark.models import LoadedTarget, load_target
from hspark.policy import LinearCost
from tests.processor import AMX

PROGRAM = "def area(w, h):\n    if w < 0 or h < 0:\n        raise ValueError\n    return w * h"
EDIT = f"Rename `w` to `width`.\n\n```python\n{PROGRAM}\n```"
PROMPTS: list[Any] = [
    [{"role": "user", "content": EDIT}],
    [{"role": "user", "content": "Name three colours, then name them again."}],
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n",
]
FREE = [("vanilla", "greedy"), ("ngram_only", "greedy"), ("proposed", "greedy")]
HYBRID = [
    ("model_only", "greedy"),
    ("model_only", "probabilistic"),
    ("proposed", "probabilistic"),
    ("extension", "greedy"),
]


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> LoadedTarget:
    if request.param == "bfloat16" and not AMX:
        pytest.skip("kernels for this processor do not keep to one order of sums")
    return load_target("smollm2-135m", request.param, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["float32", "bfloat16"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_seed_one_text(target: LoadedTarget, temperature: float) -> None:
    """All speculators take over the same model, one after the other."""
    dtype = "bfloat16" if target.model.dtype == torch.bfloat16 else "float32"
    params = SamplingParams(max_new_tokens=32, temperature=temperature, seed=4)
    known = known_drafter(target.name)
    runs = FREE + (HYBRID if known else [])
    texts = {}
    for policy, drafting in runs:
        speculator = HybridSpeculator(
            target.model,
            target.tokenizer,
            name=target.name,
            eos_token_ids=target.eos_token_ids,
            drafter=open_drafter(known, dtype, "cpu", drafting=drafting) if known else None,
            policy=policy,
            drafting=drafting,
            cost=LinearCost(0.05, 0.001),
            max_length=256,
            max_batch_size=3 if policy == "proposed" else 1,
        )
        texts[policy, drafting] = [output.token_ids for output in speculator.generate(PROMPTS, params)]
        speculator.engine.check_integrity()
    assert all(text == texts["vanilla", "greedy"] for text in texts.values())
