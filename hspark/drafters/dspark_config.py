"""The settings of a DSpark drafter, independent of the layout of the checkpoint that they came from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from hspark.drafters.rope import RopeConfig
from hspark.policy.curves import as_float

BACKBONES = ("qwen3", "gemma4")
MARKOV_HEADS = ("none", "vanilla", "gated", "rnn")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Everything that determines a DSpark drafter's computation. Checked when the object is made.

    hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: of the draft layers.
    vocab_size: V, the target's vocabulary as the drafter knows it. draft_vocab_size: Vd <= V, the ids it can draft.
    taps: target layers that it reads: i is the output of decoder layer i, -1 the embedding output.
    num_target_layers: depth of the target it was trained for, if known.
    block_size: B input tokens of a block, the anchor included.
    anchor_first: slot k predicts the token k + 1 after the anchor, so a block yields B drafts. Otherwise (bonus-anchor)
        slot 0 is input only, slot k predicts the token k after the anchor, and a block yields B - 1.
    markov_rank, markov_head: rank r of the correction by the previous token; 0 and "none" for a drafter without.
    confidence_head, confidence_with_markov: a head that estimates acceptance; whether it sees the previous token.
    windows: per layer, the number of context positions before the anchor that it sees, or None for all of them.
    windowed_blocks_causal: in layers with a window a slot sees only itself and earlier slots of its block.
    key_is_value: values are the unrotated, unnormalised key projection (Gemma 4, `attention_k_eq_v`).
    logit_softcap: s in s * tanh(logits / s), before the Markov bias; None for none.
    max_positions: positions that the drafter was configured for; beyond them it abstains. None: no limit.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab_size: int | None = None
    num_target_layers: int | None = None
    backbone: str = "qwen3"
    anchor_first: bool = True
    markov_rank: int = 0
    markov_head: str = "none"
    confidence_head: bool = False
    confidence_with_markov: bool = False
    windows: tuple[int | None, ...] = ()
    windowed_blocks_causal: bool = True
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    activation: str = "silu"
    attention_bias: bool = False
    key_is_value: bool = False
    logit_softcap: float | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("draft_vocab_size", self.vocab_size), ("windows", (None,) * self.num_layers)):
            if getattr(self, name) in (None, ()):
                object.__setattr__(self, name, value)
        self._check_sizes()
        self._check_choices()
        self._check_taps()

    def _check_sizes(self) -> None:
        names = "hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim vocab_size draft_vocab_size"
        for name in (*names.split(), "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not a size; use an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even width")
        if self.drafts > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is larger than vocab_size={self.vocab_size}; "
                "a draft vocabulary is part of the target's"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id!r} is outside the vocabulary; use 0..{self.vocab_size - 1}"
            )
        if not self.anchor_first and self.block_size < 2:
            raise ValueError("block_size=1 drafts nothing in the bonus-anchor layout; use at least 2")
        if (as_float(self.rms_norm_eps) or 0) <= 0:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps!r} is not usable; use a finite number above 0")
        if self.logit_softcap is not None and (as_float(self.logit_softcap) or 0) <= 0:
            raise ValueError(f"logit_softcap={self.logit_softcap!r}; use a finite number above 0, or None for none")
        if self.max_positions is not None and self.max_positions < 1:
            raise ValueError(f"max_positions={self.max_positions!r}; use at least 1, or None for no limit")

    def _check_choices(self) -> None:
        for name, valid in (("backbone", BACKBONES), ("markov_head", MARKOV_HEADS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; use one of {', '.join(valid)}")
        if self.markov_rank < 0 or (self.markov_rank == 0) != (self.markov_head == "none"):
            raise ValueError(
                f"markov_rank={self.markov_rank!r} with markov_head={self.markov_head!r}; "
                'use rank 0 with "none", a rank of at least 1 with the other heads'
            )
        if self.confidence_with_markov and not (self.confidence_head and self.markov_rank):
            raise ValueError("confidence_with_markov=True needs confidence_head=True and markov_rank above 0")
        if len(self.windows) != self.num_layers or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows={self.windows!r}; use {self.num_layers} entries, None or at least 1 each")
        if len({w for w in self.windows if w is not None}) > 1:
            raise ValueError(f"windows={self.windows!r} mixes window sizes; use one size for all windowed layers")

    def _check_taps(self) -> None:
        depth = self.num_target_layers
        if not self.taps or any(a >= b for a, b in zip(self.taps, self.taps[1:], strict=False)) or self.taps[0] < -1:
            raise ValueError(f"taps={self.taps!r}; use a strictly increasing list of layers from -1 (the embeddings)")
        if depth is not None and self.taps[-1] >= depth:
            raise ValueError(f"taps={self.taps!r} names layer {self.taps[-1]}; the target has {depth} layers")

    @property
    def drafts(self) -> int:
        """Vd, the size of the draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def reduced(self) -> bool:
        """True when the drafter drafts only part of the target's vocabulary, by a map."""
        return self.drafts != self.vocab_size

    @property
    def width(self) -> int:
        """Draft tokens that one block yields."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def window(self) -> int | None:
        """The window of the layers that have one, or None."""
        return next((w for w in self.windows if w is not None), None)

    def replace(self, **changes: Any) -> DSparkConfig:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def to_dict(self, layout: str = "deepspec", dtype: str = "float32") -> dict[str, Any]:
        """The `config.json` of this drafter in the DeepSpec or the speculators layout.

        dtype: name of the stored weights' type. ValueError if the layout cannot express the drafter: DeepSpec has no
        windows, no bonus-anchor blocks and no reduced vocabulary; speculators has no Gemma 4 backbone.
        """
        from hspark.drafters.layouts_write import write_config

        return write_config(self, layout, dtype)

    def to_json(self, layout: str = "deepspec", dtype: str = "float32") -> str:
        return json.dumps(self.to_dict(layout, dtype), indent=2, sort_keys=True) + "\n"
