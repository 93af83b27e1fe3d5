"""The interface of a verifier, and the registry behind `verifier(name)`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from hspark.core import Chain
from hspark.verify.layout import Layout


class Seeds(NamedTuple):
    """What a verifier's noise is a function of. seed: int64 [B]; anchor: int64 [B] position of the anchor token.

    Slot k of a row predicts the token at position anchor + 1 + k. An anchor position occurs in at most one step of a
    request, so (seed, anchor, slot) never repeats.
    """

    seed: Tensor
    anchor: Tensor


class Verdict(NamedTuple):
    """accepted: int64 [B] draft tokens accepted, 0..kept. token: int64 [B] the recovered or bonus token after them."""

    accepted: Tensor
    token: Tensor


class Verifier(Protocol):
    """Accepts a prefix of each row's kept slots and draws the token after it (section 7 of the specification).

    log_probs: float32 [T, V] the target's processed law of the token after each packed slot (`target_log_probs`).
    With `greedy=True` every running row is greedy and any monotone transform of the logits will do.
    layout: where each slot lies. chain: the drafts, [B, W]. kept: int64 [B] verified slots per row.
    """

    name: str

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict: ...
