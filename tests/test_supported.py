"""A model is served token for token as it decodes by itself, or refused by name and left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tr

from hspark import HybridSpeculator, SamplingParams
from hspark.policy import LinearCost
from hspark.target import CausalTarget, UnsupportedModelError
from tests.plain import model_law, plain_decode
from tests.tiny import VOCAB, plain_logits, tiny_gemma4, tiny_llama

LENGTH = 64
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 11, 30)]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
OLD_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PER_LAYER = {"layer_types": ["sliding_attention", "full_attention"]}


def build(family: str, **sizes: Any) -> Any:
    """A tiny random model of transformers' `family`, with weights large enough that its outputs vary."""
    head = next(getattr(tr, family + kind) for kind in ("ForCausalLM", "LMHeadModel") if hasattr(tr, family + kind))
    torch.manual_seed(0)
    model = head(head.config_class(eos_token_id=None, bos_token_id=None, pad_token_id=None, **sizes)).eval()
    model.set_attn_implementation("eager")
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    return model


def outputs(model: Any, count: int = 20) -> list[list[int]]:
    """What the engine makes of all prompts together."""
    speculator = HybridSpeculator(
        model, None, max_length=LENGTH, cost=LinearCost(1.0, 0.0), budget="all", eos_token_ids=()
    )
    return [output.token_ids for output in speculator.generate(PROMPTS, SamplingParams(max_new_tokens=count))]


def plain_outputs(model: Any, count: int = 20) -> list[list[int]]:
    """The same, one by one and token by token, by the model itself."""
    law = model_law(model)
    return [plain_decode(law, prompt, SamplingParams(max_new_tokens=count)).ids for prompt in PROMPTS]


SERVED: dict[str, Any] = {
    # Layers that hand no keyword arguments on to their attention.
    "Nemotron": SIZES,
    "StableLm": SIZES,
    # Layers under another name, absolute positions, one joint projection.
    "GPT2": OLD_SIZES,
    "GPTJ": {**OLD_SIZES, "rotary_dim": 4},
    "GPTBigCode": OLD_SIZES,
    "CodeGen": {**OLD_SIZES, "rotary_dim": 4},
    "CTRL": {**OLD_SIZES, "dff": 48},
    # Parts named as in a Llama layer, whose rotary embedding takes other arguments or turns a part of each head.
    "Laguna": {**SIZES, **WINDOW, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Glm4Moe": {**SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "head_dim": 8},
    # Windows that the layers ask attention for, on all layers or on some.
    "Gemma3": {**SIZES, **WINDOW, **PER_LAYER, "head_dim": 8},
    "Olmo3": {**SIZES, **WINDOW, **PER_LAYER},
    "Cohere2": {**SIZES, **WINDOW, **PER_LAYER},
    "Phi3": {**SIZES, **WINDOW},
    "Mixtral": {**SIZES, **WINDOW, **EXPERTS},
    # A window in the config that is switched off, absent, or longer than any text.
    "Qwen2": {**SIZES, **WINDOW, "use_sliding_window": False},
    "Qwen3": {**SIZES, **WINDOW, "use_sliding_window": False},
    "Phimoe": {**SIZES, **EXPERTS, "sliding_window": LENGTH},
}


@pytest.mark.parametrize("family", SERVED)
def test_served_as_it_decodes_by_itself(family: str) -> None:
    model = build(family, **SERVED[family])
    if not model._can_set_attn_implementation():
        pytest.skip(f"this version of transformers has no attention interface for {family}")
    expected = plain_outputs(copy.deepcopy(model))
    assert outputs(model) == expected


def test_hooks_that_pass_the_state_on_are_made_once() -> None:
    model = build("Nemotron", **SIZES)
    for _ in range(2):
        CausalTarget(model, 1, LENGTH)
    assert all(len(layer._forward_pre_hooks) == 1 for layer in model.model.layers)


def test_a_window_that_no_field_of_the_config_declares_is_a_leftover() -> None:
    CausalTarget(tiny_llama(sliding_window=8), 1, LENGTH)


INTERFACE = r"use a decoder-only model whose every layer calls transformers' attention interface"
REFUSED: dict[str, tuple[Any, str]] = {
    "Bloom": ({"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, INTERFACE),
    "Falcon": ({**SIZES, "alibi": False}, INTERFACE),
    "Mpt": ({"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4}, INTERFACE),
    "Doge": ({**SIZES}, r"DogeAttention asks attention for an attention mask of its own"),
    "Phimoe": ({**SIZES, **EXPERTS, **WINDOW}, r"max_length=64: .*sliding_window=8, but .* use max_length=8 or less"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_and_left_as_it_was(family: str) -> None:
    sizes, message = REFUSED[family]
    model = build(family, **sizes)
    text = torch.tensor(PROMPTS[1])
    before = plain_logits(model, text)
    with pytest.raises(UnsupportedModelError, match=rf"{family}.*{message}|{message}"):
        CausalTarget(model, 1, LENGTH)
    assert torch.equal(plain_logits(model, text), before)


def test_any_failure_of_the_probe_is_a_refusal() -> None:
    model = tiny_llama()

    def fails(*_arguments: Any, **_options: Any) -> None:
        raise TypeError("missing argument")

    model.model.layers[1].self_attn.forward = fails
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM does not run .*TypeError: missing argument"):
        CausalTarget(model, 1, LENGTH)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel has no language-model head.*AutoModelForCausalLM"):
        CausalTarget(tiny_llama().model, 1, LENGTH)


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        CausalTarget(torch.nn.Linear(2, 2), 1, LENGTH)


# -- rotary frequencies ----------------------------------------------------------------------------------------------

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(("rope", "positions"), [(LONGROPE, 128), (DYNAMIC, 32)])
def test_frequencies_that_change_with_the_longest_text_are_refused(rope: Any, positions: int) -> None:
    model = tiny_llama(rope_parameters=rope, max_position_embeddings=positions)
    message = rf"max_length=33: .*LlamaForCausalLM \(rope_type='{rope['rope_type']}'\).*; use max_length=32 or less"
    with pytest.raises(UnsupportedModelError, match=message):
        CausalTarget(model, 1, 33)
    plain = copy.deepcopy(model)
    speculator = HybridSpeculator(model, None, max_length=32, cost=LinearCost(1.0, 0.0), eos_token_ids=())
    params = SamplingParams(max_new_tokens=40)
    results = speculator.generate(PROMPTS, params)
    expected = [plain_decode(model_law(plain), prompt, params, max_length=32).ids for prompt in PROMPTS]
    assert [output.token_ids for output in results] == expected


def test_frequencies_of_one_type_of_layer_count_too() -> None:
    model = tiny_gemma4()
    kinds = model.config.rope_parameters
    model.config.rope_parameters = {**kinds, "full_attention": {**kinds["full_attention"], "rope_type": "dynamic"}}
    model.config.max_position_embeddings = 32
    with pytest.raises(UnsupportedModelError, match=r"Gemma4ForCausalLM \(rope_type='dynamic'\)"):
        CausalTarget(model, 1, LENGTH)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ],
)
def test_frequencies_that_are_constant_are_served(rope: Any) -> None:
    model = tiny_llama(rope_parameters={"rope_theta": 10000.0, **rope})
    expected = plain_outputs(copy.deepcopy(model), 30)
    assert outputs(model, 30) == expected
