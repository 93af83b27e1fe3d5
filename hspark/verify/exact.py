"""The exact law of what speculative decoding emits, in float64, by enumerating everything that is random.

One step of one request, its chain x_1..x_k being given, is a walk (`outcomes`). At slot j the draft token is accepted
with probability alpha_j; with 1 - alpha_j the walk ends in a token drawn from the residual r_j; behind the last
slot it ends in a bonus token drawn from the target:

    P(x_1..x_j, y) = alpha_1 .. alpha_j (1 - alpha_{j+1}) r_{j+1}(y)      P(x_1..x_k, y) = alpha_1 .. alpha_k target(y)

Rejection sampling picks alpha and r so that the draft cancels out: summed over x_1 drawn from the draft law, the
first token follows the target. But the sum is over *all* x_1. If the decision to verify slot 1 looks at x_1, the sum
misses some terms, nothing cancels any more, and the output is biased although every single step of the algorithm is
right. So the enumeration must contain the decisions too (`exact_distribution`): for every state of the batch, every
combination of the drafts that the requests may sample, the policy, the budget, the allocation over the requests, and
the walk of each. No sampling, no tolerance but rounding: a law that is kept comes out within 1e-12, and one that is
not does not.

The policy, the sizing and the allocation are the real ones of `hspark.policy`. The accept rule is a `Rule`, the
float64 counterpart of a verifier; `sampled` and `suite` tie the two together.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hspark.policy import CostModel, Policy, allocate, choose_budget
from hspark.verify.rule import Rule, outcomes
from hspark.verify.world import World

Allocator = Callable[[Tensor, Tensor, Tensor], Tensor]


def allocate_many(allocator: Allocator, survival: Tensor, length: Tensor, budget: Tensor) -> Tensor:
    """Runs the allocation of G batches at once: survival [G, R, W], length [G, R], budget int64 [G]; returns [G, R]."""
    packed = torch.cat(
        [survival.double(), length[..., None].double(), budget[:, None, None].expand(*length.shape, 1)], 2
    )
    packed, back = packed.unique(dim=0, return_inverse=True)
    with warnings.catch_warnings():  # operators without a batching rule work, one batch at a time
        warnings.filterwarnings("ignore", message="There is a performance drop")
        kept = torch.vmap(allocator)(packed[..., :-2].float(), packed[..., -2].long(), packed[:, 0, -1].long())
    return kept[back]


@dataclass(frozen=True)
class Sizing:
    """Where the budget and the price of a step come from.

    Without `cost`: always `budget` slots at `price`. With `cost`: sized by `choose_budget` from survivals that are
    `delay` steps old; until there are such, every slot counts as survival 1. With delay 0 (fresh) the budget reads
    the survivals of the very step that it sizes; the price, which is needed before the chains are chosen, is then
    `price`.
    """

    budget: int = 0
    price: float = 0.0
    cost: CostModel | None = None
    delay: int = 2

    def decide(self, survival: Tensor, running: int) -> Decision:
        """From survival [R, W] of `running` requests (0 in slots that do not exist)."""
        if self.cost is None or running == 0:
            return Decision(self.budget, self.price)
        decision = choose_budget(survival, running, self.cost)
        return Decision(decision.budget, decision.price)


class Decision(NamedTuple):
    budget: int
    price: float


class DraftTable(NamedTuple):
    """All that may be drafted at one price, for R requests, I interior nodes and D combinations of draft tokens.

    weight: float64 [R, I, D], probability of the drafts.
    survival: float32 [R, I, D, W] and length: int64 [R, I, D], of the chain that the policy keeps.
    outcome: float64 [R, I, D, W + 1, nodes], law of the step per number of verified slots.
    """

    weight: np.ndarray
    survival: Tensor
    length: Tensor
    outcome: np.ndarray


def draft_table(world: World, policy: Policy, drafting: str, price: float, rule: Rule) -> DraftTable:
    """Enumerates every draft of every request after every output, and what the policy makes of it at this price."""
    width, vocab, sampled = world.model_width, world.vocab_size, drafting == "probabilistic"
    drafts = list(itertools.product(range(vocab), repeat=width))  # of width 0 there is one, the empty draft
    combos = torch.tensor(drafts, dtype=torch.int64).view(len(drafts), width)
    shape = (world.requests, world.interior, len(combos) if sampled else 1)
    request, node, combo = (x.reshape(-1) for x in torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij"))
    drafted = combos[combo].clone()
    weight = torch.ones(request.shape[0], dtype=torch.float64)
    path = torch.zeros_like(node)
    for slot in range(width):
        law = world.draft_law(request, node, path)
        if sampled:
            weight = weight * law.gather(1, drafted[:, slot, None])[:, 0]
        else:
            drafted[:, slot] = law.argmax(1)
        path = path * vocab + 1 + drafted[:, slot]
    model = world.model_chain(request, node, drafted, sampled)
    chain = policy(model, world.free_chain(request, node), price)
    outcome = outcomes(world, request, node, chain, rule)
    return DraftTable(
        weight.view(shape).numpy(),
        chain.survival.view(*shape, chain.width),
        chain.length.view(shape),
        outcome.view(*shape, chain.width + 1, world.nodes).numpy(),
    )


def exact_distribution(
    world: World,
    policy: Policy,
    *,
    drafting: str = "greedy",
    sizing: Sizing | None = None,
    rule: Rule | None = None,
    allocator: Allocator = allocate,
    steps: int | None = None,
) -> Tensor:
    """The joint law of the next N tokens of all R requests, float64 [V^N] * R; compare with `target_distribution`.

    world: the requests. policy, sizing, allocator: the decisions. drafting: "greedy" or "probabilistic".
    rule: how slots are accepted; the default is the exact one, which both verifiers follow for drafts that do not
    look at the verifier's noise.
    steps: the number of steps that speculate, all that are needed by default; what is missing is decoded plainly.

    The work grows with (V^N)^R and V^(K R): V = 3, N = 4, K = 2 and R = 2 take a second.
    """
    if drafting not in ("greedy", "probabilistic"):
        raise ValueError(f"drafting={drafting!r} is unknown; use 'greedy' or 'probabilistic'")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
        raise ValueError(f"steps={steps!r} is not usable; use an integer of at least 0, or None for all steps")
    if not 1 <= world.requests <= 3:
        raise ValueError(f"world has {world.requests} requests; use 1 to 3, the enumeration grows too fast beyond")
    run = _Enumeration(world, policy, drafting, sizing or Sizing(), rule or Rule(), allocator)
    return run.law(world.horizon if steps is None else steps)


class _Enumeration:
    """Walks the batch from state to state: a node per request, and the decisions already taken for later steps."""

    def __init__(
        self, world: World, policy: Policy, drafting: str, sizing: Sizing, rule: Rule, allocator: Allocator
    ) -> None:
        self.world, self.policy, self.drafting = world, policy, drafting
        self.sizing, self.rule, self.allocator = sizing, rule, allocator
        self.delay = sizing.delay if sizing.cost is not None else 0
        self._tables: dict[float, DraftTable] = {}

    def law(self, steps: int) -> Tensor:
        world = self.world
        full = self.sizing.decide(torch.ones(world.requests, world.width), world.requests)
        masses = {(full,) * self.delay: np.zeros((world.nodes,) * world.requests)}
        next(iter(masses.values()))[(0,) * world.requests] = 1.0
        for _ in range(steps):
            masses = self._step(masses)
        return torch.from_numpy(self._complete(sum(masses.values())))  # type: ignore[arg-type]

    def _step(self, masses: dict[tuple[Decision, ...], np.ndarray]) -> dict[tuple[Decision, ...], np.ndarray]:
        after: dict[tuple[Decision, ...], np.ndarray] = {}
        for queue, mass in masses.items():
            going = np.argwhere(mass > 0)
            done = (going >= self.world.interior).all(1)
            for state in map(tuple, going[done]):
                _add(after, queue, mass.shape)[state] += mass[state]
            states = going[~done]
            if len(states):
                decision = queue[0] if queue else Decision(self.sizing.budget, self.sizing.price)
                self._expand(states, mass, decision, queue, after)
        return after

    def _expand(self, states: np.ndarray, mass: np.ndarray, decision: Decision, queue: tuple, after: dict) -> None:
        """Adds to `after` where the states [S, R] lead. C = D^R joint drafts of the requests."""
        table = self._table(decision.price)
        drafts = np.indices((table.weight.shape[2],) * self.world.requests).reshape(self.world.requests, -1).T  # [C, R]
        requests = np.arange(self.world.requests)
        inside = states < self.world.interior
        inner = np.where(inside, states, 0)
        # [S, C, R]: a finished request drafts nothing; its first draft stands for all of them
        weight = table.weight[requests, inner[:, None], drafts]
        weight = np.where(inside[:, None], weight, drafts == 0).prod(-1)
        pick = (torch.from_numpy(requests), torch.from_numpy(inner)[:, None], torch.from_numpy(drafts))
        length = torch.where(torch.from_numpy(inside)[:, None], table.length[pick], 0)
        survival = torch.where(length[..., None] > 0, table.survival[pick], 0.0)
        running = inside.sum(1)
        decisions = self._decisions(survival, running) if self.sizing.cost is not None else None
        budget = torch.full(length.shape[:2], decision.budget)
        if decisions is not None and self.delay == 0:
            budget = torch.tensor([[d.budget for d in row] for row in decisions])
        kept = allocate_many(self.allocator, survival.flatten(0, 1), length.flatten(0, 1), budget.flatten())
        counts = kept.view(length.shape).numpy()
        for s, state in enumerate(states):
            groups = _groups(decisions[s]) if decisions is not None and self.delay else {None: np.arange(len(drafts))}
            for later, members in groups.items():
                chosen = members[weight[s][members] > 0]
                if len(chosen):
                    law = self._joint(table, state, drafts[chosen], counts[s, chosen], weight[s, chosen])
                    key = queue if later is None else (*queue[1:], later)
                    _add(after, key, mass.shape)[...] += mass[tuple(state)] * law

    def _joint(
        self, table: DraftTable, state: np.ndarray, drafts: np.ndarray, kept: np.ndarray, weight: np.ndarray
    ) -> np.ndarray:
        """[nodes] * R: given their drafts [C, R] and counts [C, R], the requests walk independently."""
        laws = []
        for r, node in enumerate(state):
            if node < self.world.interior:
                laws.append(table.outcome[r, node, drafts[:, r], kept[:, r]])
            else:
                laws.append(np.broadcast_to(np.eye(1, self.world.nodes, node), (len(drafts), self.world.nodes)))
        laws[0] = laws[0] * weight[:, None]
        if len(laws) == 2:
            return laws[0].T @ laws[1]
        return np.einsum(",".join("c" + x for x in "xyz"[: len(laws)]) + "->" + "xyz"[: len(laws)], *laws)

    def _decisions(self, survival: Tensor, running: np.ndarray) -> list[list[Decision]]:
        """What each joint draft [S, C] leads to for the step that is sized from it; equal survivals are sized once."""
        known: dict[tuple[bytes, int], Decision] = {}
        rows = []
        for s in range(survival.shape[0]):
            row = []
            for c in range(survival.shape[1]):
                key = (survival[s, c].numpy().tobytes(), int(running[s]))
                if key not in known:
                    known[key] = self.sizing.decide(survival[s, c], int(running[s]))
                row.append(known[key])
            rows.append(row)
        return rows

    def _table(self, price: float) -> DraftTable:
        if price not in self._tables:
            self._tables[price] = draft_table(self.world, self.policy, self.drafting, price, self.rule)
        return self._tables[price]

    def _complete(self, mass: np.ndarray) -> np.ndarray:
        """Decodes plainly what is not complete, request by request, from short outputs to long ones."""
        world = self.world
        for r in range(world.requests):
            mass = np.moveaxis(mass, r, 0).copy()
            for node in range(world.interior):
                law = world.target[r, node].numpy().reshape(-1, *(1,) * (mass.ndim - 1))
                first = node * world.vocab_size + 1
                mass[first : first + world.vocab_size] += law * mass[node]
            mass = np.moveaxis(mass[world.interior :], 0, r)
        return mass


def _add(
    masses: dict[tuple[Decision, ...], np.ndarray], key: tuple[Decision, ...], shape: tuple[int, ...]
) -> np.ndarray:
    return masses.setdefault(key, np.zeros(shape))


def _groups(decisions: list[Decision]) -> dict[Decision | None, np.ndarray]:
    """The joint drafts by the decision they lead to."""
    groups: dict[Decision | None, list[int]] = {}
    for index, decision in enumerate(decisions):
        groups.setdefault(decision, []).append(index)
    return {decision: np.array(members) for decision, members in groups.items()}
