"""The device step is one graph without a break, and compiled it emits what it emits eagerly."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.policy import LinearCost
from hspark.rows import packed_sizes
from tests.tiny import tiny_llama, tiny_qwen3

PROMPTS = [[1, 2, 3] * 5, [5] * 20, [7]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_compiled_equals_eager(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph=True: a host read or a branch on a tensor anywhere in the step would raise."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=3)
    texts = []
    for compiled in (False, "step"):
        speculator = HybridSpeculator(
            copy.deepcopy(tiny_llama(0)),
            drafter=CausalLMDrafter(tiny_qwen3(1), length=3),
            cost=LinearCost(0.05, 0.001),
            max_length=64,
            compile=compiled,
        )
        texts.append([output.token_ids for output in speculator.generate(PROMPTS, params)])
        assert speculator.engine.draft_failures == 0
    assert texts[0] == texts[1]


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> set[Any]:
    """The set of results that `owner.name` gives from now on."""
    results: set[Any] = set()
    plain = getattr(owner, name)

    def noting(*args: Any, **options: Any) -> Any:
        result = plain(*args, **options)
        results.add(result)
        return result

    monkeypatch.setattr(owner, name, noting)
    return results


def test_one_variant_for_each_padded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilations are counted at the backend: as many as shapes occurred, and none for work seen before."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    speculator = HybridSpeculator(
        tiny_llama(0),
        drafter=CausalLMDrafter(tiny_qwen3(1), length=3),
        cost=LinearCost(0.05, 0.001),
        max_length=64,
        compile="step",
    )
    engine = speculator.engine
    shapes = noted(monkeypatch, engine.sizing, "shape")
    contexts = noted(monkeypatch, engine.sizing, "context")
    params = SamplingParams(max_new_tokens=12, seed=3, temperature=0.7)
    speculator.generate(PROMPTS, params)
    assert {shape.size for shape in shapes} <= set(packed_sizes(4, engine.device_step.width))
    assert len(graphs) <= len(shapes) + len(contexts) + 1  # verifications, drafts, the allocation
    warm = len(graphs)
    speculator.generate(PROMPTS, params)
    assert len(graphs) == warm


def test_padded_sizes_cover_every_step() -> None:
    for rows in (1, 3, 4, 128):
        for width in (0, 7, 15):
            sizes = packed_sizes(rows, width)
            assert sizes[-1] == rows * (width + 1)
            assert list(sizes) == sorted(set(sizes))
