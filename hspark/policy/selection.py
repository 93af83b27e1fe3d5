"""Which chain each request verifies: the paper's rule, its lossless alternatives, and the ablations.

Every policy is a pure function of two chains and a price, vectorised over rows, without a branch on a tensor value, so
a step that contains it compiles to one graph. Below, d is the model chain with survivals S^d, g the model-free chain
with S^g. A chain of length 0 is an ordinary answer: g of length 0 means no match; d of length 0 has value 0 and is not
contained in anything, so a match wins against it by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hspark.core import (
    REASON_CONTAINS,
    REASON_EXTENDED,
    REASON_ONLY,
    REASON_VALUE,
    Chain,
)
from hspark.policy.base import ChainPolicy, Policy, register
from hspark.policy.merging import assemble, continued, keep, only, pair, ratios, reason_without_match, slots


def chain_value(survival: Tensor, price: Tensor | float) -> Tensor:
    """V = sum over slots of max(S_k - price, 0), float [B], of survival [B, W] (equation 3 of the paper).

    What verifying the chain is worth beyond what its slots would earn elsewhere in the batch. A slot whose survival is
    NaN is worth nothing.
    """
    return (survival - price).clamp(min=0.0).nan_to_num(nan=0.0).sum(dim=1)


def is_prefix(model: Chain, free: Chain) -> Tensor:
    """bool [B]: d is a proper prefix of g. Both chains have the same width.

    Where |d| < K, all of d means its actual length; the empty d is a prefix of every match.
    Example: d = 7 8, g = 7 8 9: True. d = 7 8, g = 7 8: False (nothing to add). d = 7 8, g = 7 9 8: False.
    """
    beyond = slots(model) >= model.length[:, None]
    same = ((model.tokens == free.tokens) | beyond).all(dim=1)
    return same & (free.length > model.length)


@register
@dataclass(frozen=True)
class Proposed(ChainPolicy):
    """The paper's rule (algorithm 1): contains rule first, then the larger value; ties and V = 0 go to the match.

    If d is a proper prefix of g, then g is accepted at least as far as d whatever the target draws: keep g, with
    S_k = max(S^g_k, S^d_k) along d and continued from there with g's acceptance. Otherwise keep g iff it matched and
    V(g) >= V(d).
    """

    name: ClassVar[str] = "proposed"
    reads_samples: ClassVar[bool] = True
    _contains: ClassVar[bool] = True
    _priced: ClassVar[bool] = True

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        model, free = pair(model_chain, free_chain)
        matched = free.length > 0
        price = price if self._priced else 0.0
        by_value = matched & (chain_value(free.survival, price) >= chain_value(model.survival, price))
        reason = torch.where(matched, REASON_VALUE, reason_without_match(model))
        if not self._contains:
            return keep(by_value, model, free, reason)
        contains = is_prefix(model, free) & (model.length > 0)
        best = torch.fmax(model.survival, free.survival)  # a NaN of either chain gives way to the other's value
        lifted = continued(best, model.length, free)
        free = free.replace(
            survival=torch.where(contains[:, None], lifted, free.survival),
            acceptance=torch.where(contains[:, None], ratios(lifted), free.acceptance),
        )
        return keep(contains | by_value, model, free, torch.where(contains, REASON_CONTAINS, reason))


@register
@dataclass(frozen=True)
class ExpectedLength(Proposed):
    """Ablation of the price: as `proposed`, but chains are compared by their expected accepted length, sum of S_k."""

    name: ClassVar[str] = "expected_length"
    _priced: ClassVar[bool] = False


@register
@dataclass(frozen=True)
class NoContains(Proposed):
    """Ablation of the contains rule: the value decides also where g begins with all of d."""

    name: ClassVar[str] = "no_contains"
    _contains: ClassVar[bool] = False


@register
@dataclass(frozen=True)
class NgramFirst(ChainPolicy):
    """g whenever it matched, else d. Never reads what the model drafter sampled (the paper, appendix H)."""

    name: ClassVar[str] = "ngram_first"

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        model, free = pair(model_chain, free_chain)
        matched = free.length > 0
        return keep(matched, model, free, torch.where(matched, REASON_ONLY, reason_without_match(model)))


@register
@dataclass(frozen=True)
class Threshold(ChainPolicy):
    """g when its score exceeds a constant, else d: the rule of hybrids in the style of SuffixDecoding.

    score: the constant. A match's score is its expected accepted length, the sum of S^g_k, between 0 and L. The rule
    sees neither the price nor d, hence neither what slots cost now nor what the model drafter sampled; the latter makes
    it lossless wherever ngram_first is.
    """

    score: float = 4.0
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        if isinstance(self.score, bool) or not isinstance(self.score, int | float) or not self.score >= 0:
            raise ValueError(
                f"score={self.score!r} is not usable; use a number of at least 0 (expected accepted tokens)"
            )

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        model, free = pair(model_chain, free_chain)
        matched = free.length > 0
        wins = matched & (free.survival.sum(dim=1) > self.score)
        return keep(wins, model, free, torch.where(matched, REASON_VALUE, reason_without_match(model)))


@register
@dataclass(frozen=True)
class Extension(ChainPolicy):
    """Always d, verified against its own draft law; when all of d is a prefix of g, g's tail follows as further slots.

    The tail's survivals continue from d's last one, so a tail slot never outranks d's own. A tail slot is reached only
    if all of d was accepted, so the decision to append it reads only tokens before it (the paper, appendix H). After an
    empty d, the tail is all of g.
    """

    name: ClassVar[str] = "extension"

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        model, free = pair(model_chain, free_chain)
        extended = is_prefix(model, free)
        in_tail = extended[:, None] & (slots(model) >= model.length[:, None])
        longer = free.replace(survival=continued(model.survival, model.length, free))
        reason = torch.where(free.length > 0, REASON_ONLY, reason_without_match(model))
        reason = torch.where(extended, REASON_EXTENDED, reason)
        return assemble(in_tail, torch.where(extended, free.length, model.length), model, longer, reason)


@register
@dataclass(frozen=True)
class ModelOnly(ChainPolicy):
    """Always d: the model drafter with adaptive verification."""

    name: ClassVar[str] = "model_only"
    needs_free: ClassVar[bool] = False

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        model, _ = pair(model_chain, free_chain)
        return model.replace(reason=only(model))


@register
@dataclass(frozen=True)
class NgramOnly(ChainPolicy):
    """Always g: the model-free drafter with adaptive verification."""

    name: ClassVar[str] = "ngram_only"
    needs_model: ClassVar[bool] = False

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        _, free = pair(model_chain, free_chain)
        return free.replace(reason=only(free))


@register
@dataclass(frozen=True)
class Vanilla(ChainPolicy):
    """No drafts: plain decoding, one token a step."""

    name: ClassVar[str] = "vanilla"
    needs_model: ClassVar[bool] = False
    needs_free: ClassVar[bool] = False

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        model, _ = pair(model_chain, free_chain)
        empty = Chain.empty(model.tokens.shape[0], model.width, model.tokens.device)
        return empty.replace(reason=only(empty))


def choose_chain(policy: Policy, model_chain: Chain, free_chains: Sequence[Chain], price: Tensor | float) -> Chain:
    """One chain [B, W] out of a model chain and any number of model-free chains, W being the largest width.

    model_chain: [B, K]. free_chains: each [B, L_i], at least one, the later preferred among equals.
    With one model-free chain this is `policy(model_chain, free_chain, price)`. With more, what was kept so far stands
    in the model chain's place against the next one, so the contains rule, the values and the extension keep their
    meaning. A policy that uses no model chain sees the best model-free chain by the paper's rule, which costs no
    exactness among chains that are all functions of the context.
    """
    if not free_chains:
        raise ValueError("free_chains is empty; use at least one chain (Chain.empty(B, 0) where nothing is drafted)")
    if not policy.needs_model:
        best = free_chains[0]
        for free_chain in free_chains[1:]:
            best = Proposed()(best, free_chain, price)
        return policy(model_chain, best, price)
    chain = model_chain
    for free_chain in free_chains:
        chain = policy(chain, free_chain, price)
    return chain
