"""Which blocks a drafter is trained on: anchors, the labels of their slots, and the weights of those.

Symbols: G sequences of S tokens (padded), M anchors of each, B slots of a block, V target vocabulary. An anchor at
position i makes the block [token i, mask, mask, ...]; slot k of it predicts the token at i + k + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Sequences with what the target computed over them, padded on the right with zeros.

    tokens:    int64 [G, S] prompt and output. loss_mask: bool [G, S], True on supervised tokens (the output's).
    taps:      [G, S, N*H] hidden states after the tapped layers, concatenated in the taps' order.
    final:     [G, S, H] hidden state after the target's final norm, from which its logits are computed.
    anchors:   int64 [G, M] positions. keep: bool [G, M], False for dummies (anchor 0), which are never supervised.
    """

    tokens: Tensor
    loss_mask: Tensor
    taps: Tensor
    final: Tensor
    anchors: Tensor
    keep: Tensor


class Slots(NamedTuple):
    """What the B slots of every block are trained towards; all are [G, M, B].

    labels:   int64, the token at i + k + 1. previous: int64, the token before it, which conditions the Markov head.
    position: int64, i + k, the position whose target distribution predicts the label.
    mask:     bool, supervised slots: kept anchors, from the first slot up to the first unsupervised label.
    weights:  float32, mask * exp(-k / gamma).
    """

    labels: Tensor
    previous: Tensor
    position: Tensor
    mask: Tensor
    weights: Tensor


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """bool [G, S] -> bool [G, S - 1]: positions that may be anchors, both they and their successors supervised."""
    return loss_mask[:, :-1] & loss_mask[:, 1:]


def sample_anchors(loss_mask: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Up to `count` anchors of each sequence, uniformly without replacement, in ascending order.

    loss_mask: bool [G, S]. Returns anchors int64 [G, count] and keep bool [G, count]: sequences with fewer candidates
    are filled up with dummies. ValueError if count < 1.
    """
    if count < 1:
        raise ValueError(f"count={count!r} anchors; use at least 1")
    candidates = anchor_candidates(loss_mask)
    groups, width = candidates.shape
    anchors = torch.zeros(groups, count, dtype=torch.int64, device=loss_mask.device)
    keep = torch.zeros(groups, count, dtype=torch.bool, device=loss_mask.device)
    noise = torch.rand(groups, width, generator=generator).to(loss_mask.device)
    for group in range(groups):
        places = candidates[group].nonzero()[:, 0]
        chosen = places[noise[group, places].argsort()[:count]].sort().values
        anchors[group, : len(chosen)] = chosen
        keep[group, : len(chosen)] = True
    return anchors, keep


def spaced_anchors(loss_mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `sample_anchors`, but evenly spaced instead of random, for measuring."""
    anchors = torch.zeros(len(loss_mask), count, dtype=torch.int64, device=loss_mask.device)
    keep = torch.zeros(len(loss_mask), count, dtype=torch.bool, device=loss_mask.device)
    for row, candidates in enumerate(anchor_candidates(loss_mask)):
        places = candidates.nonzero()[:, 0]
        chosen = min(count, len(places))
        if chosen:
            anchors[row, :chosen] = places[torch.linspace(0, len(places) - 1, chosen).long()]
            keep[row, :chosen] = True
    return anchors, keep


def decay(block: int, gamma: float | None, device: torch.device | str = "cpu") -> Tensor:
    """float32 [block]: exp(-k / gamma), later slots counting less; all ones where gamma is None or not positive."""
    slot = torch.arange(block, dtype=torch.float32, device=device)
    return torch.exp(-slot / gamma) if gamma and gamma > 0 else torch.ones_like(slot)


def make_slots(batch: Batch, block: int, gamma: float | None) -> Slots:
    """The labels, conditions and weights of every block of a batch (see `Slots`)."""
    groups, length = batch.tokens.shape
    slot = torch.arange(block, device=batch.tokens.device)
    position = batch.anchors[:, :, None] + slot  # [G, M, B]
    inside = position + 1 < length
    flat = position.clamp(max=length - 2).view(groups, -1)

    def pick(values: Tensor, offset: int) -> Tensor:
        return values.gather(1, flat + offset).view(position.shape)

    supervised = batch.keep[:, :, None] & inside & pick(batch.loss_mask, 1)
    mask = supervised.long().cumprod(dim=-1).bool()
    return Slots(
        labels=pick(batch.tokens, 1),
        previous=pick(batch.tokens, 0),
        position=flat.view(position.shape),
        mask=mask,
        weights=mask * decay(block, gamma, mask.device),
    )
