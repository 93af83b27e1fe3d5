"""What is refused in a `config.json`, and how: by file, key and value."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hspark.drafters.layouts import ConfigError
from tests.drafters.dspark_cases import tiny_config
from tests.drafters.test_checkpoint_config import DEEPSPEC, SPECULATORS, read, vector_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures is \['LlamaForCausalLM'\]; expected one of Qwen3DSpark",
        ),
        ({"architectures": None}, "architectures is missing"),
        ({"hidden_size": None}, "hidden_size is missing; expected an integer of at least 1"),
        ({"hidden_size": "16"}, "hidden_size is '16'; expected an integer"),
        ({"block_size": 0}, "block_size is 0; expected an integer of at least 1"),
        ({"block_size": None}, "block_size is missing"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"mask_token_id": 40}, r"mask_token_id=40 is outside the vocabulary; use 0\.\.39"),
        ({"target_layer_ids": None}, "target_layer_ids is missing; expected a list of integers"),
        ({"target_layer_ids": [2, 0]}, r"taps=\(2, 0\); use a strictly increasing list"),
        ({"target_layer_ids": [-2, 0]}, "strictly increasing list of layers from -1"),
        ({"target_layer_ids": [0, 4]}, "names layer 4; the target has 4 layers"),
        ({"target_layer_ids": []}, "strictly increasing"),
        ({"markov_head_type": "lstm"}, "markov_head='lstm' is not known; use one of none, vanilla, gated, rnn"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_rank": 0}, "confidence_with_markov=True needs"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head is 'yes'; expected true or false"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic' is not supported; use one of default"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None with rope_type='llama3'"),
        ({"rope_parameters": 5}, "rope_parameters is 5; expected an object"),
        ({"rope_parameters": None, "rope_scaling": 5}, "rope_scaling is 5; expected an object"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 10**400}}, "factor=1000"),
        ({"architectures": 3}, "architectures is 3; expected a list of names"),
        ({"architectures": [["Qwen3DSparkModel"]]}, r"architectures is \[\['Qwen3DSparkModel'\]\]; expected a list"),
        ({"layer_types": 3}, "layer_types is 3; expected a list of names"),
        ({"dflash_config": 3}, "dflash_config is 3; expected an object"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a finite number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0.0 is not usable; use a finite number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1.0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected an integer"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; expected an integer"),
        ({"hidden_act": "relu"}, "activation='relu' is not known"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"dflash_config": {"causal": True}}, r"dflash_config\.causal is True; expected false"),
    ],
)
def test_deepspec_refusals_name_file_key_and_expectation(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(DEEPSPEC | changes)
    assert str(error.value).startswith("some/config.json: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, 'speculators_model_type is \'eagle3\'; expected "dspark" or "dflash"'),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing; expected an object"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ({"aux_hidden_state_layer_ids": ["2"]}, "expected a list of integers"),
        ({"sample_from_anchor": "first"}, "sample_from_anchor is 'first'; expected true or false"),
        ({"sample_from_anchor": False, "block_size": 1}, "block_size=1 drafts nothing in the bonus-anchor layout"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64; expected null or 16"),
        ({"speculators_model_type": []}, r"speculators_model_type is \[\]; expected"),
        ({"speculators_config": 5}, "speculators_config is 5; expected an object"),
        ({"speculators_config": {"verifier": 5}}, r"speculators_config\.verifier is 5; expected an object"),
        (
            {"speculators_config": {"verifier": {"name_or_path": 5}}},
            r"verifier\.name_or_path is 5; expected a string",
        ),
        (
            {"sample_from_anchor": None, "speculators_config": {"proposal_methods": [5]}},
            r"proposal_methods is \[5\]; expected a list of objects",
        ),
        ({"draft_vocab_size": 41}, "draft_vocab_size=41 is larger than vocab_size=40"),
        (
            {"inner": {"layer_types": ["full_attention"]}},
            r"transformer_layer_config\.layer_types is .*a list of 2 entries",
        ),
        ({"inner": {"layer_types": ["chunked_attention", "full_attention"]}}, "each one of full_attention, sliding"),
        ({"inner": {"sliding_window": None}}, r"transformer_layer_config\.sliding_window is missing"),
        ({"inner": {"hidden_size": None}}, r"transformer_layer_config\.hidden_size is missing"),
    ],
)
def test_speculators_refusals_name_file_key_and_expectation(changes: dict[str, Any], message: str) -> None:
    changes = dict(changes)
    inner = SPECULATORS["transformer_layer_config"] | changes.pop("inner", {})
    with pytest.raises(ConfigError, match=message) as error:
        read(SPECULATORS | {"transformer_layer_config": inner} | changes)
    assert str(error.value).startswith("some/config.json: ")


def test_a_soft_cap_is_a_number_above_0() -> None:
    gemma = vector_config("gemma4_k_eq_v")
    assert read(gemma | {"final_logit_softcapping": 0.0}).logit_softcap is None
    with pytest.raises(ConfigError, match="final_logit_softcapping is nan; expected a finite number"):
        read(gemma | {"final_logit_softcapping": float("nan")})
    with pytest.raises(ConfigError, match=r"logit_softcap=-1\.0; use a finite number above 0, or None"):
        read(gemma | {"final_logit_softcapping": -1})


def nonsense() -> st.SearchStrategy[Any]:
    """Any value that JSON can hold, the words of rope parameters among its keys."""
    words = st.sampled_from(["full_attention", "rope_type", "yarn", "linear", "factor", "rope_theta", "x", ""])
    numbers = st.sampled_from([0, -1, 1, 3, 10**12, 10**400, 1.5, math.nan, math.inf])
    leaves = st.none() | st.booleans() | numbers | words
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=3))


@pytest.mark.parametrize("kind", ["deepspec", "gemma", "speculators", "inner"])
@given(data=st.data())
@settings(max_examples=60)
def test_any_value_is_read_or_refused_by_name(kind: str, data: st.DataObject) -> None:
    """A key of any value gives a usable drafter or a ConfigError that begins with the file, never another exception."""
    base = {"deepspec": DEEPSPEC, "gemma": vector_config("gemma4_k_eq_v")}.get(kind, SPECULATORS)
    inner = base["transformer_layer_config"] if kind == "inner" else base
    others = {"rope_scaling", "rope_parameters", "rope_theta", "layer_types", "dflash_config", "draft_vocab_size"}
    changes = {data.draw(st.sampled_from(sorted({*inner, *others}))): data.draw(nonsense())}
    values = base | ({"transformer_layer_config": inner | changes} if kind == "inner" else changes)
    try:
        config = read(values)
    except ConfigError as error:
        assert str(error).startswith("some/config.json: ")  # noqa: PT017 - either outcome is right
    else:
        assert bool(config.rope.frequencies(min(config.head_dim, 64)).isfinite().all())
        assert math.isfinite(config.rope.attention_scaling)
        assert 0 < config.rms_norm_eps < math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        ({"logit_softcap": float("nan")}, "logit_softcap=nan"),
        ({"num_layers": 0}, "num_layers=0 is not a size"),
        ({"windows": (4, 8)}, "mixes window sizes"),
        ({"windows": (4,)}, "use 2 entries"),
        ({"max_positions": 0}, "max_positions=0; use at least 1"),
        ({"backbone": "llama"}, "backbone='llama' is not known; use one of qwen3, gemma4"),
        ({"markov_rank": 4, "markov_head": "none"}, 'use rank 0 with "none"'),
    ],
)
def test_settings_are_checked_when_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)
