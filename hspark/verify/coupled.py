"""Coupled verification: every position owns its noise, and the target's token there is a function of it alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hspark.core import Chain
from hspark.sampling import STREAM_COUPLED, argmax, gumbel_noise
from hspark.verify.base import Seeds, Verdict, match_prefix
from hspark.verify.layout import Layout

Noise = Callable[[Tensor, Tensor, int, int], Tensor]


class CoupledVerifier:
    """The token at position t is argmax(log target + noise(seed, t, .)); a draft token is accepted iff it equals it.

    No draft appears in that expression, so what is emitted is token for token what plain decoding with the same seed
    emits, whatever the drafters, the policy, the budget and the batch do (the specification, section 7). For a draft
    that does not look at the noise, P(accept x) = target(x) and the recovered token follows the target without x:
    the same probabilities as rejection sampling of a point mass. A probabilistic drafter that wants its drafts
    accepted takes argmax(log draft + the same noise).
    """

    name = "coupled"
    depends_on_drafts = False

    def __init__(self, noise: Noise = gumbel_noise) -> None:
        """noise: (seed, position, vocab_size, stream) -> [..., vocab_size]; another one than Gumbel noise is for
        study."""
        self.noise = noise

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict:
        """See `Verifier`. With `greedy` no noise is computed; a greedy row among others has a one-hot law, which
        finite noise cannot move."""
        if not greedy:
            position = seeds.anchor[layout.row] + 1 + layout.offset
            log_probs = log_probs + self.noise(seeds.seed[layout.row], position, log_probs.shape[-1], STREAM_COUPLED)
        return match_prefix(argmax(log_probs), layout, chain, kept)
