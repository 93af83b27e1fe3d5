"""What the blocks of a DSpark drafter attend to: the context before the anchor, and the block itself.

Two ways to the same numbers. In training many blocks share one sequence's context and gradients flow; in drafting
every row has one block, and its context lies in static buffers that are never copied.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hspark.drafters.dspark_config import DSparkConfig


class Context(Protocol):
    """What a block attends to: the context before its anchor, and itself."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [A, B, nh, D], key and value [A, B, nkv, D] of the blocks -> attention output [A, B, nh, D]."""
        ...


class LayerKV(NamedTuple):
    """Context keys (rotated) and values of one layer, each [G, nkv, C, D]; column j is sequence position j."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerKV:
        return LayerKV(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))


class SharedContext:
    """G sequences, M blocks of each, all in one forward: for training.

    layers: one LayerKV per draft layer. anchors: int64 [G, M], position of each block's anchor; a block sees the
    context positions before its anchor (in windowed layers the last W of them) and its own tokens.
    """

    def __init__(self, config: DSparkConfig, layers: list[LayerKV], anchors: Tensor) -> None:
        self.layers, self.windows = layers, config.windows
        self.groups, self.blocks = anchors.shape
        position = torch.arange(layers[0].keys.shape[2], device=anchors.device)
        anchor = anchors[:, None, :, None, None, None]
        self.context_mask = {
            window: (position < anchor) & (position >= anchor - (window or position.shape[0]))
            for window in set(config.windows)
        }
        square = torch.ones(config.block_size, config.block_size, dtype=torch.bool, device=anchors.device)
        causal = square.tril() if config.windowed_blocks_causal else square
        self.block_mask = {window: square if window is None else causal for window in set(config.windows)}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        total, block, heads, dim = query.shape
        kv = key.shape[2]
        share, window = heads // kv, self.windows[layer]
        keys, values = self.layers[layer]
        grouped = query.view(self.groups, self.blocks, block, kv, share, dim).permute(0, 3, 1, 4, 2, 5) * scale
        folded = grouped.reshape(self.groups, kv, -1, dim)  # every query of a sequence against its context at once
        far = (folded @ keys.transpose(-1, -2).to(folded.dtype)).view(*grouped.shape[:-1], -1)
        far = far.masked_fill(~self.context_mask[window][..., :, :], float("-inf"))
        own_shape = (self.groups, self.blocks, block, kv, dim)
        own_key, own_value = (t.view(own_shape).permute(0, 3, 1, 2, 4) for t in (key, value))
        near = torch.einsum("gkmsqd,gkmtd->gkmsqt", grouped, own_key.to(grouped.dtype))
        near = near.masked_fill(~self.block_mask[window], float("-inf"))
        columns = keys.shape[2]
        # One softmax over both parts, in their own type (it accumulates in float32), then a split: its gradient
        # is one concatenation, that of two slices would be two zero-padded copies.
        weights = torch.cat((far, near), dim=-1).softmax(dim=-1).to(values.dtype)
        to_context, to_block = weights.split((columns, block), dim=-1)
        out = to_context.reshape(self.groups, kv, -1, columns) @ values
        out = out.view(grouped.shape) + torch.einsum("gkmsqt,gkmtd->gkmsqd", to_block, own_value)
        return out.permute(0, 2, 4, 1, 3, 5).reshape(total, block, heads, dim)


class BufferContext:
    """R rows, one block each, over static buffers: for drafting. Nothing of the context is copied.

    buffers: one LayerKV per layer, each [R, nkv, Z + C, D]: the first Z >= B columns are scratch for the block's own
    keys and values, which this class overwrites; column Z + j is position j. masks: {window: additive mask
    [R, 1, share * B, Z + C] of the buffers' type}, from `buffer_masks`, whose length limits the columns read.
    """

    def __init__(self, config: DSparkConfig, buffers: list[LayerKV], masks: dict[int | None, Tensor]) -> None:
        self.windows, self.buffers, self.masks = config.windows, buffers, masks

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows, block, heads, dim = query.shape
        kv = key.shape[2]
        keys, values = self.buffers[layer]
        keys[:, :, :block].copy_(key.transpose(1, 2))
        values[:, :, :block].copy_(value.transpose(1, 2))
        mask = self.masks[self.windows[layer]]
        columns = mask.shape[-1]
        # Query heads that share a key/value head are folded into the query axis, so that no key is repeated.
        folded = query.view(rows, block, kv, heads // kv, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv, -1, dim)
        out = F.scaled_dot_product_attention(
            folded, keys[:, :, :columns], values[:, :, :columns], attn_mask=mask, scale=scale
        )
        return out.view(rows, kv, heads // kv, block, dim).permute(0, 3, 1, 2, 4).reshape(rows, block, heads, dim)


def buffer_masks(
    config: DSparkConfig, anchor: Tensor, scratch: int, columns: int, dtype: torch.dtype
) -> dict[int | None, Tensor]:
    """Additive masks [R, 1, share * B, scratch + columns] by window, for anchors int64 [R] (see `BufferContext`)."""
    block, share = config.block_size, config.num_heads // config.num_kv_heads
    column = torch.arange(scratch + columns, device=anchor.device)
    slot = torch.arange(block, device=anchor.device)[:, None]
    position = column - scratch  # negative in the scratch columns
    context = (position >= 0) & (position < anchor[:, None])
    masks: dict[int | None, Tensor] = {}
    for window in set(config.windows):
        causal = window is not None and config.windowed_blocks_causal
        own = (column <= slot) if causal else (column < block).expand(block, -1)
        seen = context if window is None else context & (position >= anchor[:, None] - window)
        visible = seen[:, None, None, :] | own
        mask = torch.zeros(visible.shape, dtype=dtype, device=anchor.device).masked_fill(~visible, float("-inf"))
        masks[window] = mask.repeat(1, 1, share, 1)
    return masks


def buffer_columns(config: DSparkConfig, columns: int) -> tuple[int, int]:
    """(Z, columns of a row's buffers in all): scratch, positions, dump; both multiples of 8, as fused kernels like."""
    scratch = -(-config.block_size // 8) * 8
    return scratch, -(-(scratch + columns + 1) // 8) * 8


def buffer_bytes(config: DSparkConfig, max_batch_size: int, max_length: int, dtype: torch.dtype) -> int:
    """Bytes of the context buffers that a drafter allocates when it is bound to a target."""
    columns = max_length if config.max_positions is None else min(max_length, config.max_positions)
    _, total = buffer_columns(config, columns)
    size = torch.empty(0, dtype=dtype).element_size()
    return 2 * config.num_layers * max_batch_size * config.num_kv_heads * total * config.head_dim * size
