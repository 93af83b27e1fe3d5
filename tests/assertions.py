"""Checks that several tests share. Each raises AssertionError with what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hspark.core import Chain


def assert_valid_chain(chain: Chain, vocab: int | None = None) -> None:
    """Everything that `Chain` promises: shapes, types, lengths, token ids below `vocab`, and consistent survivals."""
    batch, width = chain.tokens.shape
    for name, dtype in (("tokens", torch.int64), ("point_mass", torch.bool), ("source", torch.int64)):
        field = getattr(chain, name)
        assert field is not None, f"{name} is None"
        assert field.shape == (batch, width), f"{name} has shape {tuple(field.shape)}, not {(batch, width)}"
        assert field.dtype == dtype, f"{name} is {field.dtype}, not {dtype}"
    for name in ("acceptance", "survival"):
        field = getattr(chain, name)
        assert field.shape == (batch, width), f"{name} has shape {tuple(field.shape)}, not {(batch, width)}"
        assert field.dtype == torch.float32, f"{name} is {field.dtype}, not float32"
    assert chain.length.shape == (batch,), f"length has shape {tuple(chain.length.shape)}"
    assert chain.length.dtype == torch.int64, f"length is {chain.length.dtype}"
    assert bool(((chain.length >= 0) & (chain.length <= width)).all()), (
        f"length {chain.length.tolist()} leaves 0..{width}"
    )
    assert bool((chain.tokens >= 0).all()), "a token id is negative"
    if vocab is not None:
        assert bool((chain.tokens < vocab).all()), f"a token id is not below {vocab}"
    inside = torch.arange(width) < chain.length[:, None]
    assert bool((chain.survival[~inside] == 0).all()), "survival is not 0 past the end of a chain"
    assert bool(((chain.survival >= 0) & (chain.survival <= 1)).all()), "a survival lies outside [0, 1]"
    assert bool((chain.survival.diff(dim=1) <= 0).all()), f"survival increases along a chain: {chain.survival.tolist()}"
    product = torch.where(inside, chain.acceptance.cumprod(dim=1), 0.0)
    torch.testing.assert_close(chain.survival, product, rtol=1e-5, atol=1e-6)
    sampled = inside & ~chain.point_mass
    if chain.log_probs is None:
        assert not bool(sampled.any()), "a slot is sampled but log_probs is None"
    else:
        assert chain.log_probs.shape[:2] == (batch, width), f"log_probs has shape {tuple(chain.log_probs.shape)}"
        mass = chain.log_probs.exp().sum(dim=-1)[sampled]
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-4, atol=1e-4)


def assert_one_graph(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles to exactly one graph without a break, and the compiled result equals the eager one. Returns the result.

    The backend runs the traced graph as it is: what is under test is that nothing reads a tensor back to the host.
    """
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)(*arguments)
    eager = function(*arguments)
    assert counter.frame_count == 1, f"{counter.frame_count} graphs instead of 1"
    assert_equal_trees(compiled, eager)
    return eager


def assert_equal_trees(left: Any, right: Any) -> None:
    """Equal structures of tensors and plain values, bit for bit."""
    from torch.utils._pytree import tree_flatten

    left_leaves, left_spec = tree_flatten(left)
    right_leaves, right_spec = tree_flatten(right)
    assert left_spec == right_spec, f"structures differ: {left_spec} and {right_spec}"
    for a, b in zip(left_leaves, right_leaves, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b, f"{a!r} differs from {b!r}"
