"""Slot-by-slot mechanics of the policies: bringing two chains to one width and putting one together out of both."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hspark.core import REASON_NO_MATCH, REASON_ONLY, SOURCE_FREE, SOURCE_MODEL, Chain


def pair(model: Chain, free: Chain) -> tuple[Chain, Chain]:
    """Both chains at the common width W = max(K, L), with their source filled."""
    if model.tokens.shape[0] != free.tokens.shape[0]:
        raise ValueError(
            f"model_chain has {model.tokens.shape[0]} rows, free_chain {free.tokens.shape[0]}; use chains of one batch"
        )
    width = max(model.width, free.width)
    return widen(model, width, SOURCE_MODEL), widen(free, width, SOURCE_FREE)


def widen(chain: Chain, width: int, source: int) -> Chain:
    """`chain` [B, w] padded to [B, width]: token 0, survival 0, point masses past its end."""
    origin = torch.full_like(chain.tokens, source) if chain.source is None else chain.source
    extra = width - chain.width
    if extra == 0:
        return chain.replace(source=origin)
    log_probs = chain.log_probs
    return chain.replace(
        tokens=pad(chain.tokens, (0, extra)),
        acceptance=pad(chain.acceptance, (0, extra)),
        survival=pad(chain.survival, (0, extra)),
        point_mass=pad(chain.point_mass, (0, extra), value=True),
        log_probs=None if log_probs is None else pad(log_probs, (0, 0, 0, extra)),
        source=pad(origin, (0, extra), value=source),
    )


def slots(chain: Chain) -> Tensor:
    """int64 [W]: 0, 1, ..., W - 1."""
    return torch.arange(chain.width, device=chain.tokens.device)


def only(chain: Chain) -> Tensor:
    """int64 [B]: the reason of a policy that left no choice."""
    return torch.full_like(chain.length, REASON_ONLY)


def reason_without_match(model: Chain) -> Tensor:
    """[B] the reason of rows where g is empty: as before, if an earlier choice gave one (see `choose_chain`)."""
    return torch.full_like(model.length, REASON_NO_MATCH) if model.reason is None else model.reason


def continued(head: Tensor, head_length: Tensor, tail: Chain) -> Tensor:
    """Survival [B, W] that follows `head` [B, W] up to head_length [B] and goes on from its last value with the
    acceptance of `tail`. 0 past the end of `tail`, which must reach at least as far as the head wherever it is used."""
    slot = slots(tail)
    in_head = slot < head_length[:, None]
    at_last = slot == head_length[:, None] - 1
    last = torch.where(head_length > 0, torch.where(at_last, head, 0.0).sum(dim=1), 1.0)
    survival = torch.where(in_head, head, last[:, None] * torch.where(in_head, 1.0, tail.acceptance).cumprod(dim=1))
    return torch.where(slot < tail.length[:, None], survival, 0.0)


def ratios(survival: Tensor) -> Tensor:
    """Acceptance [B, W] whose running product is `survival` [B, W]; 0 after a survival of 0."""
    before = pad(survival, (1, 0), value=1.0)[:, :-1]
    return survival / before.clamp(min=torch.finfo(survival.dtype).tiny)


def keep(take_free: Tensor, model: Chain, free: Chain, reason: Tensor) -> Chain:
    """g in the rows where take_free [B] is True, d in the others."""
    length = torch.where(take_free, free.length, model.length)
    return assemble(take_free[:, None].expand_as(free.tokens), length, model, free, reason)


def assemble(take_free: Tensor, length: Tensor, model: Chain, free: Chain, reason: Tensor) -> Chain:
    """One chain out of two, slot by slot: g's slots where take_free [B, W] is True; `length` [B] is the result's."""
    return Chain(
        tokens=torch.where(take_free, free.tokens, model.tokens),
        length=length,
        acceptance=torch.where(take_free, free.acceptance, model.acceptance),
        survival=torch.where(take_free, free.survival, model.survival),
        point_mass=torch.where(take_free, free.point_mass, model.point_mass),
        log_probs=laws(take_free, model.log_probs, free.log_probs),
        source=torch.where(take_free, cast(Tensor, free.source), cast(Tensor, model.source)),
        reason=reason,
    )


def laws(take_free: Tensor, model: Tensor | None, free: Tensor | None) -> Tensor | None:
    """Draft laws [B, W, V] of the chosen slots. A law standing in a point-mass slot is never read, so with one sampled
    chain its laws pass through as they are, which spares a copy over the vocabulary."""
    if model is None or free is None:
        return free if model is None else model
    return torch.where(take_free[..., None], free, model)
