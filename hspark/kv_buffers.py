"""Static KV buffers behind transformers' attention interface: write at (row, position), attend to the row's buffer."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "hspark_static"


class UnsupportedModelError(ValueError):
    """The model's architecture cannot run on static KV buffers."""


class StateNotPassedError(RuntimeError):
    """Attention was called without the step's state."""


class Plan(NamedTuple):
    """Where the T packed tokens of one forward go, and what they see. R' rows take part (all, or one in prefill).

    write:  int64 [T] flat index row * (max_length + 1) + position into the KV buffers.
    grid:   int64 [R', Q] packed index of query q of row r (any valid index where there is none).
    packed: int64 [T] index of each packed token in the flattened grid.
    masks:  one additive mask [R', 1, G * Q, C] for each (window, G) kind of layer.
    first_row, rows: the buffer rows that take part are first_row .. first_row + rows - 1.
    context: C, how many leading positions of the buffers are attended to.
    dense: every row has exactly Q slots, so packed order and grid order are the same and nothing need be gathered.
    """

    write: Tensor
    grid: Tensor
    packed: Tensor
    masks: tuple[Tensor, ...]
    first_row: int
    rows: int
    context: int
    dense: bool


class LayerShape(NamedTuple):
    """What the attention function saw of one layer: heads, head sizes, and its sliding window (None = all)."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    shares_with: int | None  # layer whose buffer this one reads, for models that share keys and values


class Probe:
    """Collects LayerShapes during one forward of a single token."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.stores: dict[Any, int] = {}


def _check_request(module: nn.Module, attention_mask: Tensor | None, extras: dict[str, Any]) -> None:
    """UnsupportedModelError if a layer wants other than causal attention, in a window or not."""
    asked = [name for name in ("softcap", "s_aux", "position_bias") if extras.get(name) is not None]
    if attention_mask is not None:
        asked.append("an attention mask of its own")
    if getattr(module, "is_causal", None) is False:
        asked.append("attention to later tokens")
    if asked:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks attention for {', '.join(asked)}, which static KV buffers do not implement; "
            "use a model without it"
        )


def static_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    hspark: Any = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface on static buffers: query [1, H, T, D], key and value [1, H_kv, T, D]."""
    if hspark is None:
        raise StateNotPassedError(
            "this model's attention now runs on hspark's static buffers; call it through CausalTarget"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(hspark, Probe):
        _check_request(module, attention_mask, extras)
        kind = getattr(module, "layer_type", None)
        shared = hspark.stores[kind] if getattr(module, "is_kv_shared_layer", False) else None
        if getattr(module, "store_full_length_kv", False):
            hspark.stores[kind] = layer
        hspark.layers[layer] = LayerShape(
            query.shape[1], key.shape[1], key.shape[3], value.shape[3], sliding_window, shared
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    buffers, plan = hspark
    return buffers.attend(layer, query[0], key[0], value[0], scaling, plan)[None], None


AttentionInterface.register(ATTENTION_NAME, static_attention)


class KVBuffers:
    """Keys and values of every layer, [R, S + 1, H_kv * D] each, allocated once; column S is the dump column."""

    def __init__(
        self, shapes: list[LayerShape], rows: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = shapes
        self.kinds: list[tuple[int | None, int]] = []
        self.kind_of: list[int] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            kind = (shape.window, shape.heads // shape.kv_heads)
            if kind not in self.kinds:
                self.kinds.append(kind)
            self.kind_of.append(self.kinds.index(kind))
            if shape.shares_with is not None:
                self.keys.append(self.keys[shape.shares_with])
                self.values.append(self.values[shape.shares_with])
                continue
            for store, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                store.append(torch.zeros(rows, max_length + 1, shape.kv_heads * dim, dtype=dtype, device=device))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, plan: Plan
    ) -> Tensor:
        """Writes key and value [H_kv, T, D] of one layer, returns the attention output [T, H, D_v] of query [H, T, D].

        Grouped queries are folded into the query dimension, so keys and values are read once and never repeated.
        """
        self.write(layer, key.transpose(0, 1), value.transpose(0, 1), plan)
        return self.look_up(layer, query.transpose(0, 1), scaling, plan).unflatten(-1, (query.shape[0], -1))

    def write(self, layer: int, key: Tensor, value: Tensor, plan: Plan) -> None:
        """Stores key and value [T, H_kv, D] of one layer at the plan's places, unless the layer shares another's."""
        if self.shapes[layer].shares_with is not None:
            return
        for store, new in ((self.keys[layer], key), (self.values[layer], value)):
            store.view(-1, store.shape[2]).index_copy_(0, plan.write, new.flatten(1))

    def look_up(self, layer: int, query: Tensor, scaling: float | None, plan: Plan) -> Tensor:
        """The attention output [T, H * D_v] of query [T, H, D] over the rows' buffers."""
        shape = self.shapes[layer]
        rows, queries = plan.grid.shape
        group = shape.heads // shape.kv_heads
        keys, values = self._visible(layer, plan)
        if not plan.dense:
            query = query[plan.grid.reshape(-1)]
        grid = query.reshape(rows, queries, shape.kv_heads, group, shape.key_dim).permute(0, 2, 3, 1, 4)
        grid = grid.reshape(rows, shape.kv_heads, group * queries, shape.key_dim)
        mask = plan.masks[self.kind_of[layer]]
        out = F.scaled_dot_product_attention(grid, keys, values, attn_mask=mask, scale=scaling)
        out = out.view(rows, shape.heads, queries, shape.value_dim).transpose(1, 2).reshape(rows * queries, -1)
        return out if plan.dense else out[plan.packed]

    def _visible(self, layer: int, plan: Plan) -> tuple[Tensor, Tensor]:
        """Keys [R', H_kv, C, D] and values [R', H_kv, C, D_v] that the plan attends to, as views."""
        shape = self.shapes[layer]
        span = slice(plan.first_row, plan.first_row + plan.rows)
        keys = self.keys[layer][span, : plan.context].unflatten(-1, (shape.kv_heads, shape.key_dim))
        values = self.values[layer][span, : plan.context].unflatten(-1, (shape.kv_heads, shape.value_dim))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def part(self, start: int, count: int) -> KVBuffers:
        """The buffers of `count` layers from `start` on, numbered from 0: the same memory, for a graph of those layers.
        None of them may share the buffers of another layer."""
        part = copy.copy(self)
        for name in ("shapes", "kind_of", "keys", "values"):
            setattr(part, name, getattr(self, name)[start : start + count])
        for store in (*part.keys, *part.values):
            torch._dynamo.mark_static(store)  # type: ignore[no-untyped-call]
        return part

    def clear(self, row: int, start: int = 0) -> None:
        """Zeroes one row from position `start` on: a masked NaN would still poison a weighted sum."""
        for store in (*self.keys, *self.values):
            store[row, start:].zero_()

    @staticmethod
    def needed(shapes: list[LayerShape], rows: int, max_length: int, dtype: torch.dtype) -> int:
        """Bytes of the buffers before they exist: what `num_bytes` will say."""
        own = [shape for shape in shapes if shape.shares_with is None]
        width = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in own)
        return rows * (max_length + 1) * width * dtype.itemsize

    def num_bytes(self) -> int:
        """Bytes of all buffers; layers that share one count it once."""
        distinct = {id(store): store for store in self.keys + self.values}
        return sum(store.numel() * store.element_size() for store in distinct.values())
