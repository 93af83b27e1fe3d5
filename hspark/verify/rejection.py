"""Rejection verification: the classical accept-or-recover rule, for sampled and deterministic drafts in one chain.

Sampled slots follow Leviathan et al. (2023) and Chen et al. (2023), equation 1 and the residual below it; a
deterministic draft is a sampled one whose law is a point mass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hspark.core import Chain
from hspark.sampling import STREAM_ACCEPT, STREAM_RECOVER, argmax, gumbel_noise, slot_key, uniform_noise
from hspark.verify.base import Seeds, Verdict, count_prefix, match_prefix, open_slots
from hspark.verify.layout import Layout


class RejectionVerifier:
    """Point-mass slot: accept x with probability target(x), else recover from the target without x.

    Sampled slot: accept with min(1, target(x) / draft(x)), else recover from (target - draft)^+, renormalised.
    After a fully accepted chain the bonus token follows the target. Exact for every policy that decides on a slot
    without looking at the token sampled there, or at later ones (the specification, section 7).
    """

    name = "rejection"
    # Acceptance and recovery draw from streams of their own: a shared one would make the recovered token know why it
    # is needed.
    accept_stream = STREAM_ACCEPT
    recover_stream = STREAM_RECOVER

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict:
        """See `Verifier`. chain.log_probs may cover only the first slots of the chain, if the rest are point masses."""
        if greedy:  # no noise: both the accept rule and the residual reduce to comparing with the argmax
            return match_prefix(argmax(log_probs), layout, chain, kept)
        slot = torch.arange(chain.width, device=kept.device)
        uniform = uniform_noise(seeds.seed[:, None], slot_key(seeds.anchor[:, None], slot), self.accept_stream)
        # NaN compares false: a slot without a valid probability is rejected.
        passed = (uniform < self.accept_probs(log_probs, layout, chain)) & open_slots(chain, kept)
        accepted = count_prefix(passed)

        stop = log_probs[layout.index.gather(1, accepted[:, None])[:, 0]]  # [B, V]: the law where the row stops
        rejected = accepted < torch.minimum(kept, chain.length)
        law = torch.where(rejected[:, None], self.residual_log_probs(stop, chain, accepted), stop)
        noise = gumbel_noise(seeds.seed, slot_key(seeds.anchor, accepted), law.shape[-1], self.recover_stream)
        return Verdict(accepted, argmax(law + noise))

    @staticmethod
    def accept_probs(log_probs: Tensor, layout: Layout, chain: Chain) -> Tensor:
        """float32 [B, W]: the probability with which each slot is accepted, from log_probs [T, V]."""
        target = log_probs[layout.index[:, :-1], chain.tokens]
        if chain.log_probs is None:
            return target.exp()
        sampled_width = chain.log_probs.shape[1]
        draft = chain.log_probs.gather(2, chain.tokens[:, :sampled_width, None])[:, :, 0]
        draft = torch.where(chain.point_mass[:, :sampled_width], 0.0, draft)
        draft = torch.nn.functional.pad(draft, (0, chain.width - sampled_width))
        return (target - draft).exp().clamp(max=1.0)

    @staticmethod
    def residual_log_probs(stop: Tensor, chain: Chain, slot: Tensor) -> Tensor:
        """[B, V] unnormalised log-law of the recovered token, for stop [B, V] = the target's at `slot` (int64 [B]).

        A residual without mass (target and draft agree up to rounding, or a NaN draft) is replaced by the target.
        """
        if chain.width == 0:
            return stop
        slot = slot.clamp(max=chain.width - 1)[:, None]
        drafted = chain.tokens.gather(1, slot)
        residual = stop.scatter(1, drafted, -math.inf)
        if chain.log_probs is not None:
            row = torch.arange(slot.shape[0], device=slot.device)
            draft = chain.log_probs[row, slot[:, 0].clamp(max=chain.log_probs.shape[1] - 1)]
            excess = (stop.exp() - draft.exp()).clamp(min=0.0).log()
            residual = torch.where(chain.point_mass.gather(1, slot), residual, excess)
        has_mass = residual.amax(dim=-1, keepdim=True) > -math.inf  # false for NaN
        return torch.where(has_mass, residual, stop)
