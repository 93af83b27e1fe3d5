"""Linear layers laid out for the CPU's kernels: siblings fused, bfloat16 weights packed once.

A decode step reads every weight for a handful of tokens, so the time of its linear layers is the time of reading them
and of starting the kernels. Two things cost more than they should in plain modules: projections of the same input
(query, key and value; gate and up) start a kernel each, and oneDNN reorders a bfloat16 weight into its own blocked
layout at every call. Both are done once here, when the target is loaded. The layout is one in which a row's result does
not depend, to the last bit, on how many rows a step packs, as far as kernels allow: near-ties do not flip.
Norms, whose many small operators cost more than their arithmetic, are replaced by the fused operator where it gives
the same bits.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Names of projections that are called one after the other on the same input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch build has oneDNN's packed bfloat16 linear (the operator that its own compiler uses)."""
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


# Compiled graphs cannot hold weights in oneDNN's layout, so they name them by number and call this operator. It says of
# itself only what a compiler needs: the shape of its result.
_library = torch.library.Library("hspark", "DEF")
_library.define("packed_linear(Tensor x, Tensor number, Tensor? bias, int width) -> Tensor")
_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, PackedLinear] = weakref.WeakValueDictionary()


def _packed_linear(x: Tensor, number: Tensor, bias: Tensor | None, width: int) -> Tensor:
    matrix = _numbered[int(number)]._matrix
    return torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")


_library.impl("packed_linear", _packed_linear, "CPU")
_library.impl("packed_linear", lambda x, number, bias, width: x.new_empty(*x.shape[:-1], width), "Meta")


class PackedLinear(nn.Module):
    """A linear layer for inference on the CPU. `weight` stays available where `keep_weight` asks for it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, keep_weight: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = _can_pack(weight.dtype)
        self.bias = bias
        # The layout for one row. With AMX its kernels sum in one order for up to 128 rows of the default model's layers
        # (64 and more below 8,192 inputs, 9 and more beyond), so that what is verified with drafts is what plain
        # decoding computes, to the last bit. The usual layout changes order above 32 rows, where it is 10 % faster.
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self.packed else weight
        self.weight = weight if keep_weight else None
        number = next(_numbers)
        _numbered[number] = self
        self.number = torch.tensor(number)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed and torch.compiler.is_compiling():
            return torch.ops.hspark.packed_linear(x, self.number, self.bias, self.out_features)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._matrix, self.bias, "none", [], "")
        return F.linear(x, self._matrix, self.bias)


class _Fused:
    """The joint projection behind several siblings; holds the last output until each sibling has taken its part."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat([b.data for b in biases])
        self.joint = PackedLinear(torch.cat([linear.weight.data for linear in linears]), bias)
        self.input: Tensor | None = None
        self.parts: list[Tensor] = []

    def part(self, index: int, x: Tensor, sizes: list[int]) -> Tensor:
        if x is not self.input:
            self.input, self.parts = x, list(self.joint(x).split(sizes, dim=-1))
        out = self.parts[index]
        if index == len(sizes) - 1:
            self.input, self.parts = None, []
        return out


class FusedPart(nn.Module):
    """One of several sibling projections that are computed together; called on the same tensor as its siblings."""

    def __init__(self, fused: _Fused, index: int, sizes: list[int]) -> None:
        super().__init__()
        self.fused, self.index, self.sizes = fused, index, sizes
        self.out_features = sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.part(self.index, x, self.sizes)


def pack_linears(model: Any) -> int:
    """Replaces the plain float linear layers of a model on the CPU, in place; returns how many kernels remain.

    Layers of another type (quantised, adapted, sharded) and layers with hooks are left alone. The output embedding
    keeps its weight, which it may share with the input embedding and with drafters.
    """
    head = model.get_output_embeddings()
    done = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            linears = [getattr(parent, name, None) for name in names]
            if all(_is_plain(linear) for linear in linears) and _alike(linears):
                fused, sizes = _Fused(linears), [linear.out_features for linear in linears]  # type: ignore[arg-type, union-attr]
                for index, name in enumerate(names):
                    setattr(parent, name, FusedPart(fused, index, sizes))
                done += 1
        for name, child in list(parent.named_children()):
            if _is_plain(child):
                bias = None if child.bias is None else child.bias.data
                setattr(parent, name, PackedLinear(child.weight.data, bias, keep_weight=child is head))
                done += 1
    return done


def pack_each(module: Any, keep_weight: tuple[str, ...] = ()) -> int:
    """Packs every plain linear layer of a small network by itself, in place; returns how many.

    keep_weight: names of layers whose `weight` stays readable.
    """
    done = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _is_plain(child) and _can_pack(child.weight.dtype):
                bias = None if child.bias is None else child.bias.data
                setattr(parent, name, PackedLinear(child.weight.data, bias, keep_weight=name in keep_weight))
                done += 1
    return done


class FusedRMSNorm(nn.Module):
    """Root-mean-square norm in one or two operators instead of eight.

    weight_last: the weight multiplies the rounded result, as in the Llama family, instead of before the rounding.
    """

    def __init__(self, weight: Tensor, eps: float, weight_last: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.weight_last = weight, eps, weight_last
        self.shape = tuple(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight_last:
            return F.rms_norm(x, self.shape, None, self.eps) * self.weight
        return F.rms_norm(x, self.shape, self.weight, self.eps)


@torch.inference_mode()
def fuse_norms(model: Any) -> int:
    """Replaces the RMSNorm modules of a model whose results the fused operator reproduces; returns how many.

    Families differ in where they round and whether they add one to the weight, so each module is tried on a sample and
    left alone unless the results are equal to the last bit.
    """
    done = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight, eps = getattr(child, "weight", None), getattr(child, "variance_epsilon", None)
            if not type(child).__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None:
                continue
            sample = torch.randn(8, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.dtype) * 3
            try:
                expected = child(sample)
            except Exception:  # a norm with further arguments, as with a gate
                continue
            for weight_last in (False, True):
                fused = FusedRMSNorm(weight.data, eps, weight_last)
                if torch.equal(fused(sample), expected):
                    setattr(parent, name, fused)
                    done += 1
                    break
    return done


def _is_plain(module: Any) -> bool:
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype.is_floating_point
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def _alike(linears: list[Any]) -> bool:
    first = linears[0]
    return all(
        linear.in_features == first.in_features
        and linear.weight.dtype == first.weight.dtype
        and (linear.bias is None) == (first.bias is None)
        for linear in linears
    )
