"""CUDA graphs: which tensors a captured step may write into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hspark.core import RowState
from hspark.step import DecodeStep


def state_tensors(rows: RowState, step: DecodeStep) -> list[Tensor]:
    """Everything that outlives a step and is written by it: the rows, and every part's keys and values."""
    parts: list[Any] = [rows, step.target.buffers.keys, step.target.buffers.values]
    for drafter in step.drafters:
        own = getattr(drafter, "buffers", None)  # DSpark: one pair per layer
        model = getattr(drafter, "lm", None)  # a draft model: a target of its own
        parts += [own] if own is not None else []
        parts += [model.buffers.keys, model.buffers.values] if model is not None else []
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)]


def hold_addresses(rows: RowState, step: DecodeStep) -> None:
    """Promises the compiler that these tensors stay where they are, so that graphs may change them in place.

    Without it a graph that writes into its inputs is not captured.
    """
    for tensor in state_tensors(rows, step):
        torch._dynamo.mark_static_address(tensor)
