"""The real code on a `World`, step after step: drafters that sample, the policy, the allocation, packing, a verifier.

What `exact` computes, this draws, many copies of the batch at once; a chi-square over the full support ties the two
together. The noise is counter-based and may be replaced by a finite one (`finite_noise`), and then running every
seed once *is* an enumeration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hspark.core import Chain
from hspark.policy import Policy, allocate
from hspark.sampling import STREAM_COUPLED, STREAM_DRAFT, gumbel_noise, slot_key
from hspark.verify.base import Seeds, Verdict, Verifier
from hspark.verify.coupled import Noise
from hspark.verify.exact import Allocator, Decision, Sizing, allocate_many
from hspark.verify.layout import pack
from hspark.verify.world import World


class VerdictError(ValueError):
    """A verifier returned what `Verifier` does not allow: wrong types or shapes, unknown tokens, unverified slots."""


class Sampler:
    """Speculative decoding of any number of copies of a world's batch.

    verifier: any `Verifier`. drafting: "greedy" or "probabilistic". sizing, allocator: as in `exact_distribution`.
    coupled: probabilistic drafts use the noise of the positions that they draft, as coupled verification wants it; else
    each (step, slot) has noise of its own.
    noise: what the drafter draws with. draft_key: where uncoupled draft noise is drawn, from anchor and slot.
    greedy: tell the verifier that every row is greedy.

    verified: draft slots verified so far. joint: steps of a batch so far in which two or more requests had some.
    """

    def __init__(
        self,
        world: World,
        verifier: Verifier,
        policy: Policy,
        *,
        drafting: str = "greedy",
        coupled: bool = False,
        sizing: Sizing | None = None,
        allocator: Allocator = allocate,
        noise: Noise = gumbel_noise,
        draft_key: Callable[[Tensor, int], Tensor] = slot_key,
        greedy: bool = False,
    ) -> None:
        self.world, self.verifier, self.policy = world, verifier, policy
        self.drafting, self.coupled, self.greedy = drafting, coupled, greedy
        self.sizing, self.allocator = sizing or Sizing(), allocator
        self.noise, self.draft_key = noise, draft_key
        self.delay = self.sizing.delay if self.sizing.cost is not None else 0
        depth = torch.zeros(world.nodes, dtype=torch.int64)
        for node in range(1, world.nodes):
            depth[node] = depth[(node - 1) // world.vocab_size] + 1
        self.depth = depth
        self.verified = self.joint = 0

    def run(self, seeds: Tensor) -> Tensor:
        """int64 [C, R]: the complete output of each request of each copy, for seeds [C, R]. Output i is 0..V^N - 1."""
        world, (copies, requests) = self.world, seeds.shape
        request = torch.arange(requests).expand(copies, requests).reshape(-1)
        node = torch.zeros(copies * requests, dtype=torch.int64)
        full = self.sizing.decide(torch.ones(requests, world.width), requests)
        queues = [[full] * copies for _ in range(self.delay)]
        for _ in range(world.horizon):
            decisions = queues.pop(0) if queues else [Decision(self.sizing.budget, self.sizing.price)] * copies
            running = (node < world.interior).view(copies, requests)
            chain = self._choose(request, node, seeds.reshape(-1), decisions)
            later = self._size(chain, running)
            budget = torch.tensor([d.budget for d in (later if later and not self.delay else decisions)])
            if later and self.delay:
                queues.append(later)
            survival = chain.survival.view(copies, requests, chain.width)
            kept = allocate_many(self.allocator, survival, chain.length.view(copies, requests), budget)
            self._count(torch.minimum(kept, chain.length.view(copies, requests)))
            kept = kept.reshape(-1)
            node = self._verify(request, node, seeds.reshape(-1), chain, kept)
        return (node - world.interior).view(copies, requests)

    def plain(self, seeds: Tensor) -> Tensor:
        """int64 [C, R]: what plain decoding emits when position t draws with the coupled noise of its seed."""
        request = torch.arange(seeds.shape[1]).expand(seeds.shape).reshape(-1)
        node, seed = torch.zeros(seeds.numel(), dtype=torch.int64), seeds.reshape(-1)
        for position in range(self.world.horizon):
            law = self.world.next_law(request, node).log().float()
            noise = self.noise(seed, torch.full_like(seed, position + 1), self.world.vocab_size, STREAM_COUPLED)
            node = self.world.child(node, (law + noise).argmax(1))
        return (node - self.world.interior).view(seeds.shape)

    def _choose(self, request: Tensor, node: Tensor, seed: Tensor, decisions: list[Decision]) -> Chain:
        """The chain of every row. Copies whose prices differ go through the policy one price at a time."""
        model = self.world.model_chain(
            request, node, self._draft(request, node, seed), self.drafting == "probabilistic"
        )
        if model.log_probs is not None:
            model = model._replace(log_probs=model.log_probs.float())
        free = self.world.free_chain(request, node)
        prices = torch.tensor([d.price for d in decisions], dtype=torch.float64)
        chosen: Chain | None = None
        for price in prices.unique().tolist():
            here = (prices == price).repeat_interleave(node.shape[0] // len(decisions))
            chain = self.policy(model, free, price)
            chosen = chain if chosen is None else _merge(here, chain, chosen)
        assert chosen is not None
        return chosen

    def _draft(self, request: Tensor, node: Tensor, seed: Tensor) -> Tensor:
        """int64 [B, K]: the model drafter's tokens."""
        world, anchor = self.world, self.depth[node]
        path, tokens = torch.zeros_like(node), []
        for slot in range(world.model_width):
            law = world.draft_law(request, node, path).log().float()
            if self.drafting == "probabilistic":
                stream = STREAM_COUPLED if self.coupled else STREAM_DRAFT
                key = anchor + 1 + slot if self.coupled else self.draft_key(anchor, slot)
                law = law + self.noise(seed, key, world.vocab_size, stream)
            tokens.append(law.argmax(1))
            path = path * world.vocab_size + 1 + tokens[-1]
        return torch.stack(tokens, 1) if tokens else torch.zeros(node.shape[0], 0, dtype=torch.int64)

    def _size(self, chain: Chain, running: Tensor) -> list[Decision]:
        """What each copy decides from this step's survivals; equal ones are sized once."""
        if self.sizing.cost is None:
            return []
        survival = chain.survival.view(running.shape[0], running.shape[1] * chain.width)
        count = running.sum(1, keepdim=True)
        patterns, back = torch.cat([survival, count], 1).unique(dim=0, return_inverse=True)
        sized = [self.sizing.decide(row[:-1], int(row[-1])) for row in patterns]
        return [sized[i] for i in back.tolist()]

    def _verify(self, request: Tensor, node: Tensor, seed: Tensor, chain: Chain, kept: Tensor) -> Tensor:
        """The node of every row after the step."""
        world, rows = self.world, torch.arange(node.shape[0])
        path = [node]
        for slot in range(chain.width):
            path.append(world.child(path[-1], chain.tokens[:, slot]))
        nodes = torch.stack(path, 1)  # [B, W + 1], the node before each slot's prediction
        layout = pack(kept, node < world.interior, chain.width, node.shape[0] * (chain.width + 1))
        laws = world.next_law(request[layout.row], nodes[layout.row, layout.offset]).log().float()
        seeds = Seeds(seed, self.depth[node])
        verdict = self.verifier(laws, layout, chain, kept, seeds, greedy=self.greedy)
        running = node < world.interior
        self._check_verdict(verdict, running, torch.minimum(kept, chain.length))
        accepted, token = (torch.where(running, x.long(), 0) for x in (verdict.accepted, verdict.token))
        return torch.where(running, world.child(nodes[rows, accepted], token), node)

    def _count(self, kept: Tensor) -> None:
        """Adds up what is verified in one step, for kept [C, R]."""
        self.verified += int(kept.sum())
        self.joint += int(((kept > 0).sum(1) > 1).sum())

    def _check_verdict(self, verdict: Verdict, running: Tensor, kept: Tensor) -> None:
        """VerdictError unless the verdict is well formed for kept [B] verified slots of the rows that run."""
        for name in ("accepted", "token"):
            value = getattr(verdict, name, None)
            if not isinstance(value, Tensor):
                raise VerdictError(f"it returned {type(verdict).__name__} without a tensor {name!r}; use Verdict")
            if value.shape != kept.shape or value.is_floating_point():
                raise VerdictError(
                    f"{name} is {value.dtype} of shape {tuple(value.shape)}; use int64 of shape {tuple(kept.shape)}"
                )
            last = kept if name == "accepted" else torch.full_like(kept, self.world.vocab_size - 1)
            wrong = running & ((value < 0) | (value > last))
            if bool(wrong.any()):
                row = int(wrong.nonzero()[0, 0])
                raise VerdictError(f"{name} is {int(value[row])} in some row; use 0..{int(last[row])} there")


def _merge(take: Tensor, chain: Chain, other: Chain) -> Chain:
    """`chain` in the rows where take [B] is True, `other` elsewhere."""
    fields = {}
    for name, value in chain._asdict().items():
        rival = getattr(other, name)
        if value is not None and rival is not None:
            value = torch.where(take.view(-1, *(1,) * (value.dim() - 1)), value, rival)
        fields[name] = value
    return Chain(**fields)


def finite_noise(atoms: Tensor) -> Noise:
    """Noise that takes one of M vectors, atoms float [M, V], each with probability 1/M.

    Digit t - 1 of the seed in base M is the atom of position t: the seeds 0..M^N - 1 are all noises of positions
    1..N. (Positions beyond
    have the first atom: noise need not be fair for coupled verification to emit what plain decoding emits.)
    """

    def noise(seed: Tensor, position: Tensor, vocab_size: int, stream: int = STREAM_COUPLED) -> Tensor:
        if vocab_size != atoms.shape[1]:
            raise ValueError(f"vocab_size={vocab_size!r}; use {atoms.shape[1]}, the width of the noise atoms")
        return atoms[(seed // atoms.shape[0] ** (position - 1)) % atoms.shape[0]]

    return noise


def histogram(outputs: Tensor, size: int) -> Tensor:
    """int64 [size] * R: how often each joint output of outputs [C, R] occurs."""
    requests = outputs.shape[1]
    flat = torch.zeros(outputs.shape[0], dtype=torch.int64)
    for r in range(requests):
        flat = flat * size + outputs[:, r]
    return torch.bincount(flat, minlength=size**requests).view((size,) * requests)
