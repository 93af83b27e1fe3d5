"""The interface of a verifier, and the registry behind `verifier(name)`."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hspark.core import Chain
from hspark.verify.layout import Layout


class Seeds(NamedTuple):
    """What a verifier's noise is a function of. seed: int64 [B]; anchor: int64 [B] position of the anchor token.

    Slot k of a row predicts the token at position anchor + 1 + k. An anchor position occurs in at most one step of a
    request, so (seed, anchor, slot) never repeats.
    """

    seed: Tensor
    anchor: Tensor


class Verdict(NamedTuple):
    """accepted: int64 [B] draft tokens accepted, 0..kept. token: int64 [B] the recovered or bonus token after them.

    emitted: int64 [T] the target's own token after each packed slot, from a verifier for which that is one token
    whatever was drafted; None from others.
    """

    accepted: Tensor
    token: Tensor
    emitted: Tensor | None = None


class Verifier(Protocol):
    """Accepts a prefix of each row's kept slots and draws the token after it (the specification, section 7).

    log_probs: float32 [T, V] the target's processed law of the token after each packed slot (`target_log_probs`).
    With `greedy=True` every running row is greedy and any monotone transform of the logits will do.
    layout: where each slot lies. chain: the drafts, [B, W]. kept: int64 [B] verified slots per row.
    A row of NaNs gives some valid token id; whoever computed the row reports it.

    A verifier may say `depends_on_drafts = False`: the tokens that it emits are a function of the seeds, whatever was
    drafted, so that any policy may read the drafts (`hspark.policy.lossy_reason`). One that does not say so is taken
    for one like rejection, whose tokens depend on the drafts though their law does not.
    """

    @property
    def name(self) -> str: ...

    def __call__(
        self, log_probs: Tensor, layout: Layout, chain: Chain, kept: Tensor, seeds: Seeds, *, greedy: bool = False
    ) -> Verdict: ...


def match_prefix(emitted: Tensor, layout: Layout, chain: Chain, kept: Tensor) -> Verdict:
    """The accept rule of a target whose token at every slot is already fixed: a draft token is kept iff it equals it.

    emitted: int64 [T], the target's own token after each packed slot. The rest as in `Verifier`.
    """
    by_slot = emitted[layout.index]  # [B, W + 1]
    agreed = (by_slot[:, :-1] == chain.tokens) & open_slots(chain, kept)
    accepted = count_prefix(agreed)
    return Verdict(accepted, by_slot.gather(1, accepted[:, None])[:, 0], emitted)


def open_slots(chain: Chain, kept: Tensor) -> Tensor:
    """bool [B, W]: slots that are verified, for kept int64 [B]. A count past the chain's own length is cut to it."""
    slot = torch.arange(chain.width, device=chain.tokens.device)
    return slot < torch.minimum(kept, chain.length)[:, None]


def count_prefix(accepted: Tensor) -> Tensor:
    """int64 [B]: how many leading slots of bool [B, W] are True."""
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def check_verifier(argument: str, value: Any) -> Verifier:
    """`value` if it looks like a `Verifier`; a ValueError that names the argument otherwise."""
    if isinstance(value, type):
        raise ValueError(f"{argument}={value.__name__} is a class; use an instance of it")
    if not callable(value) or not isinstance(getattr(value, "name", None), str):
        raise ValueError(
            f"{argument}={value!r} is not a verifier; use one of {', '.join(map(repr, _VERIFIERS))}, or a callable "
            "with a name, as in `hspark.verify.Verifier`"
        )
    return value  # type: ignore[no-any-return]


_VERIFIERS: dict[str, Verifier] = {}


def register(entry: Verifier) -> Verifier:
    """Adds a verifier under its own name. ValueError for a second one of that name, and for what is no verifier."""
    check_verifier("entry", entry)
    if entry.name in _VERIFIERS:
        raise ValueError(f"verifier name={entry.name!r} is taken; use a name other than {', '.join(verifier_names())}")
    _VERIFIERS[entry.name] = entry
    return entry


def verifier(name: str) -> Verifier:
    """The verifier called `name`; a ValueError that lists the names otherwise."""
    if name not in _VERIFIERS:
        raise ValueError(f"verify={name!r} is not a verifier; use one of {', '.join(verifier_names())}")
    return _VERIFIERS[name]


def verifier_names() -> tuple[str, ...]:
    """The names that `verifier` knows, in order of registration."""
    return tuple(_VERIFIERS)
