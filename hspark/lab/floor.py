"""What a forward pass cannot do without: the target's linear layers, alone and one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hspark.packing import FusedPart, PackedLinear


def linear_layers(model: Any) -> list[Any]:
    """The linear layers that one forward calls, in their order in the model, head included. Fused projections count
    as the one layer that they are; experts, which are no layers of their own in transformers, are left out."""
    found: dict[int, Any] = {}
    for module in model.modules():
        layer = module.fused.joint if isinstance(module, FusedPart) else module
        if isinstance(layer, nn.Linear | PackedLinear):
            found.setdefault(id(layer), layer)
    return list(found.values())


@torch.inference_mode()
def linear_seconds(
    model: Any,
    tokens: int,
    *,
    repeats: int = 25,
    clock: Callable[[], float] = time.perf_counter,
    synchronise: Callable[[], Any] = lambda: None,
) -> float:
    """Median seconds of all linear layers of `model` on `tokens` tokens each.

    They run in turn, so that every weight comes from where it does in a forward pass: a layer that is timed by itself
    finds its weights in the cache, and looks several times as fast.
    """
    weight = next(model.parameters())
    generator = torch.Generator(weight.device).manual_seed(0)
    calls = [
        (layer, torch.randn(1, tokens, layer.in_features, generator=generator, device=weight.device).to(weight.dtype))
        for layer in linear_layers(model)
    ]
    times = []
    for _ in range(repeats):
        synchronise()
        begun = clock()
        for layer, x in calls:
            layer(x)
        synchronise()
        times.append(clock() - begun)
    return statistics.median(times)
