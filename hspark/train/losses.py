"""The training losses of a DSpark drafter in the DeepSpec recipe: cross-entropy, L1, confidence (and distillation).

With d the drafter's distribution of a slot (Markov bias included, teacher-forced) and t the target's, both softmax in
float32, and w the slots' weights:

    CE   = sum w * -log d[label]           / (sum w + 1e-6)
    L1   = sum w * sum_v |d - t|           / (sum w + 1e-6)      twice the total variation
    SOFT = sum w * -sum_v t log d          / (sum w + 1e-6)      cross-entropy against the target; not in the recipe
    CONF = sum w * BCE(confidence, accept) / (sum w + 1e-6)      accept = 1 - L1 / 2, detached

The vocabulary is the expensive part: N slots times V logits, several times over. `vocabulary_terms` walks over chunks
of slots that fit a cache, keeps nothing of size N * V, and returns gradients that it worked out on the way. A reduced
vocabulary (`Vocabulary`) shortens V itself: the distributions are then renormalised over a sample of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspark.drafters.dspark_model import DSparkModel, SharedContext
from hspark.train.blocks import Batch, Slots, make_slots
from hspark.train.checks import check_number

EPSILON = 1e-6
CHUNK = 448  # slots whose logits are held at once


@dataclass(frozen=True)
class LossWeights:
    """How the terms are mixed, and how fast later slots fade (gamma; None or <= 0: not at all)."""

    ce: float = 0.1
    l1: float = 0.9
    soft: float = 0.0
    confidence: float = 1.0
    gamma: float | None = 4.0

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "soft", "confidence"):
            check_number(name, getattr(self, name), lambda value: value >= 0, "a finite loss weight of at least 0")
        if self.gamma is not None:
            check_number("gamma", self.gamma, lambda _: True, "a finite number of slots, or None for no decay")
        if not self.ce + self.l1 + self.soft + self.confidence:
            raise ValueError("all loss weights are 0; use at least one above 0")


class LossTerms(NamedTuple):
    """Sums over slots, and the loss to differentiate.

    ce, l1, soft, confidence: scalars, sum of w * term, detached. weight: scalar, sum of w. total: scalar, weighted sum
    of the terms, each divided by the denominator that the caller gave (or by `weight` + 1e-6). accept: [A, B] expected
    acceptance of every slot, detached; confidence_logits: [A, B], what the confidence head says of it, detached.
    """

    ce: Tensor
    l1: Tensor
    soft: Tensor
    confidence: Tensor
    weight: Tensor
    total: Tensor
    accept: Tensor
    confidence_logits: Tensor


def _slot_terms(
    logits: Tensor, target: Tensor, row: Tensor, label: Tensor, ce_w: Tensor, l1_w: Tensor, soft_w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """n slots: logits [n, V]; the target's probabilities [P, V], of which slot i has row[i]; label, weights [n].

    Returns ce, l1 and soft of every slot, [n] each, and the gradient [n, V] of their weighted sum by the logits.
    """
    logits = logits.float()
    top = logits.amax(dim=-1, keepdim=True)
    exponent = (logits - top).exp()
    total = exponent.sum(dim=-1, keepdim=True)
    draft_probs = exponent / total
    target_probs = target[row].float()
    difference = draft_probs - target_probs
    l1 = difference.abs().sum(dim=-1)
    sign = difference.sign()
    hit = torch.arange(logits.shape[-1], device=logits.device) == label[:, None]
    log_total = (top + total.log()).squeeze(-1)
    ce = log_total - torch.where(hit, logits, 0.0).sum(dim=-1)
    soft = log_total - (target_probs * logits).sum(dim=-1)
    inner = (draft_probs * sign).sum(dim=-1, keepdim=True)
    gradient = ce_w[:, None] * (draft_probs - hit.float())
    gradient = gradient + soft_w[:, None] * difference + l1_w[:, None] * draft_probs * (sign - inner)
    return ce, l1, soft, gradient


@cache
def _kernel(compiled: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    return torch.compile(_slot_terms, dynamic=True) if compiled else _slot_terms


class _VocabularyLoss(torch.autograd.Function):
    """sum over slots of ce_w * ce + l1_w * l1 + soft_w * soft, with gradients for hidden, latent and markov_w2."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        markov_w2: Tensor | None,
        head: Tensor,
        target: Tensor,
        row: Tensor,
        label: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        softcap: float | None,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = head.dtype
        terms = [torch.empty(len(hidden), device=hidden.device) for _ in range(3)]
        to_hidden = torch.empty_like(hidden, dtype=dtype)
        to_latent = None if latent is None else torch.empty_like(latent, dtype=dtype)
        w2 = None if markov_w2 is None else markov_w2.to(dtype)
        to_w2 = None if w2 is None else torch.zeros(w2.shape, device=w2.device)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            base = hidden[part].to(dtype) @ head.T
            if softcap:
                base = softcap * torch.tanh(base / softcap)
            logits = base
            if latent is not None and w2 is not None:
                logits = torch.addmm(base, latent[part].to(dtype), w2.T)
            *values, gradient = _kernel(compiled)(logits, target, row[part], label[part], *(w[part] for w in weights))
            for term, value in zip(terms, values, strict=True):
                term[part] = value
            gradient = gradient.to(dtype)
            if latent is not None and w2 is not None and to_latent is not None and to_w2 is not None:
                to_latent[part] = gradient @ w2
                to_w2 += (gradient.T @ latent[part].to(dtype)).float()
            if softcap:
                gradient = gradient * (1 - (base / softcap) ** 2)
            to_hidden[part] = gradient @ head
        ctx.save_for_backward(to_hidden, to_latent, to_w2)
        ctx.mark_non_differentiable(*terms)
        ce, l1, soft = terms
        loss = (weights[0] * ce + weights[1] * l1 + weights[2] * soft).sum()
        return loss, ce, l1, soft

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_latent, to_w2 = ctx.saved_tensors
        scaled = [None if g is None else g * gradients[0].to(g.dtype) for g in (to_hidden, to_latent, to_w2)]
        return (*scaled, *(None,) * 7)


class Vocabulary(NamedTuple):
    """A sample of the vocabulary: ids int64 [Vs] ascending, and place int64 [V], the column of each id (-1: absent)."""

    ids: Tensor
    place: Tensor

    @staticmethod
    def sample(
        common: Tensor, labels: Tensor, size: int, vocab_size: int, generator: torch.Generator | None = None
    ) -> Vocabulary:
        """`common` ids, every label, and random others up to `size`. ValueError if the first two do not fit."""
        inside = torch.zeros(vocab_size, dtype=torch.bool)
        inside[common.cpu()] = True
        inside[labels.cpu()] = True
        missing = size - int(inside.sum())
        if missing < 0 or size > vocab_size:
            raise ValueError(
                f"vocabulary size {size} cannot hold {int(inside.sum())} common tokens and labels of {vocab_size}; "
                "use a larger size or fewer common tokens"
            )
        others = torch.randperm(vocab_size, generator=generator)
        inside[others[~inside[others]][:missing]] = True
        ids = inside.nonzero()[:, 0]
        place = torch.full((vocab_size,), -1)
        place[ids] = torch.arange(len(ids))
        return Vocabulary(ids.to(labels.device), place.to(labels.device))


def target_probabilities(model: DSparkModel, final: Tensor, head: Tensor) -> Tensor:
    """The target's distribution at positions final [P, H], through the drafter's frozen head [Vs, H] -> [P, Vs]."""
    logits = final.to(head.dtype) @ head.T
    cap = model.config.logit_softcap
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits.softmax(dim=-1)


def block_hidden(model: DSparkModel, batch: Batch) -> Tensor:
    """The drafter over all blocks of a batch in one forward -> hidden states [G * M, B, H]."""
    groups, length = batch.tokens.shape
    positions = torch.arange(length, device=batch.tokens.device).expand(groups, -1)
    kind = batch.taps.device.type
    # Stored states are bfloat16; without autocast the weights decide.
    taps = batch.taps if torch.is_autocast_enabled(kind) else batch.taps.to(model.fc.weight.dtype)
    layers = model.keys_values(model.context_features(taps), positions)
    context = SharedContext(model.config, layers, batch.anchors)
    tokens, places = model.block_inputs(batch.tokens.gather(1, batch.anchors).flatten(), batch.anchors.flatten())
    return model.block_hidden(tokens, places, context)


def draft_losses(
    model: DSparkModel,
    batch: Batch,
    weights: LossWeights,
    *,
    denominator: Tensor | float | None = None,
    vocabulary: Vocabulary | None = None,
    compiled: bool = False,
) -> LossTerms:
    """All losses of one batch. `denominator` replaces sum w + 1e-6, for batches that are parts of a larger one.

    vocabulary: reduces the softmax to these tokens (all labels must be among them). compiled: fuse the element-wise
    part with torch.compile, which pays when many batches follow.
    """
    slots = make_slots(batch, model.config.block_size, weights.gamma)
    hidden = block_hidden(model, batch)
    previous = slots.previous.flatten(0, 1)
    latent = None if model.markov_head is None else model.markov_head.latent(previous, hidden)
    weight = slots.weights.sum()
    scale = slots.weights.flatten() / (weight + EPSILON if denominator is None else denominator)
    loss, ce, l1, soft = _over_vocabulary(model, batch, slots, hidden, latent, scale, weights, vocabulary, compiled)
    accept = (1 - 0.5 * l1).clamp(min=0)  # low-precision softmaxes may sum to more than 1
    confidence = torch.zeros((), device=hidden.device)
    logits = torch.zeros_like(accept)
    if model.confidence_head is not None and weights.confidence:
        logits = model.confidence(previous, hidden).flatten()
        entropy = F.binary_cross_entropy_with_logits(logits, accept, reduction="none")
        loss = loss + weights.confidence * (scale * entropy).sum()
        confidence = (slots.weights.flatten() * entropy).sum().detach()
    w, shape = slots.weights.flatten(), previous.shape
    return LossTerms(
        ce=(w * ce).sum(),
        l1=(w * l1).sum(),
        soft=(w * soft).sum(),
        confidence=confidence,
        weight=weight,
        total=loss,
        accept=accept.view(shape),
        confidence_logits=logits.detach().view(shape),
    )


def _over_vocabulary(
    model: DSparkModel,
    batch: Batch,
    slots: Slots,
    hidden: Tensor,
    latent: Tensor | None,
    scale: Tensor,
    weights: LossWeights,
    vocabulary: Vocabulary | None,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three vocabulary-wide terms: their scaled sum, and ce, l1, soft of every slot."""
    assert isinstance(model.lm_head, nn.Linear)
    head = model.lm_head.weight
    markov_w2 = None if model.markov_head is None else model.markov_head.markov_w2.weight
    label = slots.labels.flatten()
    if vocabulary is not None:
        head = head[vocabulary.ids]
        markov_w2 = None if markov_w2 is None else markov_w2[vocabulary.ids]
        label = vocabulary.place[label]
    groups, length = batch.tokens.shape
    with torch.no_grad():
        needed = torch.zeros(groups * length, dtype=torch.bool, device=label.device)
        flat = (slots.position + torch.arange(groups, device=label.device)[:, None, None] * length).flatten()
        needed[flat] = True
        target = target_probabilities(model, batch.final.flatten(0, 1)[needed], head)
        row = (needed.cumsum(0) - 1)[flat]
    with torch.autocast(hidden.device.type, enabled=False):
        return _VocabularyLoss.apply(
            hidden.flatten(0, 1),
            None if latent is None else latent.flatten(0, 1),
            markov_w2,
            head,
            target,
            row,
            label,
            (weights.ce * scale, weights.l1 * scale, weights.soft * scale),
            model.config.logit_softcap,
            compiled,
        )
