"""Verifiers and decisions that are wrong in ways that engines have been wrong: the suite must reject every one of them.

Each is real code with the mistake in it, and, where the mistake is in the accept rule, the same mistake as a float64
`Rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hspark.core import Chain
from hspark.policy import Policy, policy
from hspark.sampling import slot_key, uniform_noise
from hspark.verify.base import Seeds, Verdict, Verifier, count_prefix, open_slots
from hspark.verify.exact import Sizing
from hspark.verify.examples import returning_noise_example
from hspark.verify.layout import Layout
from hspark.verify.rejection import RejectionVerifier
from hspark.verify.rule import Rule, Slot, normalised
from hspark.verify.world import World


class NoResidual(RejectionVerifier):
    """After a rejection the next token is drawn from the target itself, which favours what it had just refused."""

    name = "no_residual"

    @staticmethod
    def residual_log_probs(stop: Tensor, chain: Chain, slot: Tensor) -> Tensor:
        return stop


class NoResidualRule(Rule):
    def residual(self, slot: Slot) -> Tensor:
        return slot.target


class ResampleOnMismatch(NoResidual):
    """Sample from the target and compare (exact so far), but on a mismatch draw once more instead of emitting it."""

    name = "resample_on_mismatch"

    @staticmethod
    def accept_probs(log_probs: Tensor, layout: Layout, chain: Chain) -> Tensor:
        return log_probs[layout.index[:, :-1], chain.tokens].exp()


class ResampleOnMismatchRule(NoResidualRule):
    def accept(self, slot: Slot) -> Tensor:
        return slot.target.gather(1, slot.token[:, None])[:, 0]


class ResidualMinusDraftedToken(RejectionVerifier):
    """A sampled draft's residual taken as the target without the drafted token, as if its law were a point mass."""

    name = "residual_minus_drafted_token"

    @staticmethod
    def residual_log_probs(stop: Tensor, chain: Chain, slot: Tensor) -> Tensor:
        drafted = chain.tokens.gather(1, slot.clamp(max=chain.width - 1)[:, None])
        return stop.scatter(1, drafted, -math.inf)


class ResidualMinusDraftedTokenRule(Rule):
    def residual(self, slot: Slot) -> Tensor:
        return normalised(slot.target.scatter(1, slot.token[:, None], 0.0), slot.target)


def _soft(chain: Chain) -> Chain:
    """The chain with its argmax drafts declared as samples of the law they are the argmax of."""
    if chain.log_probs is None:
        return chain
    return chain._replace(point_mass=(chain.log_probs == 0).all(2))  # slots without a law stay point masses


class SoftLawForArgmax(RejectionVerifier):
    """Argmax drafts verified against the drafter's softmax, though they were never sampled from it."""

    name = "soft_law_for_argmax"

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict:
        return super().__call__(log_probs, layout, _soft(chain), kept, seeds, greedy=greedy)


class SoftLawForArgmaxRule(Rule):
    @staticmethod
    def _soft(slot: Slot) -> Slot:
        return slot._replace(point_mass=(slot.draft.sum(1) - 1).abs() > 1e-9)

    def accept(self, slot: Slot) -> Tensor:
        return super().accept(self._soft(slot))

    def residual(self, slot: Slot) -> Tensor:
        return super().residual(self._soft(slot))


class SharedNoise(RejectionVerifier):
    """The uniform number that rejected the draft also picks the recovered token: it is known to be large by then."""

    name = "shared_noise"

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict:
        right = super().__call__(log_probs, layout, chain, kept, seeds, greedy=greedy)
        key = slot_key(seeds.anchor[:, None], torch.arange(chain.width))
        uniform = uniform_noise(seeds.seed[:, None], key, self.accept_stream)
        accepted = count_prefix((uniform < self.accept_probs(log_probs, layout, chain)) & open_slots(chain, kept))
        stop = log_probs[layout.index.gather(1, accepted[:, None])[:, 0]]
        law = self.residual_log_probs(stop, chain, accepted).softmax(1)
        reused = uniform.gather(1, accepted.clamp(max=chain.width - 1)[:, None])
        token = (law.cumsum(1) <= reused).sum(1).clamp(max=law.shape[1] - 1)
        return Verdict(accepted, torch.where(accepted < torch.minimum(kept, chain.length), token, right.token))


class SharedNoiseRule(Rule):
    def residual(self, slot: Slot) -> Tensor:
        law = super().residual(slot)
        accept = self.accept(slot)[:, None]
        upper = law.cumsum(1)
        upper = torch.where(torch.arange(law.shape[1]) < law.shape[1] - 1, upper, 1.0)
        lower = torch.nn.functional.pad(upper[:, :-1], (1, 0))
        return normalised((upper - torch.maximum(lower, accept)).clamp(min=0.0), law)


class OffByOneBonus(RejectionVerifier):
    """The bonus token drawn from the law at the last accepted draft token, not from the law after it."""

    name = "off_by_one_bonus"

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict:
        last = torch.minimum(kept, chain.length)[:, None]
        index = layout.index.scatter(1, last, layout.index.gather(1, (last - 1).clamp(min=0)))
        return super().__call__(log_probs, layout._replace(index=index), chain, kept, seeds, greedy=greedy)


class OffByOneBonusRule(Rule):
    def bonus(self, laws: list[Tensor]) -> Tensor:
        return laws[max(len(laws) - 2, 0)]


@dataclass(frozen=True)
class KeptByOwnToken:
    """A policy that rates a slot by the drafter's probability of the token sampled there, and drops unlikely ones."""

    base: Policy
    name: str = "kept_by_own_token"
    needs_model: bool = True
    needs_free: bool = False

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        chain = self.base(model_chain, free_chain, price)
        if chain.log_probs is None:
            return chain
        own = chain.log_probs.gather(2, chain.tokens[..., None])[..., 0].exp().to(chain.acceptance.dtype)
        acceptance = torch.where(chain.point_mass, chain.acceptance, own)
        survival = torch.where(chain.survival > 0, acceptance, 0.0).cumprod(1)
        # Below the bar a slot is dropped altogether, as a drafter that stops early would do.
        length = count_prefix((survival > 0.3) & (chain.survival > 0))
        inside = torch.arange(chain.width, device=length.device) < length[:, None]
        return chain._replace(length=length, acceptance=acceptance, survival=torch.where(inside, survival, 0.0))

    def is_lossless(self, drafting: str, verify: str, temperature: float) -> bool:
        return drafting == "greedy" or verify == "coupled" or temperature == 0


def position_key(anchor: Tensor, slot: int) -> Tensor:
    """A key for draft noise that returns when the position is drafted again; see `slot_key` for why it must not."""
    return anchor + 1 + slot


@dataclass(frozen=True)
class Control:
    """One mistake, in the setting where it shows. rule: the same in float64, or None if only samples can show it."""

    name: str
    verifier: Verifier
    policy: Policy
    drafting: str
    rule: Rule | None = None
    draft_key: Callable[[Tensor, int], Tensor] = slot_key
    world: tuple[World, Sizing] | None = None  # instead of random ones


def controls() -> tuple[Control, ...]:
    """All negative controls."""
    model, right = policy("model_only"), RejectionVerifier()
    returning = returning_noise_example()
    return (
        Control("no_residual", NoResidual(), model, "greedy", NoResidualRule()),
        Control("resample_on_mismatch", ResampleOnMismatch(), model, "probabilistic", ResampleOnMismatchRule()),
        Control(
            "residual_minus_drafted_token",
            ResidualMinusDraftedToken(),
            model,
            "probabilistic",
            ResidualMinusDraftedTokenRule(),
        ),
        Control("soft_law_for_argmax", SoftLawForArgmax(), model, "greedy", SoftLawForArgmaxRule()),
        Control("shared_noise", SharedNoise(), model, "probabilistic", SharedNoiseRule()),
        Control("off_by_one_bonus", OffByOneBonus(), model, "greedy", OffByOneBonusRule()),
        Control("kept_by_own_token", right, KeptByOwnToken(model), "probabilistic", Rule()),
        Control("draft_noise_by_position", right, model, "probabilistic", None, position_key, returning),
    )
