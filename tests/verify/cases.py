"""Random inputs of a verifier, and the plain Python that says what it must do with them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hspark.core import SOURCE_MODEL, Chain
from hspark.sampling import STREAM_COUPLED, gumbel_noise
from hspark.verify import Layout, Seeds, pack


class Case(NamedTuple):
    """log_probs [T, V], and the same by row and slot, laws [B, W + 1, V]."""

    log_probs: Tensor
    laws: Tensor
    layout: Layout
    chain: Chain
    kept: Tensor
    seeds: Seeds

    @property
    def arguments(self) -> tuple[Tensor, Layout, Chain, Tensor, Seeds]:
        return self.log_probs, self.layout, self.chain, self.kept, self.seeds


def random_case(
    seed: int, batch: int = 6, width: int = 4, vocab: int = 5, *, sampled: bool = False, sharp: float = 1.0
) -> Case:
    """Rows with random laws, drafts, lengths and counts, packed with some padding; some draft tokens repeat the argmax.

    sampled: about half of the slots are declared as sampled. sharp: scale of the target's logits.
    """
    generator = torch.Generator().manual_seed(seed)
    laws = (torch.randn(batch, width + 1, vocab, generator=generator) * sharp).log_softmax(-1)
    draft_laws = torch.randn(batch, width, vocab, generator=generator).log_softmax(-1)
    tokens = torch.randint(vocab, (batch, width), generator=generator)
    agree = torch.rand(batch, width, generator=generator) < 0.5
    tokens = torch.where(agree, laws[:, :-1].argmax(-1), tokens)
    length = torch.randint(0, width + 1, (batch,), generator=generator)
    kept = (torch.rand(batch, generator=generator) * (length + 1)).long()
    points = torch.rand(batch, width, generator=generator) < 0.5 if sampled else torch.ones(batch, width).bool()
    chain = Chain.build(
        tokens,
        length,
        torch.rand(batch, width, generator=generator),
        source=SOURCE_MODEL,
        point_mass=points,
        log_probs=draft_laws if sampled else None,
    )
    layout = pack(kept, torch.ones(batch, dtype=torch.bool), width, batch * (width + 1) + 3)
    log_probs = torch.where(layout.valid[:, None], laws[layout.row, layout.offset], math.nan)  # padding must not matter
    seeds = Seeds(
        torch.randint(2**62, (batch,), generator=generator), torch.randint(1000, (batch,), generator=generator)
    )
    return Case(log_probs, laws, layout, chain, kept, seeds)


def plain_tokens(case: Case) -> Tensor:
    """int64 [B, W + 1]: the token that plain decoding emits at every slot, if the drafts before it are its prefix."""
    batch, slots, vocab = case.laws.shape
    emitted = torch.zeros(batch, slots, dtype=torch.int64)
    for b in range(batch):
        for k in range(slots):
            noise = gumbel_noise(case.seeds.seed[b], case.seeds.anchor[b] + 1 + k, vocab, STREAM_COUPLED)
            emitted[b, k] = (case.laws[b, k] + noise).argmax()
    return emitted


def expected_match(case: Case, emitted: Tensor) -> tuple[list[int], list[int]]:
    """Accepted counts and tokens, row by row in plain Python, for the target's tokens [B, W + 1]."""
    counts, tokens = [], []
    for b in range(emitted.shape[0]):
        k = 0
        while k < int(case.kept[b]) and int(emitted[b, k]) == int(case.chain.tokens[b, k]):
            k += 1
        counts.append(k)
        tokens.append(int(emitted[b, k]))
    return counts, tokens
