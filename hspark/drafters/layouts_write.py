"""Writing the `config.json` of a DSpark drafter, in DeepSpec's or speculators' layout (`layouts` reads them)."""

from __future__ import annotations

from typing import Any

from hspark.drafters.dspark_config import DSparkConfig

LAYOUTS = ("deepspec", "speculators")


def write_config(config: DSparkConfig, layout: str, dtype: str) -> dict[str, Any]:
    """The `config.json` of a drafter (see `DSparkConfig.to_dict`)."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; use one of {', '.join(LAYOUTS)}")
    return (_write_deepspec if layout == "deepspec" else _write_speculators)(config, dtype)


def _backbone(config: DSparkConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
        "sliding_window": config.window,
    } | ({} if config.max_positions is None else {"max_position_embeddings": config.max_positions})


def _write_heads(config: DSparkConfig) -> dict[str, Any]:
    heads: dict[str, Any] = {"markov_rank": config.markov_rank, "enable_confidence_head": config.confidence_head}
    if config.markov_rank:
        heads["markov_head_type"] = config.markov_head
    if config.confidence_head:
        heads["confidence_head_with_markov"] = config.confidence_with_markov
    return heads


def _write_deepspec(config: DSparkConfig, dtype: str) -> dict[str, Any]:
    if config.window is not None or not config.anchor_first or config.reduced:
        raise ValueError(
            'layout="deepspec" has no windows, no bonus-anchor blocks and no reduced draft vocabulary; '
            'use layout="speculators" for this drafter'
        )
    gemma = config.backbone == "gemma4"
    values = _backbone(config) | _write_heads(config)
    values |= {
        "architectures": ["Gemma4DSparkModel" if gemma else "Qwen3DSparkModel"],
        "model_type": "gemma4_text" if gemma else "qwen3",
        "dtype": dtype,
        "target_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": 512,  # of training; the reference's constructor insists on it
        "rope_parameters": {"full_attention": config.rope.to_dict()} if gemma else config.rope.to_dict(),
        "hidden_activation" if gemma else "hidden_act": config.activation,
    }
    if config.num_target_layers is not None:
        values["num_target_layers"] = config.num_target_layers
    if gemma:
        values |= {
            "global_head_dim": config.head_dim,
            "num_global_key_value_heads": config.num_kv_heads,
            "attention_k_eq_v": config.key_is_value,
            "final_logit_softcapping": config.logit_softcap,
        }
    return values


def _write_speculators(config: DSparkConfig, dtype: str) -> dict[str, Any]:
    if config.backbone != "qwen3":
        raise ValueError(f'layout="speculators" has no {config.backbone} backbone; use layout="deepspec"')
    inner = _backbone(config)
    inner |= {"model_type": "qwen3", "hidden_act": config.activation, "rope_parameters": config.rope.to_dict()}
    method = {"proposal_type": "greedy", "speculative_tokens": config.width}
    return _write_heads(config) | {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "dtype": dtype,
        "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block_size,
        "draft_vocab_size": config.drafts,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_first,
        "sliding_window_non_causal": not config.windowed_blocks_causal,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
