"""The small heads of a DSpark drafter: the Markov correction by the previous token, and the confidence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hspark.drafters.dspark_config import DSparkConfig


class MarkovHead(nn.Module):
    """A low-rank bias on a slot's logits, from the token before it: W2 f(W1[prev], hidden).

    vanilla: f is the embedding itself. gated: a gate from hidden and embedding scales it. rnn: a gated state runs
    along the block, starting at zero. `latent` is f [.., r]; the bias is `markov_w2(latent)`.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind, self.rank = config.markov_head, rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.drafts, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: embedding [A, r] of prev, hidden [A, H], state [A, r] (None at a block start) -> latent, state."""
        if self.kind == "vanilla":
            return embedding, None
        if self.kind == "gated":
            return self.gate_proj(torch.cat((hidden, embedding), dim=-1)).sigmoid() * embedding, None
        state = torch.zeros_like(embedding) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, embedding, hidden), dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def latent(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced: prev int64 [A, B] (target ids), hidden [A, B, H] -> [A, B, r]."""
        embedding = self.markov_w1(prev)
        if self.kind != "rnn":
            return self.step(embedding, hidden, None)[0]
        state, latents = None, []
        for slot in range(prev.shape[-1]):
            latent, state = self.step(embedding[:, slot], hidden[:, slot], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


class ConfidenceHead(nn.Module):
    """A linear score of (hidden, embedding of prev) or of hidden alone; its sigmoid estimates acceptance."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        extra = config.markov_rank if config.confidence_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)
