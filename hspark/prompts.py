"""What may be given as prompts and parameters, brought into one form."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from hspark.config import SamplingParams

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | torch.Tensor


def items_of(name: str, value: Any) -> list[Any]:
    """The entries of a list, tuple, range, tensor or array."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, str | bytes | bytearray) or not isinstance(items, Sequence):
        raise ValueError(f"{name}={value!r} is not usable; use a string, token ids, or a list of chat messages")
    return list(items)


def as_batch(prompts: Any) -> list[Any]:
    """A list of prompts, also where one prompt is given."""
    if isinstance(prompts, str):
        return [prompts]
    items = items_of("prompts", prompts)
    if not items:
        raise ValueError("prompts is empty; use a prompt, or a list of at least one")
    return [items] if all(isinstance(item, Integral | dict) for item in items) else items


def for_each(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Sequence) else [params]
    for own in each:
        if not isinstance(own, SamplingParams):
            raise ValueError(
                f"params holds {own!r}; use SamplingParams, one for all prompts or a list with one for each"
            )
    if len(each) != count:
        raise ValueError(f"params has {len(each)} entries for {count} prompts; use one, or one for each")
    return each
