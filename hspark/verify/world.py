"""A world small enough to know everything about: the target, both drafters and the confidences as finite tables.

Whether verification is exact cannot be seen from samples of a language model, but over three tokens and outputs of four
it can be computed. A `World` holds, for each of a few requests that share a budget, the target's law after every
output so far, the model drafter's law and confidence after every output and every draft behind it, and the
model-free drafter's chain after every output. `exact` enumerates it and `sampled` runs the real code on it.

Prefixes are nodes of a V-ary tree in heap order: the root (nothing emitted yet) is 0, and node n followed by token v is
n * V + 1 + v. Example, V = 2: 0 is (), 1 and 2 are (0) and (1), 3..6 are (0 0) (0 1) (1 0) (1 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hspark.core import SOURCE_FREE, SOURCE_MODEL, Chain


def tree_size(vocab_size: int, depth: int) -> int:
    """Nodes of the tree down to and including `depth`."""
    return sum(vocab_size**level for level in range(depth + 1))


@dataclass(frozen=True)
class World:
    """R requests over V tokens and outputs of N = `horizon` tokens; I prefixes shorter than N, J drafts shorter than K.

    target:           float64 [R, I, V]. The target's processed law of the next token; rows sum to 1.
    draft:            float64 [R, I, J, V]. The model drafter's law after output i and drafts j.
    confidence:       float64 [R, I, J]. Its estimate that the token drafted there is accepted. It may depend on the
                      tokens drafted before, and that is where losslessness is lost or kept.
    model_length:     int64 [R, I], 0..K.
    free_tokens:      int64 [R, I, L]. The model-free drafter's chain; entries past free_length are ignored.
    free_length:      int64 [R, I], 0..L.
    free_acceptance:  float64 [R, I, L].
    """

    horizon: int
    target: Tensor
    draft: Tensor
    confidence: Tensor
    model_length: Tensor
    free_tokens: Tensor
    free_length: Tensor
    free_acceptance: Tensor

    def __post_init__(self) -> None:
        requests, interior, vocab = self.target.shape
        if self.horizon < 1 or interior != tree_size(vocab, self.horizon - 1):
            wanted = tree_size(vocab, self.horizon - 1)
            raise ValueError(
                f"target has {interior} prefixes; use {wanted} for horizon={self.horizon!r} over {vocab} tokens"
            )
        drafts, lookup = self.draft.shape[2], self.free_tokens.shape[2]
        shapes = {
            "draft": (requests, interior, drafts, vocab),
            "confidence": (requests, interior, drafts),
            "model_length": (requests, interior),
            "free_tokens": (requests, interior, lookup),
            "free_length": (requests, interior),
            "free_acceptance": (requests, interior, lookup),
        }
        for name, shape in shapes.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}; use {shape}")
        for name in ("target", "draft"):
            law = getattr(self, name)
            if law.dtype != torch.float64 or not bool((law >= 0).all()):
                raise ValueError(f"{name} is not a table of float64 probabilities; use entries of at least 0")
            if law.numel() and not bool((law.sum(-1) - 1).abs().max() < 1e-12):
                raise ValueError(f"{name} has rows that do not sum to 1; normalise them in float64")
        if tree_size(vocab, self.model_width - 1) != drafts:
            raise ValueError(f"draft has {drafts} drafts; use 1 + V + .. + V^(K-1) for a chain length K")

    @property
    def requests(self) -> int:
        return int(self.target.shape[0])

    @property
    def interior(self) -> int:
        return int(self.target.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.target.shape[2])

    @property
    def nodes(self) -> int:
        return tree_size(self.vocab_size, self.horizon)

    @property
    def outputs(self) -> int:
        """V^N, the number of complete outputs of one request; output i is node `interior + i`."""
        return self.nodes - self.interior

    @property
    def model_width(self) -> int:
        """K, from the number of draft prefixes."""
        width = 0
        while tree_size(self.vocab_size, width) <= self.draft.shape[2]:
            width += 1
        return width

    @property
    def width(self) -> int:
        """W, the width of a chosen chain."""
        return max(self.model_width, int(self.free_tokens.shape[2]))

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """The node after `node` emits `token`; a complete output stays where it is."""
        return torch.where(node < self.interior, node * self.vocab_size + 1 + token, node)

    def next_law(self, request: Tensor, node: Tensor) -> Tensor:
        """float64 [..., V]: the target's law after each node; that of some prefix where the output is complete."""
        return self.target[request, node.clamp(max=self.interior - 1)]

    def draft_law(self, request: Tensor, node: Tensor, draft: Tensor) -> Tensor:
        """float64 [..., V]: the model drafter's law after each node and draft prefix."""
        return self.draft[request, node.clamp(max=self.interior - 1), draft]

    def model_chain(self, request: Tensor, node: Tensor, tokens: Tensor, sampled: bool) -> Chain:
        """The model drafter's chain for request [M], node [M] and drafted tokens [M, K].

        The law (float64) comes with greedy drafts as well: a verifier must not read it where a slot is a point mass.
        """
        width, inside = self.model_width, node < self.interior
        path = torch.zeros_like(node)
        laws, confidence = [], []
        for slot in range(width):
            laws.append(self.draft_law(request, node, path))
            confidence.append(self.confidence[request, node.clamp(max=self.interior - 1), path])
            path = path * self.vocab_size + 1 + tokens[:, slot]
        length = torch.where(inside, self.model_length[request, node.clamp(max=self.interior - 1)], 0)
        shape = (node.shape[0], width)
        return Chain.build(
            tokens,
            length,
            torch.stack(confidence, 1) if width else torch.zeros(shape),
            source=SOURCE_MODEL,
            point_mass=torch.full(shape, not sampled),
            log_probs=torch.stack(laws, 1).log() if width else None,
        )

    def free_chain(self, request: Tensor, node: Tensor) -> Chain:
        """The model-free drafter's chain for request [M] and node [M]."""
        inner = node.clamp(max=self.interior - 1)
        length = torch.where(node < self.interior, self.free_length[request, inner], 0)
        return Chain.build(
            self.free_tokens[request, inner], length, self.free_acceptance[request, inner], source=SOURCE_FREE
        )


def target_distribution(world: World) -> Tensor:
    """float64 [V^N] * R: the joint law of the complete outputs under plain decoding, the requests being independent."""
    joint = torch.ones((), dtype=torch.float64)
    for request in range(world.requests):
        mass = torch.ones(1, dtype=torch.float64)
        start = 0
        while start < world.interior:  # one level of the tree after the other
            level = world.target[request, start : start + mass.shape[0]]
            start += mass.shape[0]
            mass = (mass[:, None] * level).reshape(-1)
        joint = joint[..., None] * mass
    return joint


def total_variation(law: Tensor, other: Tensor) -> float:
    """Half the summed absolute difference of two laws of one shape: how far the probability of an event can be off."""
    return 0.5 * float((law - other).abs().sum())
