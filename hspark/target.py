"""A transformers causal LM on static KV buffers, with a packed ragged forward and hidden-state taps.

The model runs its own forward on packed tokens [1, T] without a cache object. A registered attention function writes
each token's keys and values at its (row, position) and lets it attend to that row's buffer, so one forward serves
prompt chunks and verification alike, and a rejected draft needs no roll-back: its position is overwritten when the
right token arrives.

Positions of a row with `length` committed tokens, of which the newest (the anchor) is not processed yet:

    0 .. length-2            processed: keys and values are valid
    length-1                 anchor: written by the next forward
    length .. length-1+kept  draft slots: written by the next forward; valid up to the last accepted one,
                             overwritten by later forwards beyond it
    max_length               dump column: padding writes here, nobody reads it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hspark.compiled_layers import CompiledLayers
from hspark.drafters.base import TargetInfo
from hspark.kv_buffers import KVBuffers, Plan, UnsupportedModelError
from hspark.lean_layers import LeanModel, lean_model
from hspark.memory import check_memory
from hspark.packing import fuse_norms, pack_linears
from hspark.supported import check_architecture, decoder_layers, probe_layers

# Queries that a CPU's attention takes together at least; `CausalTarget._whole_blocks` says what follows from it.
_QUERY_BLOCK = 32


class CausalTarget:
    """The target model of the engine.

    model: a transformers causal LM. It is taken over: its attention implementation is replaced by the static one, and
    on a CPU its layers are laid out anew (`hspark.packing`, `hspark.lean_layers`), so it no longer runs by itself.
    rows, max_length: static sizes R and S of the buffers. taps: layers whose outputs `forward` also returns; index i is
    the output of decoder layer i (0-based), -1 the embedding output. lay_out: False leaves the layers as they are, on a
    CPU too, for a compiler: it cannot look into weights in oneDNN's layout.
    Raises UnsupportedModelError, naming the architecture, for models that these buffers cannot serve
    (`hspark.supported`), and ValueError for sizes that do not fit into memory (`hspark.memory`), before the model is
    changed.
    """

    compiled: CompiledLayers | None = None  # set by `compile_layers`

    def __init__(
        self, model: Any, rows: int, max_length: int, taps: tuple[int, ...] = (), *, lay_out: bool = True
    ) -> None:
        check_architecture(model, max_length)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.rows, self.max_length = rows, max_length
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.decoder, self.layers = model.get_decoder(), decoder_layers(model)
        shapes = probe_layers(model, max_length)
        needed = KVBuffers.needed(shapes, rows, max_length, self.dtype)
        check_memory(needed, rows, max_length, self.vocab_size, self.device)
        self.laid_out = lay_out and self.device.type == "cpu"
        if self.laid_out:
            pack_linears(model)
            fuse_norms(model)
        self.buffers = KVBuffers(shapes, rows, max_length, self.dtype, self.device)
        self.lean = self._lean()
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.taps: tuple[int, ...] = ()
        self.set_taps(taps)

    def _lean(self) -> LeanModel | None:
        """The model with few operators, where that gives the same results (on a CPU)."""
        if not self.laid_out:
            return None
        lean = lean_model(self.model, self.buffers, self._prefill_plan(0, 0, min(4, self.max_length)))
        self.buffers.clear(0)
        return lean

    def info(self, name: str) -> TargetInfo:
        """What drafters are bound to."""
        return TargetInfo(
            name=name,
            vocab_size=self.vocab_size,
            hidden_size=int(self.config.hidden_size),
            num_layers=len(self.layers),
            dtype=self.dtype,
            device=self.device,
            embed_tokens=self.model.get_input_embeddings(),
            lm_head=self.model.get_output_embeddings(),
        )

    def set_taps(self, taps: tuple[int, ...]) -> None:
        """Chooses the tapped layers, in the order in which their outputs are concatenated."""
        for tap in taps:
            if not -1 <= tap < len(self.layers):
                raise ValueError(f"taps={taps} holds {tap}; use layer numbers from -1 to {len(self.layers) - 1}")
        for hook in self._hooks:
            hook.remove()
        self.taps, self._hooks = tuple(taps), []
        for tap in self.taps if self.lean is None else ():
            self._hooks.append(self._hook(tap))

    def _hook(self, tap: int) -> Any:
        if tap < 0:

            def before(_module: nn.Module, args: tuple, kwargs: dict) -> None:
                self._captured[tap] = args[0] if args else kwargs["hidden_states"]

            return self.layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(_module: nn.Module, _args: tuple, output: Any) -> None:
            self._captured[tap] = output[0] if isinstance(output, tuple) else output

        return self.layers[tap].register_forward_hook(after)

    def _masks(self, positions: Tensor, context: int) -> tuple[Tensor, ...]:
        """Additive masks for queries at `positions` [R', Q]: key j is seen from j to the query's own position."""
        key = torch.arange(context, device=positions.device)
        causal = key <= positions[..., None]
        masks = []
        for window, group in self.buffers.kinds:
            seen = causal if window is None else causal & (key > positions[..., None] - window)
            mask = torch.where(seen, 0.0, float("-inf")).to(self.dtype)
            masks.append(mask.repeat(1, group, 1)[:, None])
        return tuple(masks)

    def plan(
        self,
        row: Tensor,
        offset: Tensor,
        valid: Tensor,
        index: Tensor,
        anchor: Tensor,
        context: int,
        *,
        full: bool = False,
        span: tuple[int, int] | None = None,
    ) -> Plan:
        """The plan of a verification: packed slots of all R rows (`verify.layout.Layout`), queries = offsets.

        index: int64 [R, Q] packed index of slot q of row r. anchor: int64 [R] position of each row's slot 0.
        context: static bound on the positions attended to; at least 1 + the largest position in the step.
        full: the host knows that all rows of the span have all Q slots, which saves gathering.
        span: first row with slots and the row after the last, so that idle rows outside it cost nothing; None for all.
        Compiled layers know one kind of plan: over all rows, and gathering unless there is only one row.
        """
        if self.compiled is not None:
            span, full = None, self.rows == 1
        first, last = span or (0, self.rows)
        index = self._whole_blocks(index)
        queries = index.shape[1]
        position = anchor[row] + offset
        stride = self.max_length + 1
        write = torch.where(valid, row * stride + position, self.max_length)
        # Queries before the text see its first token: a row of the mask that hides everything would give NaN.
        grid_positions = (anchor[first:last, None] + torch.arange(queries, device=anchor.device)).clamp(min=0)
        masks = self._masks(grid_positions, context)
        dense = full and row.shape[0] == (last - first) * queries
        packed = (row - first) * queries + offset
        return Plan(write, index[first:last], packed, masks, first, last - first, context, dense)

    def _whole_blocks(self, index: Tensor) -> Tensor:
        """`index` [R, Q], or [R, Q + 1] with the last query once more, so that all queries are summed in one order.

        A CPU's attention takes a row's queries, of all heads that share keys, in blocks of 32, and one that is left
        over by itself with a kernel whose sums have another order. In bfloat16 that flips near-ties. Compiled layers
        of a single row take their queries as they are: another number of them would be another graph.
        """
        alone = any(group * index.shape[1] % _QUERY_BLOCK == 1 for _, group in self.buffers.kinds)
        graph_of_one_row = self.compiled is not None and self.rows == 1
        if not alone or not self.laid_out or self.dtype != torch.bfloat16 or graph_of_one_row:
            return index
        return torch.cat([index, index[:, -1:]], dim=1)

    def _prefill_plan(self, row: int, start: int, count: int) -> Plan:
        """One row's plan for `count` tokens from position `start` on."""
        slots = torch.arange(count, device=self.device)
        position = start + slots
        write = row * (self.max_length + 1) + position
        context = start + count
        return Plan(write, slots[None], slots, self._masks(position[None], context), row, 1, context, True)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, row: int, start: int) -> Tensor | None:
        """Processes `tokens` [T] of one row at positions start.. ; returns the taps [T, len(taps) * H] or None."""
        plan = self._prefill_plan(row, start, tokens.shape[0])
        position = start + torch.arange(tokens.shape[0], device=self.device)
        if self.lean is not None:
            return join(self.lean.decode(tokens, position, (self.buffers, plan), self.taps)[1])
        self.decoder(input_ids=tokens[None], position_ids=position[None], use_cache=False, hspark=(self.buffers, plan))
        return self._features()

    def forward(
        self, tokens: Tensor, position: Tensor, plan: Plan, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [T, V] and taps [T, len(taps) * H] (None without taps) of packed tokens [T] at positions [T].

        keep: int64 [N] packed slots whose logits are wanted, in that order; None for all.
        """
        if self.lean is not None:
            # A single slot of many rows is too rare for a graph of its own.
            compiled = self.compiled if tokens.shape[0] > 1 or self.rows == 1 else None
            hidden, taps = self.lean.decode(tokens, position, (self.buffers, plan), self.taps, compiled)
            return self.lean.logits(hidden, keep), join(taps)
        logits = self.model(
            input_ids=tokens[None],
            position_ids=position[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            hspark=(self.buffers, plan),
        ).logits[0]
        return logits, self._features()

    def _features(self) -> Tensor | None:
        features = join([self._captured[tap][0] for tap in self.taps])
        self._captured.clear()
        return features


def join(taps: list[Tensor]) -> Tensor | None:
    """[T, n * H] from n tapped hidden states [T, H]; None for none."""
    return torch.cat(taps, dim=-1) if taps else None


__all__ = ["CausalTarget", "Plan", "UnsupportedModelError"]
