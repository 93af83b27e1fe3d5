"""Decoder layers of the Llama family with few operators, for decode steps on a CPU.

A step of a few tokens spends more time starting small operators, and in Python between them, than on their arithmetic.
These layers compute what the model's own layers compute, in the same order and roundings, with about a third of the
calls: queries and keys are rotated together, norms are one operator, and nothing is looked up that does not change.
Every layer is tried on a sample first and is left alone unless the results are equal to the last bit, so a family whose
arithmetic differs anywhere keeps its own code. On accelerators the compiler does this work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hspark.kv_buffers import KVBuffers, Plan, Probe
from hspark.packing import FusedPart

if TYPE_CHECKING:
    from hspark.compiled_layers import CompiledLayers

# What a layer is made of, by module name, in any family that this file can stand in for.
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class Turn(NamedTuple):
    """Cosines and signed sines [T, 1, D] that rotate queries and keys [T, heads, D].

    rotate_half(x) * sin, with rotate_half = (-second half, first half), is roll(x, D/2) * (-sin, sin) bit for bit.
    """

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(position_embeddings: tuple[Tensor, Tensor]) -> Turn:
        """From the model's own cosines and sines [1, T, D]."""
        cos, sin = position_embeddings
        half = cos.shape[-1] // 2
        return Turn(cos.transpose(0, 1), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).transpose(0, 1))


class LeanLayer(nn.Module):
    """Stands in for one decoder layer: attention with rotary positions, gated MLP, RMS norms before both.

    layer: the layer with packed linears (`hspark.packing`). Called as the model calls its layers, on packed tokens
    [1, T, H] with `hspark` = (KVBuffers, Plan).
    """

    def __init__(self, layer: Any, buffers: KVBuffers) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.original = [layer]  # in a list, so that its modules do not count twice
        self.index = int(attention.layer_idx)
        shape = buffers.shapes[self.index]
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.key_dim
        self.scaling = attention.scaling
        self.qkv, self.gate_up = attention.q_proj.fused.joint, mlp.gate_proj.fused.joint
        self.output, self.down = attention.o_proj, mlp.down_proj
        self.act, self.hidden = mlp.act_fn, self.down.in_features
        self.norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self.head_norms: tuple[Any, Any] = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], hspark: Any, **others: Any
    ) -> Tensor:
        if isinstance(hspark, Probe):  # the model is being taken over by another target
            return self.original[0](hidden_states, position_embeddings=position_embeddings, hspark=hspark, **others)
        buffers, plan = hspark
        turn = position_embeddings if isinstance(position_embeddings, Turn) else Turn.of(position_embeddings)
        return self.run(hidden_states, turn, buffers, plan, self.index)

    def run(self, hidden_states: Tensor, turn: Turn, buffers: KVBuffers, plan: Plan, index: int) -> Tensor:
        """The layer's output [1, T, H], with keys and values in layer `index` of `buffers`."""
        # `forward` instead of a call: a module's call costs as much as a small operator, and no part has hooks.
        x = self.norms[0].forward(hidden_states)[0]
        attended = self._attend(x, turn, buffers, plan, index)
        hidden = hidden_states + self.output.forward(attended)
        gate, up = self.gate_up.forward(self.norms[1].forward(hidden)).split(self.hidden, dim=-1)
        return hidden + self.down.forward(self.act.forward(gate) * up)

    def _attend(self, x: Tensor, turn: Turn, buffers: KVBuffers, plan: Plan, index: int) -> Tensor:
        joint = self.qkv.forward(x).view(x.shape[0], -1, self.dim)
        turning = self.heads + self.kv_heads
        both = joint[:, :turning]
        if self.head_norms[0] is not None:
            query, key = both.split((self.heads, self.kv_heads), dim=1)
            both = torch.cat([self.head_norms[0](query), self.head_norms[1](key)], dim=1)
        rotated = both * turn.cos
        rotated += both.roll(self.dim // 2, -1) * turn.sin
        buffers.write(index, rotated[:, self.heads :], joint[:, turning:], plan)
        return buffers.look_up(index, rotated[:, : self.heads], self.scaling, plan)


class LeanModel:
    """A whole causal LM of lean layers: embedding, layers, norm, head, and nothing between them.

    A model's own `forward` handles caches, masks and recorded outputs, which takes as long as several layers do here.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.layers, self.rotary, self.norm = decoder.layers, decoder.rotary_emb, decoder.norm

    def decode(
        self,
        tokens: Tensor,
        position: Tensor,
        context: tuple[KVBuffers, Plan],
        taps: tuple[int, ...],
        compiled: CompiledLayers | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The last layer's output [1, T, H] and those of the layers `taps` ([T, H] each; -1 is the embedding's).

        compiled: the same layers as graphs, to be run instead.
        """
        hidden = self.embed(tokens[None])
        turn = Turn.of(self.rotary(hidden, position[None]))  # once, for all layers
        if compiled is not None:
            outputs = [*compiled(hidden, turn, context[1]), hidden]  # so that -1 is the embedding's
            return outputs[-2], [outputs[tap][0] for tap in taps]
        seen = {-1: hidden} if -1 in taps else {}
        for index, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, position_embeddings=turn, hspark=context)
            if index in taps:
                seen[index] = hidden
        return hidden, [seen[tap][0] for tap in taps]

    def logits(self, hidden: Tensor, keep: Tensor | None) -> Tensor:
        """[T, V] from the last layer's output [1, T, H], or [N, V] of the slots `keep` [N]."""
        return self.head(self.norm(hidden if keep is None else hidden[:, keep]))[0]


@torch.inference_mode()
def lean_model(model: Any, buffers: KVBuffers, plan: Plan) -> LeanModel | None:
    """Makes the model's layers lean (in place), and the whole model where that gives its own logits; else None.

    plan: one row's plan of a few tokens from position 0 on, for samples.
    """
    decoder = model.get_decoder()
    if not all(hasattr(decoder, name) for name in ("layers", "rotary_emb", "norm")):
        return None
    lean = use_lean_layers(decoder.layers, buffers, decoder.rotary_emb, plan)
    if lean < len(decoder.layers):
        return None
    whole = LeanModel(model)
    position = torch.arange(plan.write.shape[0], device=plan.write.device)
    tokens = position * 7919 % int(whole.head.weight.shape[0])
    inputs = {"input_ids": tokens[None], "position_ids": position[None]}
    expected = model(**inputs, use_cache=False, hspark=(buffers, plan)).logits
    hidden, _ = whole.decode(tokens, position, (buffers, plan), ())
    return whole if torch.equal(expected[0], whole.logits(hidden, None)) else None


@torch.inference_mode()
def use_lean_layers(layers: Any, buffers: KVBuffers, rotary: Any, plan: Plan) -> int:
    """Puts a `LeanLayer` in the place of each layer whose results it reproduces; returns how many are lean now.

    rotary: the model's module (x, position_ids) -> (cos, sin). plan: one row's plan of T >= 2 tokens, for the sample.
    """
    done = 0
    positions = torch.arange(plan.write.shape[0], device=plan.write.device)[None]
    for index, layer in enumerate(layers):
        if isinstance(layer, LeanLayer):  # the model served another target before
            done += 1
            continue
        if not _has_shape(layer) or buffers.shapes[index].shares_with is not None:
            continue
        try:
            lean = LeanLayer(layer, buffers)
            width = layer.self_attn.q_proj.fused.joint.in_features
            generator = torch.Generator().manual_seed(index)
            sample = torch.randn(1, positions.shape[1], width, generator=generator).to(buffers.keys[index].dtype)
            place = {"position_embeddings": rotary(sample, positions), "position_ids": positions}
            expected = layer(sample, attention_mask=None, hspark=(buffers, plan), **place)
            same = torch.equal(expected, lean(sample, hspark=(buffers, plan), **place))
        except Exception:  # the parts have these names, but take other arguments or give other shapes
            same = False
        if same:
            layers[index] = lean
            done += 1
    return done


def _has_shape(layer: Any) -> bool:
    """Whether a layer has exactly the parts, with fused projections, that a `LeanLayer` is made from."""
    if tuple(sorted(name for name, _ in layer.named_children())) != tuple(sorted(_PARTS)):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    fused = isinstance(getattr(attention, "q_proj", None), FusedPart) and isinstance(
        getattr(mlp, "gate_proj", None), FusedPart
    )
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    known = hasattr(attention, "o_proj") and hasattr(mlp, "down_proj") and hasattr(mlp, "act_fn")
    return fused and known and not hooked and getattr(attention, "scaling", None) is not None
