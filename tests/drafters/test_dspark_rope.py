"""Rotary frequencies against the transformers library, for every type that a checkpoint may name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hspark.drafters.rope import RopeConfig, Rotary, rotate

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.1},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
]


@pytest.mark.parametrize("parameters", CASES, ids=lambda case: f"{case['rope_type']}-{len(case)}")
@pytest.mark.parametrize("dim", [16, 128])
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any], dim: int) -> None:
    parameters = {"rope_theta": 5e5, **parameters}
    config = Qwen3Config(
        hidden_size=256, num_attention_heads=2, head_dim=dim, max_position_embeddings=256, rope_parameters=parameters
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    ours = RopeConfig.from_dict(parameters)
    torch.testing.assert_close(ours.frequencies(dim), expected, rtol=1e-6, atol=0)
    assert ours.attention_scaling == pytest.approx(scaling)


def test_default_and_proportional_frequencies() -> None:
    plain = 1e6 ** -(torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(RopeConfig(rope_theta=1e6).frequencies(32), plain)
    partial = RopeConfig(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25).frequencies(32)
    torch.testing.assert_close(partial, torch.where(torch.arange(16) < 4, plain, 0.0))


def test_rotation_depends_on_distance_alone_and_pairs_the_two_halves() -> None:
    rotary = Rotary(RopeConfig(rope_theta=100.0), 8)
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at: int, to: int) -> float:
        turned = [rotate(x, *rotary(torch.tensor([p]), torch.float32)) for x, p in ((query, at), (key, to))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)
    unit = torch.zeros(1, 1, 8)
    unit[..., 1] = 1.0
    turned = rotate(unit, *rotary(torch.tensor([3]), torch.float32))[0, 0]
    assert turned.nonzero()[:, 0].tolist() == [1, 5]  # dimension i turns into i + 4, not into its neighbour


def test_the_old_key_type_is_understood() -> None:
    assert RopeConfig.from_dict({"type": "linear", "factor": 2.0}).rope_type == "linear"
    with pytest.raises(ValueError, match="rope_theta=-1"):
        RopeConfig(rope_theta=-1)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_theta": 1.0}, "rope_theta=1.0 is not a base; use a finite number above 1"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_theta": True}, "rope_theta=True"),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\] is not supported; use one of"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan with rope_type='linear'; use a finite number"),
        ({"rope_type": "proportional", "partial_rotary_factor": 3.0}, "partial_rotary_factor=3.0 is no share"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor=4.0; use a number above"),
        (YARN | {"beta_fast": "x"}, "beta_fast='x' with rope_type='yarn'"),
        (YARN | {"beta_slow": 0}, "beta_slow=0"),
        (YARN | {"attention_factor": "x"}, "attention_factor='x'"),
        (YARN | {"mscale": -1.0}, "mscale=-1.0"),
        (YARN | {"truncate": "no"}, "truncate='no'; use True, False or None"),
    ],
)
def test_parameters_are_checked_when_made(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_dict(parameters)
