"""Worlds to verify in: random ones that cover what can happen, and small ones where exactness is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hspark.policy import LinearCost, StepCostTable
from hspark.sampling import SamplingMode, SamplingState, target_log_probs
from hspark.verify.exact import Sizing
from hspark.verify.world import World, tree_size

# (V, N, K, L, R) of random worlds. N > K + 1 everywhere: even after a model chain that is accepted whole and its bonus
# token, at least one token comes from a later step.
Shape = tuple[int, int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (3, 4, 2, 3, 1),
    (2, 5, 3, 4, 1),
    (2, 4, 2, 3, 2),
    (4, 3, 1, 2, 1),
    (3, 3, 1, 2, 2),
    (3, 4, 2, 1, 1),
    (2, 3, 1, 2, 3),
)


def random_world(seed: int, shape: Shape = SHAPES[0], *, greedy: bool = False) -> World:
    """A world drawn from `seed`, of shape (V, N, K, L, R). greedy: the target is at temperature 0.

    Target laws come from random logits through `target_log_probs` with a random temperature, top-k, top-p and min-p
    per request, so some tokens have no mass. Draft laws are anything between the target's own and an unrelated one,
    some with tokens missing. Confidences are near the true acceptance or arbitrary. The model-free chain after a
    prefix is absent, arbitrary, the model drafter's greedy path or a start of it, or that path and more (which the
    contains rule is about).
    """
    vocab, horizon, width, lookup, requests = shape
    generator = torch.Generator().manual_seed(seed)
    interior, drafts = tree_size(vocab, horizon - 1), tree_size(vocab, width - 1)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    target = _laws(
        normal(requests, interior, vocab) * (0.5 + 2 * uniform(requests, 1, 1)), uniform(4, requests), greedy
    )
    at = _draft_nodes(vocab, interior, drafts)
    near = target[:, at.clamp(max=interior - 1)]  # the target's law where each draft is verified
    closeness = uniform(requests, interior, 1, 1)
    closeness = torch.where(uniform(requests, interior, 1, 1) < 0.2, 1.0, closeness)
    other = (normal(requests, interior, drafts, vocab) * 1.5).softmax(-1)
    draft = closeness * near + (1 - closeness) * other
    missing = (uniform(requests, interior, drafts, vocab) < 0.15) & (draft < draft.amax(-1, keepdim=True))
    draft = draft.masked_fill(missing, 0.0)
    draft = draft / draft.sum(-1, keepdim=True)
    overlap = torch.minimum(near, draft).sum(-1)
    informed = uniform(requests, 1, 1) < 0.5
    confidence = torch.where(informed, overlap, uniform(requests, interior, drafts)).clamp(0.01, 0.99)
    full = uniform(requests, interior) < 0.8
    model_length = torch.where(full, width, (uniform(requests, interior) * (width + 1)).long())
    tokens, length = _free_chains(draft, width, lookup, uniform)
    acceptance = 0.3 + 0.69 * uniform(requests, interior, lookup)
    return World(horizon, target, draft, confidence, model_length, tokens, length, acceptance)


def busy_example(seed: int, shape: Shape = SHAPES[0], *, greedy: bool = False) -> tuple[World, Sizing]:
    """`random_world` with full chains everywhere and a budget for all of them at price 0.

    Every request that runs has slots verified in every step, those of one batch in the same step: what ties slots,
    steps or requests together that should be independent shows here.
    """
    world = random_world(seed, shape, greedy=greedy)
    world = replace(
        world,
        model_length=torch.full_like(world.model_length, world.model_width),
        free_length=torch.full_like(world.free_length, world.free_tokens.shape[2]),
    )
    return world, Sizing(budget=world.requests * world.width)


def _laws(logits: Tensor, draws: Tensor, greedy: bool) -> Tensor:
    """float64 laws [R, I, V] of logits [R, I, V], processed with parameters drawn per request (draws [4, R])."""
    requests, interior, vocab = logits.shape
    state = SamplingState.defaults(requests * interior)
    if not greedy:
        heat, k, p, m = (row.repeat_interleave(interior).float() for row in draws)
        state = state._replace(
            temperature=0.5 + heat,
            top_k=torch.where(k < 0.3, vocab - 1, 0),
            top_p=torch.where(p < 0.3, 0.6 + p, 1.0),
            min_p=torch.where(m < 0.3, m, 0.0),
        )
    flat = target_log_probs(logits.flatten(0, 1), state, SamplingMode(sampled=True, filters=True)).double().exp()
    return (flat / flat.sum(-1, keepdim=True)).view_as(logits)


def _draft_nodes(vocab: int, interior: int, drafts: int) -> Tensor:
    """int64 [I, J]: the node that output i and drafts j lead to, at least `interior` once the output is complete."""
    at = torch.zeros(interior, drafts, dtype=torch.int64)
    for j in range(drafts):
        before = at[:, (j - 1) // vocab] if j else torch.arange(interior)
        at[:, j] = torch.where(before < interior, before * vocab + 1 + (j - 1) % vocab, before) if j else before
    return at


def _free_chains(draft: Tensor, width: int, lookup: int, uniform: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Model-free tokens [R, I, L] and lengths [R, I], related to the model drafter's greedy path in all possible
    ways."""
    requests, interior, _, vocab = draft.shape
    tokens = (uniform(requests, interior, lookup) * vocab).long()
    path = torch.zeros(requests, interior, dtype=torch.int64)
    follow = uniform(requests, interior) < 0.6
    for slot in range(min(width, lookup)):
        law = draft.gather(2, path[..., None, None].expand(-1, -1, 1, vocab))[:, :, 0]
        best = law.argmax(-1)
        follow = follow & (uniform(requests, interior) < 0.9)
        tokens[..., slot] = torch.where(follow, best, tokens[..., slot])
        path = path * vocab + 1 + best
    kind = uniform(requests, interior)
    length = torch.where(
        kind < 0.25, 0, torch.where(kind < 0.65, lookup, 1 + (uniform(requests, interior) * lookup).long())
    )
    return tokens, length.clamp(max=lookup)


def random_sizing(seed: int, world: World, *, fresh: bool = False) -> Sizing:
    """A sizing for `world`, drawn from `seed`: a fixed budget and price, or sized one or two steps late over a cost.

    fresh: sized without delay over a staircase. (Over a straight cost, a slot is worth its place or not whatever the
    slots below it promise, so not even a fresh budget can look ahead; over a staircase, good late slots can pay for
    the stair.)
    """
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
    slots = world.requests * world.width
    price = draw[0]
    if not fresh and draw[1] < 0.5:
        return Sizing(budget=int(draw[2] * (slots + 1)), price=price)
    sizes = [world.requests + step for step in range(0, slots + 2, 2)]
    seconds = [1.0]
    for i in range(1, len(sizes)):
        seconds.append(seconds[-1] + 0.05 + (draw[3] if i % 2 else 0.2 * draw[4]))
    table = StepCostTable(sizes, seconds)
    if fresh:
        return Sizing(price=price, cost=table, delay=0)
    return Sizing(
        price=price, cost=table if draw[5] < 0.5 else LinearCost(1.0, 0.6 * draw[6]), delay=1 + int(draw[7] * 2)
    )


class LossyExample(NamedTuple):
    """A world where a combination of the table loses exactness, small enough to follow by hand.

    first_token: the law of the first token, worked out by hand in `story`. The target's is (1/2, 1/2).
    """

    cause: str
    policy: str
    world: World
    sizing: Sizing
    first_token: tuple[float, float]
    story: str


def lossy_examples() -> tuple[LossyExample, ...]:
    """One world per cause: the contains rule, the value rule, fresh sizing. Two tokens, sampled drafts, rejection
    verification.

    Target and draft law are (1/2, 1/2) everywhere, so a draft token that is verified without prejudice is always
    accepted.
    """
    later = (0.5, 0.9, 0.1)  # confidence in x_1, in x_2 after x_1 = 0, in x_2 after x_1 = 1
    return (
        LossyExample(
            "contains rule",
            "proposed",
            _fair_world((0.9,), free=(0, 0), free_acceptance=0.5),
            Sizing(budget=2, price=0.3),
            (0.25, 0.75),
            "The n-gram chain is 0 0, the model chain one token. Sampled 1: not contained, worth 0.9 - 0.3 = 0.6 "
            "against 0.5 - 0.3 = 0.2, kept, accepted: 1 is emitted. Sampled 0: contained, so the n-gram chain is "
            "kept, whose 0 is a point mass: accepted half of the time, else 1 is recovered. P(0) = 1/2 * 1/2 = 1/4.",
        ),
        LossyExample(
            "value rule",
            "proposed",
            _fair_world(later, free=(1,), free_acceptance=0.6),
            Sizing(budget=2, price=0.3),
            (0.75, 0.25),
            "The n-gram chain is 1, worth 0.6 - 0.3 = 0.3. A model chain that starts with 0 has survivals 0.5 0.45, "
            "worth 0.35: kept, its 0 accepted. One that starts with 1 has 0.5 0.05, worth 0.2: the n-gram chain is "
            "kept, its 1 accepted half of the time, else 0 is recovered. P(0) = 1/2 + 1/2 * 1/2 = 3/4.",
        ),
        LossyExample(
            "fresh sizing",
            "model_only",
            _fair_world(later, free=(), free_acceptance=0.5),
            Sizing(cost=StepCostTable([1, 3], [1.0, 1.6]), delay=0),
            (0.75, 0.25),
            "A step costs 1.0 without drafts and 1.6 with one or two. A chain that starts with 0 has survivals 0.5 "
            "0.45: two slots bring 1.95 / 1.6 > 1 / 1, verified, its 0 accepted. One that starts with 1 has 0.5 "
            "0.05: 1.55 / 1.6 < 1, nothing is verified, and the target's own token is 0 half of the time. P(0) = 1/2 "
            "+ 1/2 * 1/2 = 3/4.",
        ),
    )


def _fair_world(
    confidence: tuple[float, ...], free: tuple[int, ...], free_acceptance: float, horizon: int = 3
) -> World:
    """One request over two tokens, all laws (1/2, 1/2), the same confidences and the same model-free chain after any
    prefix."""
    interior, drafts = tree_size(2, horizon - 1), len(confidence)
    width = {tree_size(2, width - 1): width for width in range(1, 4)}[drafts]

    def everywhere(value: Tensor) -> Tensor:
        return value.expand(1, interior, *value.shape).clone()

    return World(
        horizon,
        target=torch.full((1, interior, 2), 0.5, dtype=torch.float64),
        draft=torch.full((1, interior, drafts, 2), 0.5, dtype=torch.float64),
        confidence=everywhere(torch.tensor(confidence, dtype=torch.float64)),
        model_length=torch.full((1, interior), width),
        free_tokens=everywhere(torch.tensor(free, dtype=torch.int64)),
        free_length=torch.full((1, interior), len(free)),
        free_acceptance=torch.full((1, interior, len(free)), free_acceptance, dtype=torch.float64),
    )


def returning_noise_example() -> tuple[World, Sizing]:
    """Where draft noise must not be keyed by the drafted position: the step's budget is sized one step late.

    Step 1 drafts x_1 x_2 x_3; x_1 is rejected two times out of five. Its survivals are worth three slots if x_2 = 0
    and none if x_2 = 1, and size step 2, which drafts position 2 again. With fresh noise that tells nothing of the
    new draft. With the same noise the
    new draft is x_2: verified, and accepted, just when it is 0.
    """
    confidence = (0.35, 0.95, 0.95, 0.97, 0.01, 0.97, 0.01)  # x_1; x_2 after 0, 1; x_3 after 0 0, 0 1, 1 0, 1 1
    world = _fair_world(confidence, free=(), free_acceptance=0.5)
    target = world.target.clone()
    target[0, 0] = torch.tensor([0.9, 0.1], dtype=torch.float64)
    return replace(world, target=target), Sizing(cost=StepCostTable([1, 4], [1.0, 1.7]), delay=1)
