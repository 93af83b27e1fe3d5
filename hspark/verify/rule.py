"""The accept rule in float64, and the law of one step that follows from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hspark.core import Chain
from hspark.verify.world import World


class Slot(NamedTuple):
    """One verified slot in M walks. target, draft: float64 [M, V]; token: int64 [M]; point_mass: bool [M]."""

    target: Tensor
    draft: Tensor
    token: Tensor
    point_mass: Tensor


class Rule:
    """The accept rule of the specification, section 7, in float64; wrong rules are its subclasses (`controls`)."""

    def accept(self, slot: Slot) -> Tensor:
        """float64 [M]: the probability that the slot's draft token is accepted."""
        target = slot.target.gather(1, slot.token[:, None])[:, 0]
        draft = slot.draft.gather(1, slot.token[:, None])[:, 0]
        return torch.where(slot.point_mass, target, (target / draft).nan_to_num(nan=0.0).clamp(max=1.0))

    def residual(self, slot: Slot) -> Tensor:
        """float64 [M, V]: the law of the token that is recovered after a rejection."""
        without = slot.target.scatter(1, slot.token[:, None], 0.0)
        excess = (slot.target - slot.draft).clamp(min=0.0)
        return normalised(torch.where(slot.point_mass[:, None], without, excess), slot.target)

    def bonus(self, laws: list[Tensor]) -> Tensor:
        """float64 [M, V]: the law of the token after a fully accepted chain; laws: the target's at slots 0..kept."""
        return laws[-1]


def normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """`mass` [M, V] divided by its sum; rows without mass are `fallback`."""
    total = mass.sum(1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), fallback)


def outcomes(world: World, request: Tensor, node: Tensor, chain: Chain, rule: Rule) -> Tensor:
    """The law of one step of M requests, for every number of verified slots.

    request, node: int64 [M]. chain: [M, W]. Returns float64 [M, W + 1, nodes]: entry (m, k) is the law of the node
    where request m is after a step that verified the first k slots of its chain. Tokens past the horizon drop out.
    """
    rows = torch.arange(node.shape[0])
    table = torch.zeros(node.shape[0], chain.width + 1, world.nodes, dtype=torch.float64)
    ended = torch.zeros(node.shape[0], world.nodes, dtype=torch.float64)  # mass of the walks that ended in a recovery
    reach = torch.ones(node.shape[0], dtype=torch.float64)  # mass of the walk that is still going on
    laws: list[Tensor] = []

    def spread(mass: Tensor, law: Tensor, at: Tensor) -> Tensor:
        """`mass` [M] at nodes `at` [M], moved on by one token of `law` [M, V]: float64 [M, nodes]."""
        children = world.child(at[:, None], torch.arange(world.vocab_size))
        return torch.zeros_like(ended).scatter_add_(1, children, mass[:, None] * law)

    for k in range(chain.width + 1):
        laws.append(world.next_law(request, node))
        table[:, k] = ended + spread(reach, rule.bonus(laws), node)
        if k == chain.width:
            break
        slot = Slot(laws[-1], _draft_law(chain, k, laws[-1]), chain.tokens[:, k], chain.point_mass[rows, k])
        accept = torch.where(node < world.interior, rule.accept(slot), 1.0)  # past the horizon nothing can be rejected
        ended = ended + spread(reach * (1 - accept), rule.residual(slot), node)
        reach = reach * accept
        node = world.child(node, slot.token)
    return table


def _draft_law(chain: Chain, k: int, like: Tensor) -> Tensor:
    if chain.log_probs is None or k >= chain.log_probs.shape[1]:
        return torch.zeros_like(like)
    return chain.log_probs[:, k].double().exp()
