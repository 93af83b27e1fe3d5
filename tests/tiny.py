"""Tiny random targets of each supported family, and plain decoding without a cache to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cohere2MoeConfig,
    Cohere2MoeForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 48
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


def _build(config_class: Any, model_class: Any, seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return model_class(config_class(**{**_COMMON, **changes})).eval()


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    return _build(LlamaConfig, LlamaForCausalLM, seed, **changes)


def tiny_mistral(seed: int = 0, **changes: Any) -> Any:
    """A decoder whose every layer has a sliding window of 8."""
    return _build(MistralConfig, MistralForCausalLM, seed, **{"sliding_window": 8, **changes})


def tiny_qwen3(seed: int = 0, **changes: Any) -> Any:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    defaults = {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    return _build(Qwen3Config, Qwen3ForCausalLM, seed, **{**defaults, **changes})


def tiny_gemma4(seed: int = 0, **changes: Any) -> Any:
    """Sliding and full layers with different head sizes, shared keys and values, per-layer inputs, soft cap."""
    defaults: dict[str, Any] = {
        "num_hidden_layers": 5,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 30.0,
        "attention_k_eq_v": True,
    }
    return _build(Gemma4TextConfig, Gemma4ForCausalLM, seed, **{**defaults, **changes})


def tiny_cohere2_moe(seed: int = 0, **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    return _build(Cohere2MoeConfig, Cohere2MoeForCausalLM, seed, **{**defaults, **changes})


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "qwen3": tiny_qwen3,
    "gemma4": tiny_gemma4,
    "cohere2_moe": tiny_cohere2_moe,
}


@torch.inference_mode()
def plain_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits [T, V] of the untouched model on one sequence [T], without any cache."""
    return model(input_ids=tokens[None], use_cache=False).logits[0]
