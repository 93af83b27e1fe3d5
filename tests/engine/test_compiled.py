"""The device step is one graph without a break, and compiled it emits what it emits eagerly."""

from __future__ import annotations

import copy
import functools
import shutil
from typing import Any

import pytest
import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.drafters.ngram import match
from hspark.policy import LinearCost, StepCostTable
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


def speculator(**options: Any) -> HybridSpeculator:
    small = tiny_qwen3(1, num_hidden_layers=1, layer_types=["full_attention"])
    target = tiny_llama(0, num_hidden_layers=1)
    return HybridSpeculator(target, drafter=CausalLMDrafter(small, length=3), compile="step", **options)


def test_sizes_are_symbols(monkeypatch: pytest.MonkeyPatch, graphs: list[Any]) -> None:
    """A few graphs serve all padded sizes and contexts, and none is made for work seen before."""
    hybrid = speculator(cost=LinearCost(0.05, 0.001), max_length=256)
    engine = hybrid.engine
    shapes = noted(monkeypatch, engine.sizing, "shape")
    prompts = [*PROMPTS, [9, 4] * 6, [3] * 70]
    params = [SamplingParams(max_new_tokens=20 * i + 5, seed=3, temperature=0.7) for i in range(len(prompts))]
    hybrid.generate(prompts, params)
    assert {shape.size for shape in shapes} <= set(packed_sizes(4, engine.device_step.width))
    assert len(shapes) >= 8
    # Drafts and verifications of one query or more, each once for the first size and once for all others; allocation.
    assert len(graphs) <= 7
    warm = len(graphs)
    hybrid.generate(prompts, params)
    assert len(graphs) == warm


def test_measuring_costs_leaves_nothing_to_compile(graphs: list[Any]) -> None:
    """Costs are measured on the functions that will run, in the sizes that will occur; greedy steps start warm."""
    hybrid = speculator(max_length=256, max_batch_size=2)
    assert isinstance(hybrid.cost, StepCostTable)
    assert hybrid.cost.sizes == list(packed_sizes(2, hybrid.engine.device_step.width))
    warm = len(graphs)
    assert 0 < warm <= 7
    outputs = hybrid.generate([*PROMPTS, [3] * 70], SamplingParams(max_new_tokens=30))
    assert all(output.finish_reason == "length" for output in outputs)
    assert len(graphs) == warm
    assert hybrid.engine.draft_failures == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_real_compiler_takes_the_scan() -> None:
    """Inductor lowers fewer operators than the stand-ins above: the n-gram scan, at sizes known and symbolic."""
    torch._dynamo.reset()
    compiled = torch.compile(match, fullgraph=True)
    tokens = torch.randint(0, 3, (2, 97), generator=torch.Generator().manual_seed(0))
    length = torch.tensor([40, 60])
    for limit in (64, 80, 96):
        found = [scan(tokens, length, context_limit=limit) for scan in (match, compiled)]
        for eager, graph in zip(*found, strict=True):
            assert torch.equal(eager, graph)


def test_padded_sizes_cover_every_step() -> None:
    for rows in (1, 3, 4, 128):
        for width in (0, 7, 15):
            sizes = packed_sizes(rows, width)
            assert sizes[-1] == rows * (width + 1)
            assert list(sizes) == sorted(set(sizes))
