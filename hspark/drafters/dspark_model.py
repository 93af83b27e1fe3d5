"""The DSpark network, for drafting and for training: one module whose parameters are named as checkpoints name them.

Symbols: H hidden size, N taps, V target vocabulary, Vd draft vocabulary, B block size, r Markov rank, D head width,
nkv key/value heads; A blocks, G sequences (A = G * M: M blocks of each sequence, in order), C context columns.

    taps     [..., C, N*H]  -> context_features      -> features [..., C, H]
    features [G, C, H], positions [G, C] -> keys_values -> per layer (keys, values), each [G, nkv, C, D]
    tokens, positions [A, B] + a context -> block_hidden -> hidden [A, B, H]
    hidden   [A, B, H]      -> base_logits           -> [A, B, Vd]
    prev     [A, B], hidden -> markov_bias           -> [A, B, Vd], to be added to the base logits
    prev     [A, B], hidden -> confidence            -> [A, B] logits of acceptance, float32

`prev` holds, in target ids, the token before the one that a slot predicts. A context answers "attend to what comes
before the block, and to the block": `SharedContext` for training (many blocks per sequence, differentiable),
`BufferContext` for drafting (one block per row, static buffers, no copy of the context).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_context import BufferContext, Context, LayerKV, SharedContext
from hspark.drafters.dspark_heads import ConfidenceHead, MarkovHead
from hspark.drafters.rope import Rotary, rotate

__all__ = ["BufferContext", "Context", "DSparkConfig", "DSparkModel", "LayerKV", "SharedContext"]


class Norm(nn.Module):
    """RMSNorm over the last dimension, computed in float32; `weight` multiplies directly (also for Gemma 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms of queries and keys."""

    def __init__(self, config: DSparkConfig, layer: int) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.layer, self.heads, self.kv, self.dim = layer, config.num_heads, config.num_kv_heads, dim
        self.gemma = config.backbone == "gemma4"
        self.eps = config.rms_norm_eps
        self.scale = 1.0 if self.gemma else dim**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv * dim, bias=bias)
        self.v_proj = None if config.key_is_value else nn.Linear(hidden, self.kv * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=bias)
        self.q_norm = Norm(dim, config.rms_norm_eps)
        self.k_norm = Norm(dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] -> rotated keys and values, each [..., nkv, D]. Block tokens and context features alike."""
        shape = (*x.shape[:-1], self.kv, self.dim)
        key = self.k_proj(x).view(shape)
        value = key if self.v_proj is None else self.v_proj(x).view(shape)
        if self.gemma:  # the values' norm has no weight
            value = F.rms_norm(value, (self.dim,), None, self.eps)
        return rotate(self.k_norm(key), cosine, sine), value

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, context: Context) -> Tensor:
        query = rotate(self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.heads, self.dim)), cosine, sine)
        key, value = self.keys_values(x, cosine, sine)
        out = context.attend(self.layer, query, key, value, self.scale)
        return self.o_proj(out.reshape(*x.shape[:-1], self.heads * self.dim))


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.tanh_gelu = config.activation == "gelu_pytorch_tanh"

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.tanh_gelu else F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


class Layer(nn.Module):
    """A draft layer: pre-norm (Qwen3 style), or with norms on both sides and a scalar (Gemma 4)."""

    layer_scalar: Tensor

    def __init__(self, config: DSparkConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.gemma = config.backbone == "gemma4"
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        if self.gemma:
            self.pre_feedforward_layernorm = Norm(hidden, eps)
            self.post_feedforward_layernorm = Norm(hidden, eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, context: Context) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cosine, sine, context)
        if not self.gemma:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class DSparkModel(nn.Module):
    """The drafter's network. See the head of this file for the shapes.

    tables: False leaves `embed_tokens` and `lm_head` out until `share_tables` supplies the target's.
    """

    d2t: Tensor
    t2d: Tensor
    embed_scale: Tensor

    def __init__(self, config: DSparkConfig, *, tables: bool = True) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if tables else None
        self.lm_head = nn.Linear(hidden, config.drafts, bias=False) if tables else None
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        if config.reduced:
            # Offsets: draft id d stands for target id d + d2t[d]; t2d marks the target ids that can be drafted.
            self.register_buffer("d2t", torch.zeros(config.drafts, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.drafts)
        # Gemma multiplies embeddings by sqrt(H) rounded to the weights' type: a buffer, so that casts round it.
        scale = hidden**0.5 if config.backbone == "gemma4" else 1.0
        self.register_buffer("embed_scale", torch.tensor(scale, device="cpu"), persistent=False)

    def share_tables(self, embed_tokens: Tensor | None = None, lm_head: Tensor | None = None) -> None:
        """Takes the target's tables, each [V, H] or with padded rows, without copying; None leaves one as it is.

        They are frozen. With a reduced vocabulary the head's rows are selected, and therefore copied. Casting this
        module afterwards gives it its own copy; the target is never changed.
        """
        rows = self.config.vocab_size
        for name, table in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if table is None:
                continue
            if table.dim() != 2 or table.shape[1] != self.config.hidden_size or table.shape[0] < rows:
                raise ValueError(
                    f"{name} of shape {list(table.shape)} does not fit the drafter; "
                    f"expected at least {rows} rows of {self.config.hidden_size}"
                )
            selected = name == "lm_head" and self.config.reduced
            self.set_table(name, table[self.target_ids().to(table.device)] if selected else table[:rows])

    def set_table(self, name: str, table: Tensor) -> None:
        """Makes `table` the frozen "embed_tokens" [V, H] or "lm_head" [Vd, H], sharing its storage."""
        module: nn.Module
        if name == "embed_tokens":
            module = nn.Embedding.from_pretrained(table.detach(), freeze=True)
        else:
            module = nn.Linear(table.shape[1], table.shape[0], bias=False, device="meta")
            module.weight = nn.Parameter(table.detach(), requires_grad=False)
        setattr(self, name, module)

    def target_ids(self) -> Tensor:
        """int64 [Vd]: the target id of each draft id."""
        ids = torch.arange(self.config.drafts, device=self.fc.weight.device)
        return ids + self.d2t if self.config.reduced else ids

    def to_target(self, draft: Tensor) -> Tensor:
        """Draft-vocabulary ids int64 [...] -> target ids."""
        return draft + self.d2t[draft] if self.config.reduced else draft

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [..., H]."""
        if self.embed_tokens is None:
            raise ValueError("embed_tokens is missing: call share_tables with the target's table first")
        embedded = self.embed_tokens(tokens)
        return embedded * self.embed_scale.to(embedded.dtype) if self.config.backbone == "gemma4" else embedded

    def context_features(self, taps: Tensor) -> Tensor:
        """Tapped hidden states [..., T, N*H] of target tokens -> context features [..., T, H]."""
        return self.hidden_norm(self.fc(taps))

    def keys_values(self, features: Tensor, positions: Tensor) -> list[LayerKV]:
        """Context features [G, C, H] at positions int64 [G, C] -> each layer's keys and values, [G, nkv, C, D]."""
        cosine, sine = self.rotary(positions, features.dtype)
        layers = []
        for layer in self.layers:
            key, value = cast(Layer, layer).self_attn.keys_values(features, cosine, sine)
            layers.append(LayerKV(key.transpose(1, 2), value.transpose(1, 2)))
        return layers

    def block_inputs(self, anchor_tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Anchor ids and positions, int64 [A] each -> a block's input tokens and positions, int64 [A, B] each."""
        slots = torch.arange(self.config.block_size, device=anchors.device)
        tokens = torch.where(slots == 0, anchor_tokens[:, None], self.config.mask_token_id)
        return tokens, anchors[:, None] + slots

    def block_hidden(
        self, tokens: Tensor, positions: Tensor, context: Context, outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Block tokens and positions, int64 [A, B], over a context -> hidden states [A, B, H] after the final norm.

        outputs: if given, receives every layer's output [A, B, H], for inspection.
        """
        x = self.embed(tokens)
        cosine, sine = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine, context)
            if outputs is not None:
                outputs.append(x)
        return self.norm(x)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> logits [..., Vd] before the Markov correction (after the soft cap, if there is one)."""
        if self.lm_head is None:
            raise ValueError("lm_head is missing: call share_tables with the target's table first")
        logits = self.lm_head(hidden)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def markov_bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced correction: prev int64 [A, B] target ids, hidden [A, B, H] -> [A, B, Vd] (rank 0: zeros)."""
        if self.markov_head is None:
            return hidden.new_zeros(*prev.shape, self.config.drafts)
        return self.markov_head.markov_w2(self.markov_head.latent(prev, hidden))

    def confidence(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """prev int64 [A, B] target ids, hidden [A, B, H] -> acceptance logits [A, B], float32."""
        if self.confidence_head is None:
            raise ValueError("this drafter has no confidence head")
        inputs = hidden
        if self.config.confidence_with_markov and self.markov_head is not None:
            inputs = torch.cat((hidden, self.markov_head.markov_w1(prev)), dim=-1)
        return self.confidence_head.proj(inputs).squeeze(-1).float()
