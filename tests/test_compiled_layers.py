"""Layers compiled in groups: the tokens of eager layers, two graphs for any sizes, and words where they cannot be."""

from __future__ import annotations

import copy
import gc
import shutil
from typing import Any

import pytest
import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.packing import _numbered
from hspark.policy import LinearCost
from hspark.target import CausalTarget
from tests.tiny import VOCAB, tiny_gemma4, tiny_llama, tiny_qwen3

PROMPTS = [[1, 2, 3] * 5, [5] * 20, [7], [9, 4] * 6, [1, 2, 3, 4] * 3]


def speculator(model: Any, compiled: bool, rows: int, policy: str = "proposed") -> HybridSpeculator:
    drafter = None if policy == "vanilla" else CausalLMDrafter(tiny_qwen3(1), length=3)
    cost = LinearCost(0.05, 0.001)
    return HybridSpeculator(
        copy.deepcopy(model), drafter=drafter, cost=cost, max_batch_size=rows, max_length=64, policy=policy,
        compile=compiled,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["vanilla", "proposed"])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_two_graphs_serve_every_size(rows: int, policy: str, graphs: list[Any]) -> None:
    """Twelve layers are two groups of one graph each way; steps of all sizes, also with idle rows, need no other."""
    model = tiny_llama(0, num_hidden_layers=12)
    compiled = speculator(model, True, rows, policy)
    assert len(graphs) == 2
    eager = speculator(model, False, rows, policy)
    for temperature in (0.0, 0.9):
        params = [SamplingParams(max_new_tokens=4 * i + 3, temperature=temperature, seed=i) for i in range(5)]
        texts = [[o.token_ids for o in s.generate(PROMPTS, params)] for s in (eager, compiled)]
        assert texts[0] == texts[1]
    assert len(graphs) == 2
    assert compiled.engine.draft_failures == 0


def test_groups_of_different_layers_and_sliding_windows(graphs: list[Any]) -> None:
    model = tiny_qwen3(0)
    texts = [
        [o.token_ids for o in speculator(model, compiled, 3).generate(PROMPTS, SamplingParams(max_new_tokens=14))]
        for compiled in (False, True)
    ]
    assert texts[0] == texts[1]
    assert len(graphs) == 2


@torch.inference_mode()
def test_taps_are_those_of_eager_layers(graphs: list[Any]) -> None:
    taps = (-1, 0, 4, 11)
    model = tiny_llama(0, num_hidden_layers=12)
    results = []
    for compiled in (False, True):
        target = speculator(model, compiled, 1, "vanilla").engine.target
        target.set_taps(taps)
        slots = torch.arange(4)
        plan = target.plan(slots * 0, slots, slots >= 0, slots[None], torch.zeros(1).long(), 64, full=True)
        results.append(target.forward(slots + 5, slots, plan))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
    assert len(graphs) == 2


def test_what_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"compile=True: on a CPU .* Gemma4ForCausalLM does not have"):
        speculator(tiny_gemma4(0), True, 1)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler found\nmore lines")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(ValueError, match=r"do not compile here \(no compiler found\); use 'auto' or False"):
        speculator(tiny_llama(0), True, 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_real_compiler_gives_the_numbers_of_eager_layers(dtype: torch.dtype) -> None:
    """Packed weights included. Sums may be taken in another order, so a few roundings are allowed."""
    torch._dynamo.reset()
    model = tiny_llama(0, num_hidden_layers=4).to(dtype)
    texts = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(2))
    results = []
    for compiled in (False, True):
        target = speculator(model, compiled, 3, "vanilla").engine.target
        assert isinstance(target, CausalTarget)
        row, slot = torch.arange(27) // 9, torch.arange(27) % 9
        with torch.inference_mode():
            plan = target.plan(row, slot, slot >= 0, torch.arange(27).view(3, 9), torch.zeros(3).long(), 48)
            logits, _ = target.forward(texts.flatten(), slot, plan)
        results.append((logits, target.buffers.keys[-1]))
    for eager, graph in zip(*results, strict=True):
        assert eager.abs().max() > 0.1
        torch.testing.assert_close(graph, eager, rtol=0, atol=16 * torch.finfo(dtype).eps * float(eager.abs().max()))


def test_packed_weights_of_models_that_are_gone_are_let_go() -> None:
    gc.collect()
    before = len(_numbered)
    target = CausalTarget(tiny_llama(0).to(torch.bfloat16), 1, 32)
    assert len(_numbered) > before
    del target
    gc.collect()
    assert len(_numbered) == before
