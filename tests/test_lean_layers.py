"""Lean layers give the very numbers of the layers they stand in for, or do not stand in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from hspark.lean_layers import LeanLayer
from hspark.target import CausalTarget
from tests.tiny import FAMILIES, VOCAB, tiny_llama, tiny_qwen3

TAPS = (-1, 0, 1)


def prefilled(target: CausalTarget, text: Tensor) -> Tensor:
    """Taps of a prompt in two chunks: the second reads what the first stored."""
    first, second = target.prefill(text[:5], 0, 0), target.prefill(text[5:], 0, 5)
    assert first is not None
    assert second is not None
    return torch.cat([first, second])


def generic(model: torch.nn.Module) -> CausalTarget:
    """The same target on the model's own layers."""
    target = CausalTarget(model, 1, 32)
    for index, layer in enumerate(target.layers):
        if isinstance(layer, LeanLayer):
            target.layers[index] = layer.original[0]
    target.lean = None
    target.set_taps(TAPS)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_the_models_own_layers(family: str, dtype: torch.dtype) -> None:
    model = FAMILIES[family]().to(dtype)
    lean = CausalTarget(copy.deepcopy(model), 1, 32)
    lean.set_taps(TAPS)
    text = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(prefilled(lean, text), prefilled(generic(model), text))


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_the_llama_family_is_lean_throughout(make: type) -> None:
    target = CausalTarget(make(), 1, 32)
    assert all(isinstance(layer, LeanLayer) for layer in target.layers)
    assert target.lean is not None


def test_other_arithmetic_is_left_alone() -> None:
    """A layer that does one thing more keeps its own code, and so does the whole model's loop."""
    model = tiny_llama()
    layer = model.model.layers[1]
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: plain(*args, **kwargs) * 1.5
    target = CausalTarget(model, 1, 32)
    assert isinstance(target.layers[0], LeanLayer)
    assert not isinstance(target.layers[1], LeanLayer)
    assert target.lean is None


def test_a_scaled_head_is_left_to_the_model() -> None:
    model = tiny_llama()
    plain = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        out = plain(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = scaled
    assert CausalTarget(model, 1, 32).lean is None


def test_a_model_can_be_taken_over_again() -> None:
    model = tiny_llama()
    text = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(4))
    results = []
    for rows in (1, 3):
        target = CausalTarget(model, rows, 32)
        assert target.lean is not None
        target.set_taps(TAPS)
        results.append(prefilled(target, text))
    assert torch.equal(*results)
