"""The dialects of `config.json`: both layouts, their defaults and variations, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.layouts import ConfigError, read_config
from hspark.drafters.rope import RopeConfig
from tests.drafters.checkpoint_files import drafts
from tests.drafters.dspark_cases import VECTORS, random_model, save_model, tiny_config

DEEPSPEC = tiny_config().to_dict("deepspec")
SPECULATORS = tiny_config(windows=(8, None), draft_vocab_size=25).to_dict("speculators")
SHAPES = {
    "markov_head.markov_w1.weight": [40, 4],
    "confidence_head.proj.weight": [1, 20],
    "lm_head.weight": [25, 16],
}


def vector_config(case: str) -> dict[str, Any]:
    return json.loads((VECTORS / case / "config.json").read_text())


def read(values: dict[str, Any], **options: Any) -> DSparkConfig:
    return read_config(values, "some/config.json", **options).config


@st.composite
def configs(draw: st.DrawFn, layout: str) -> DSparkConfig:
    """Any drafter that the layout can express."""
    kv, layers = draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    rank = draw(st.sampled_from([0, 4]))
    confident = draw(st.booleans())
    own: dict[str, Any] = {}
    if layout == "deepspec" and draw(st.booleans()):
        own = {
            "backbone": "gemma4",
            "key_is_value": draw(st.booleans()),
            "logit_softcap": draw(st.sampled_from([None, 30.0])),
            "activation": "gelu_pytorch_tanh",
            "rope": RopeConfig(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
        }
    elif layout == "speculators":
        own = {
            "anchor_first": draw(st.booleans()),
            "windows": tuple(draw(st.lists(st.sampled_from([None, 8]), min_size=layers, max_size=layers))),
            "windowed_blocks_causal": draw(st.booleans()),
            "draft_vocab_size": draw(st.sampled_from([25, 40])),
            "num_target_layers": None,
        }
    return tiny_config(
        num_layers=layers,
        num_kv_heads=kv,
        markov_rank=rank,
        markov_head=draw(st.sampled_from(["vanilla", "gated", "rnn"])) if rank else "none",
        confidence_head=confident,
        confidence_with_markov=confident and rank > 0 and draw(st.booleans()),
        max_positions=draw(st.sampled_from([None, 64])),
        taps=draw(st.sampled_from([(-1, 2), (0, 1, 2), (1,)])),
        **own,
    )


@given(configs("deepspec"))
def test_deepspec_configs_come_back(config: DSparkConfig) -> None:
    values = json.loads(config.to_json("deepspec"))
    assert read_config(values) == (config, "deepspec", None)


@given(configs("speculators"))
def test_speculators_configs_come_back(config: DSparkConfig) -> None:
    values = json.loads(config.to_json("speculators"))
    assert read_config(values) == (config, "speculators", None)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("deepspec", {"anchor_first": False}),
        ("deepspec", {"windows": (8, None)}),
        ("deepspec", {"draft_vocab_size": 25}),
        ("speculators", {"backbone": "gemma4"}),
        ("onnx", {}),
    ],
)
def test_a_layout_that_cannot_say_it_is_refused(layout: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"layout=.{layout}.*use"):
        tiny_config(**changes).to_dict(layout)


# ---- dialects --------------------------------------------------------------------------------------------------------


def test_tap_numbers_of_the_two_layouts_name_the_same_tensors() -> None:
    config = tiny_config()
    assert config.to_dict("deepspec")["target_layer_ids"] == [0, 2]
    assert config.to_dict("speculators")["aux_hidden_state_layer_ids"] == [1, 3]


def test_older_rope_keys_give_the_same_rotation() -> None:
    """`rope_parameters` (transformers 5) against top-level `rope_theta` and `rope_scaling` (before)."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, **scaling},
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
        ),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, **scaling},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        ),
    ]
    for new, old in pairs:
        for base in (DEEPSPEC, SPECULATORS):
            inner = base.get("transformer_layer_config", base)
            without = {key: value for key, value in inner.items() if key != "rope_parameters"}
            ropes = [
                read(base | {"transformer_layer_config": variant} if base is SPECULATORS else variant).rope
                for variant in (without | {"rope_parameters": new}, without | old)
            ]
            assert ropes[0] == ropes[1]
            assert ropes[0].rope_theta == 5e5


def test_partial_rotary_factor_is_ignored_outside_gemma() -> None:
    rope = read(
        DEEPSPEC | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ).rope
    assert rope.frequencies(8).tolist() == RopeConfig().frequencies(8).tolist()


def test_gemma_rope_with_and_without_the_two_stray_keys() -> None:
    values = vector_config("gemma4_k_eq_v")
    assert {"rope_type", "rope_theta"} <= set(values["rope_parameters"])
    clean = dict(values["rope_parameters"])
    del clean["rope_type"], clean["rope_theta"]
    expected = RopeConfig(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25)
    assert read(values).rope == read(values | {"rope_parameters": clean}).rope == expected


def test_nested_rope_of_speculators_takes_the_sliding_entry() -> None:
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    inner = SPECULATORS["transformer_layer_config"] | {"rope_parameters": nested}
    assert read(SPECULATORS | {"transformer_layer_config": inner}).rope.rope_theta == 2e4
    del nested["sliding_attention"]
    assert read(SPECULATORS | {"transformer_layer_config": inner}).rope.rope_theta == 1e6


def test_gemma_head_sizes_folded_away_are_read_off_the_tensors() -> None:
    values = vector_config("gemma4_k_eq_v")
    whole = read(values)
    del values["global_head_dim"], values["num_global_key_value_heads"]
    shapes = {"layers.0.self_attn.q_norm.weight": [32], "layers.0.self_attn.k_proj.weight": [32, 32]}
    heads = read(values, shapes=shapes | {"lm_head.weight": [97, 32]})
    assert (heads.head_dim, heads.num_kv_heads) == (whole.head_dim, whole.num_kv_heads) == (32, 1)
    with pytest.raises(ConfigError, match=r"some/config\.json: global_head_dim is missing; expected an integer"):
        read(values)


def test_absent_head_keys_follow_the_tensors_then_the_defaults() -> None:
    bare = {k: v for k, v in DEEPSPEC.items() if not k.startswith(("markov", "enable_confidence", "confidence"))}
    plain = read(bare)
    assert (plain.markov_rank, plain.markov_head, plain.confidence_head) == (0, "none", False)
    full = read(bare, shapes=SHAPES)
    assert (full.markov_rank, full.markov_head, full.confidence_head, full.confidence_with_markov) == (
        4,
        "vanilla",
        True,
        True,
    )
    narrow = read(bare, shapes=SHAPES | {"confidence_head.proj.weight": [1, 16]})
    assert not narrow.confidence_with_markov
    other = {k: v for k, v in SPECULATORS.items() if not k.startswith(("markov", "enable_confidence", "confidence"))}
    schema = read(other)
    assert (schema.markov_rank, schema.confidence_head, schema.confidence_with_markov) == (256, True, True)
    headless = read(other | {"speculators_model_type": "dflash"})
    assert (headless.markov_rank, headless.confidence_head) == (0, False)


def test_draft_vocabulary_is_taken_from_the_head_before_the_schema() -> None:
    values = {k: v for k, v in SPECULATORS.items() if k != "draft_vocab_size"}
    assert read(values, shapes=SHAPES).drafts == 25
    assert read(values | {"draft_vocab_size": 32}, shapes=SHAPES).drafts == 25


def test_keys_in_a_nested_section_or_with_a_prefix_are_found() -> None:
    moved = {k: v for k, v in DEEPSPEC.items() if k not in ("mask_token_id", "target_layer_ids", "block_size")}
    moved |= {
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 2], "causal": False},
        "dspark_block_size": 5,
    }
    assert read(moved) == read(DEEPSPEC)


@pytest.mark.parametrize(
    ("tokens", "expected", "warns"), [(5, True, False), (4, False, False), (3, False, True), (None, False, True)]
)
def test_a_missing_block_layout_is_inferred_or_assumed_aloud(
    tokens: int | None, expected: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    about = {"proposal_methods": [{"speculative_tokens": tokens}] if tokens else []}
    values = SPECULATORS | {"sample_from_anchor": None, "speculators_config": about}
    with caplog.at_level(logging.WARNING):
        assert read(values).anchor_first is expected
    assert ("sample_from_anchor is missing" in caplog.text) is warns


def test_windows_of_the_deepspec_layout_are_overruled_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read(DEEPSPEC | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8})
    assert config.windows == (None, None)
    assert "always attend to everything" in caplog.text


def test_missing_causality_of_windowed_layers_is_assumed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(SPECULATORS | {"sliding_window_non_causal": None}).windowed_blocks_causal
    assert "sliding_window_non_causal is missing" in caplog.text


def test_both_layouts_draft_the_same(tmp_path: Path) -> None:
    model = random_model(tiny_config())
    assert drafts(save_model(model, tmp_path / "a", "deepspec")) == drafts(
        save_model(model, tmp_path / "b", "speculators")
    )
