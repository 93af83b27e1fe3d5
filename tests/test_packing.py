"""Packed layers compute what the plain model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hspark.packing import FusedPart, FusedRMSNorm, PackedLinear, fuse_norms, pack_linears
from tests.processor import AMX
from tests.tiny import FAMILIES, VOCAB, plain_logits, tiny_llama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_model_equals_plain(family: str, dtype: torch.dtype) -> None:
    plain = FAMILIES[family]().to(dtype)
    packed = copy.deepcopy(plain)
    assert pack_linears(packed) > 0
    fuse_norms(packed)
    text = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(0))
    want, got = plain_logits(plain, text).float(), plain_logits(packed, text).float()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (want - got).abs().max() <= tolerance * want.abs().max()


@pytest.mark.skipif(not AMX, reason="kernels for this processor do not keep to one order")
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (576, 3072), (1536, 576), (576, 4096), (80, 48)])
def test_a_row_does_not_depend_on_how_many_there_are(inputs: int, outputs: int) -> None:
    """Packs of up to 128 rows give the bits of a single one: what is verified is what plain decoding computes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    layer = PackedLinear(weight, torch.randn(outputs, generator=generator).bfloat16())
    x = torch.randn(1, 128, inputs, generator=generator).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1, dim=1)], dim=1)
    sizes = [size for size in range(2, 129) if not torch.equal(layer(x[:, :size]), alone[:, :size])]
    assert not sizes, "these packs have other bits than single rows"


def test_llama_becomes_four_kernels_a_layer() -> None:
    model = tiny_llama(attention_bias=True)
    assert pack_linears(model) == 3 * 4 + 1
    assert fuse_norms(model) == 3 * 2 + 1
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.k_proj, FusedPart)
    assert isinstance(layer.mlp.down_proj, PackedLinear)
    assert isinstance(layer.input_layernorm, FusedRMSNorm)
    # Drafters share the tables of the target, so these must stay readable.
    assert model.get_output_embeddings().weight.shape == (VOCAB, 32)


def test_layers_that_are_not_plain_are_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    adapted = Adapted(32, 32, bias=False)
    attention.q_proj = adapted
    hooked = model.model.layers[1].mlp.down_proj
    hooked.register_forward_hook(lambda *_: None)
    pack_linears(model)
    assert attention.q_proj is adapted
    assert isinstance(attention.k_proj, PackedLinear)
    assert model.model.layers[1].mlp.down_proj is hooked


def test_fused_parts_follow_their_input() -> None:
    """The joint output of one input is never handed out for another."""
    model = tiny_llama()
    attention, plain = model.model.layers[0].self_attn, copy.deepcopy(model.model.layers[0].self_attn)
    pack_linears(model)
    first, second = torch.randn(2, 3, 32)
    attention.q_proj(first)
    torch.testing.assert_close(attention.q_proj(second), plain.q_proj(second))
    torch.testing.assert_close(attention.v_proj(second), plain.v_proj(second))


def test_norm_with_other_rounding_is_left_alone() -> None:
    class OffsetRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.rand(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (8,), None, self.variance_epsilon) * (1 + self.weight)

    holder = nn.Sequential(OffsetRMSNorm())
    assert fuse_norms(holder) == 0
    assert isinstance(holder[0], OffsetRMSNorm)


def test_norm_with_another_argument_is_left_alone() -> None:
    class GatedRMSNorm(nn.RMSNorm):
        variance_epsilon = 1e-6

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * gate

    assert fuse_norms(nn.Sequential(GatedRMSNorm(8))) == 0
