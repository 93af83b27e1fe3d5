"""The model drafter's half of a record table: one sequence's context, and blocks after many of its prefixes at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hspark.core import Chain, RowState
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_context import LayerKV
from hspark.lab.outputs import RecordedOutput
from hspark.sampling import GREEDY_TEMPERATURE, SamplingMode, SamplingState
from hspark.target import CausalTarget

Array = NDArray[Any]


class PrefixContext:
    """M blocks of one sequence in one attention call; what `BufferContext` computes row by row.

    layers: one LayerKV per draft layer, [1, nkv, C, D], column j being position j. anchors: int64 [M]. A block sees the
    context positions before its anchor (in windowed layers the last W of them) and its own tokens.
    """

    def __init__(self, config: DSparkConfig, layers: list[LayerKV], anchors: Tensor, dtype: torch.dtype) -> None:
        self.layers, self.windows = layers, config.windows
        blocks, size = anchors.shape[0], config.block_size
        share = config.num_heads // config.num_kv_heads
        position = torch.arange(layers[0].keys.shape[2], device=anchors.device)
        slot = torch.arange(size, device=anchors.device)
        own = torch.eye(blocks, dtype=torch.bool, device=anchors.device)[:, None, :, None]
        self.masks: dict[int | None, Tensor] = {}
        for window in set(config.windows):
            context = position < anchors[:, None]
            if window is not None:
                context = context & (position >= anchors[:, None] - window)
            causal = window is not None and config.windowed_blocks_causal
            inside = (slot <= slot[:, None]) if causal else torch.ones_like(slot[:, None] == slot)
            near = (own & inside[None, :, None, :]).reshape(blocks, size, blocks * size)
            visible = torch.cat([context[:, None].expand(-1, size, -1), near], dim=2).flatten(0, 1)
            mask = torch.zeros(visible.shape, dtype=dtype, device=anchors.device).masked_fill(~visible, float("-inf"))
            self.masks[window] = mask.repeat(share, 1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        blocks, size, heads, dim = query.shape
        kv = key.shape[2]
        keys, values = (
            torch.cat([context, own.reshape(1, blocks * size, kv, dim).transpose(1, 2)], dim=2)
            for context, own in zip(self.layers[layer], (key, value), strict=True)
        )
        # Query heads that share a key/value head are folded into the query axis.
        folded = query.view(blocks * size, kv, heads // kv, dim).permute(1, 2, 0, 3).reshape(1, kv, -1, dim)
        mask = self.masks[self.windows[layer]]
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return out.view(kv, heads // kv, blocks, size, dim).permute(2, 3, 0, 1, 4).reshape(blocks, size, heads, dim)


class PrefixDrafter(DSparkDrafter):
    """A DSpark drafter whose rows are prefixes of the one text that was observed in row 0; all else is inherited."""

    @classmethod
    def like(cls, drafter: DSparkDrafter) -> PrefixDrafter:
        """With the settings of `drafter`, unbound."""
        return cls(
            drafter.source,
            length=drafter.width,
            drafting=drafter.drafting,
            noise=drafter.noise,
            calibration=drafter.calibration,
        )

    def _block(self, rows: RowState, anchor: Tensor) -> Tensor:
        tokens, positions = self.model.block_inputs(self._known(self._anchor_tokens(rows, anchor)), anchor)
        columns = min(int(anchor.max()), self.columns)
        seen = slice(self.scratch, self.scratch + columns)
        layers = [LayerKV(buffer.keys[:1, :, seen], buffer.values[:1, :, seen]) for buffer in self.buffers]
        context = PrefixContext(self.config, layers, anchor, self.buffers[0].keys.dtype)
        return self.model.block_hidden(tokens, positions, context)


class ModelRecorder:
    """Target and drafter over one text after another.

    model: a transformers causal LM, taken over. longest: tokens of the longest text. blocks, chunk: see `record`.
    """

    def __init__(
        self, model: Any, drafter: DSparkDrafter, longest: int, name: str, blocks: int = 64, chunk: int = 512
    ) -> None:
        self.target = CausalTarget(model, 1, longest, drafter.taps)
        self.drafter = PrefixDrafter.like(drafter)
        self.drafter.bind(self.target.info(name), 1, longest)
        self.blocks, self.chunk = blocks, chunk

    @torch.inference_mode()
    def columns(self, output: RecordedOutput, seed: int | None) -> dict[str, Array]:
        """The model's columns of a record table (`RecordTable`) for one output, its positions in order."""
        first, device = len(output.prompt_token_ids), self.target.device
        text = torch.tensor([*output.prompt_token_ids, *output.output_token_ids], device=device)
        self._observe(text[:-1])
        parts: dict[str, list[Tensor]] = {
            name: [] for name in ("model_tokens", "model_acceptance", "model_length", "model_accepted")
        }
        for start in range(first, text.shape[0], self.blocks):
            length = torch.arange(start, min(start + self.blocks, text.shape[0]), device=device)
            chain = self._propose(text, length, first, output, seed)
            parts["model_tokens"].append(chain.tokens)
            parts["model_acceptance"].append(chain.acceptance)
            parts["model_length"].append(chain.length)
            parts["model_accepted"].append(accepted_length(chain.tokens, chain.length, text, length))
        width = self.drafter.width
        empty = {"model_tokens": torch.zeros(0, width), "model_acceptance": torch.zeros(0, width)}
        return {
            name: np.asarray(torch.cat(values).cpu() if values else empty.get(name, torch.zeros(0)))
            for name, values in parts.items()
        }

    def _observe(self, text: Tensor) -> None:
        """Shows the drafter the target's hidden states of `text` [T] at positions 0 .. T-1 of row 0."""
        for start in range(0, text.shape[0], self.chunk):
            part = text[start : start + self.chunk]
            features = self.target.prefill(part, 0, start)
            if features is not None:
                position = start + torch.arange(part.shape[0], device=text.device)
                self.drafter.observe(features, torch.zeros_like(position), position)

    def _propose(self, text: Tensor, length: Tensor, prompt: int, output: RecordedOutput, seed: int | None) -> Chain:
        """The chains after the prefixes text[:length[i]]; length: int64 [N]."""
        count = length.shape[0]
        sampling = SamplingState.defaults(count, text.device)
        temperature = output.temperature or 0.0
        sampling.temperature.fill_(temperature)
        sampling.seed.fill_(0 if seed is None else seed)
        rows = RowState(
            tokens=text.expand(count, -1),
            length=length,
            prompt_length=torch.full_like(length, prompt),
            limit=torch.full_like(length, text.shape[0]),
            running=torch.ones_like(length, dtype=torch.bool),
            sampling=sampling,
        )
        return self.drafter.propose(rows, SamplingMode(sampled=temperature > GREEDY_TEMPERATURE))


def accepted_length(tokens: Tensor, length: Tensor, text: Tensor, place: Tensor) -> Tensor:
    """int64 [N]: leading draft tokens that equal the text that followed.

    tokens: int64 [N, W]. length: int64 [N] of the chains. text: int64 [S]. place: int64 [N] where each chain begins.
    """
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    index = place[:, None] + slot
    right = (slot < length[:, None]) & (index < text.shape[0])
    right = right & (tokens == text[index.clamp(max=text.shape[0] - 1)])
    return right.long().cumprod(dim=1).sum(dim=1)
