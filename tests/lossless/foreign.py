"""Verifiers as an author of another engine would write them, in plain loops with torch's own noise: a right one, and
wrong ones that are each right in every marginal, or in every setting but one."""

from __future__ import annotations

import torch
from torch import Tensor

from hspark.verify import Chain, Layout, Seeds, Verdict


class Foreign:
    """Speculative sampling (Leviathan et al., 2023), slot by slot; the uniforms come from `uniforms`, to be broken."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    @property
    def name(self) -> str:
        return type(self).__name__

    def uniforms(self, seeds: Seeds, width: int) -> Tensor:
        """[B, W]."""
        return torch.rand(len(seeds.seed), width, generator=self.generator)

    def greedy(self, emitted: Tensor, chain: Chain, kept: Tensor) -> Verdict:
        """emitted [B, W + 1]: the argmax at every slot."""
        agreed = (emitted[:, :-1] == chain.tokens) & (torch.arange(chain.width) < kept[:, None])
        accepted = agreed.long().cumprod(1).sum(1)
        return Verdict(accepted, emitted.gather(1, accepted[:, None])[:, 0])

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict:
        laws, kept = log_probs[layout.index], torch.minimum(kept, chain.length)
        if greedy:
            return self.greedy(laws.argmax(-1), chain, kept)
        laws = laws.exp()
        row, uniform = torch.arange(len(kept)), self.uniforms(seeds, chain.width)
        going = torch.ones_like(kept, dtype=torch.bool)
        accepted, weights = torch.zeros_like(kept), laws[row, kept]
        for k in range(chain.width):
            target, token, here = laws[:, k], chain.tokens[:, k], going & (k < kept)
            chance, residual = target[row, token], target.scatter(1, token[:, None], 0.0)
            if chain.log_probs is not None and k < chain.log_probs.shape[1]:
                draft, point = chain.log_probs[:, k].exp(), chain.point_mass[:, k]
                chance = torch.where(point, chance, (chance / draft[row, token]).nan_to_num(0.0))
                residual = torch.where(point[:, None], residual, (target - draft).clamp(min=0.0))
            residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, target)
            passed = uniform[:, k] < chance
            weights = torch.where((here & ~passed)[:, None], residual, weights)
            accepted, going = accepted + (here & passed), here & passed
        # Rows that do not run have laws of padding.
        return Verdict(accepted, torch.multinomial(weights, 1, generator=self.generator)[:, 0])


class NeighboursShareUniforms(Foreign):
    """Each request alone is right; two of one batch are not independent."""

    def uniforms(self, seeds: Seeds, width: int) -> Tensor:
        return super().uniforms(seeds, width)[torch.arange(len(seeds.seed)) // 2]


class OneUniformPerRow(Foreign):
    """The first slot of a step is right; a second one is reached only with a small uniform number."""

    def uniforms(self, seeds: Seeds, width: int) -> Tensor:
        return super().uniforms(seeds, width)[:, :1].expand(-1, width)


class SameUniformsInEveryStep(Foreign):
    """The first step of a request is right; the next ones meet the same noise again."""

    def uniforms(self, seeds: Seeds, width: int) -> Tensor:
        mixed = (seeds.seed[:, None] >> torch.arange(width)) * 0x5851F42D4C957F2D
        return ((mixed >> 33) % 2**20).float() / 2**20


class AcceptsAllWhenGreedy(Foreign):
    """Right with one-hot laws, wrong as soon as it is told that all rows are greedy."""

    def greedy(self, emitted: Tensor, chain: Chain, kept: Tensor) -> Verdict:
        return Verdict(kept, emitted.gather(1, kept[:, None])[:, 0])
