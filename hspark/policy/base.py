"""The interface of a chain policy, the registry behind `policy(name)`, and the refusal of what would lose exactness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from hspark.core import Chain
from hspark.sampling import GREEDY_TEMPERATURE

DRAFTING_MODES = ("greedy", "probabilistic")
VERIFY_MODES = ("coupled", "rejection")


@runtime_checkable
class Policy(Protocol):
    """Keeps one chain per request (the paper, section 4.3).

    Called with model_chain [B, K], free_chain [B, L] and the price of a slot (a float or a 0-dim tensor, expected
    tokens per slot), it returns a chain [B, W], W = max(K, L), with `source` and `reason` filled. The result is a chain
    like any other and can be the first argument of the next call, which is how a third drafter joins: `choose_chain`.

    name: its name in the registry. needs_model, needs_free: which drafters it uses; the chain of a drafter that is not
    needed is never read beyond its shape, `Chain.empty(B, 0)` will do.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_model(self) -> bool: ...

    @property
    def needs_free(self) -> bool: ...

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain: ...

    def is_lossless(self, drafting: str, verify: str, temperature: float) -> bool: ...


@dataclass(frozen=True)
class ChainPolicy:
    """What the policies of this package share. Fields of a subclass are its options.

    reads_samples: whether what it decides about some slot of the model chain can depend on the token sampled in that
    slot or on later ones, directly (contains rule) or through confidences computed from them (value rule).
    """

    name: ClassVar[str]
    needs_model: ClassVar[bool] = True
    needs_free: ClassVar[bool] = True
    reads_samples: ClassVar[bool] = False

    def is_lossless(self, drafting: str, verify: str, temperature: float) -> bool:
        """Whether the output keeps the target's distribution exactly (the paper, table 9, and the coupled column).

        drafting: "greedy" or "probabilistic". verify: "coupled" or "rejection". temperature: the request's.

        Only one kind of combination loses exactness: sampled drafts, verified against their draft law, chosen by a
        policy whose decision on a slot reads the token sampled there. Greedy drafts are functions of the context alone,
        and coupled verification emits the same tokens whatever was drafted.
        """
        check_mode("drafting", drafting, DRAFTING_MODES)
        check_mode("verify", verify, VERIFY_MODES)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature >= 0:
            raise ValueError(f"temperature={temperature!r} is not usable; use a number of at least 0")
        if temperature <= GREEDY_TEMPERATURE or drafting == "greedy" or verify == "coupled":
            return True
        return not self.reads_samples


def check_mode(name: str, value: Any, accepted: tuple[str, ...]) -> str:
    """`value` if it is one of `accepted`; a ValueError that lists them otherwise."""
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, accepted))}")
    return value


_REGISTRY: dict[str, Callable[..., Policy]] = {}
Made = TypeVar("Made", bound=Callable[..., Any])


def register(factory: Made) -> Made:
    """Makes a policy available by its `name`; usable as a class decorator, also outside this package."""
    if isinstance(factory, Policy) and not isinstance(factory, type):
        raise ValueError(f"factory={factory!r} is a policy; register its class, which `policy` calls with the options")
    name = factory.name  # type: ignore[attr-defined]
    if name in _REGISTRY:
        raise ValueError(f"a policy named {name!r} is registered already; use another name")
    _REGISTRY[name] = factory
    return factory


def policy_names() -> tuple[str, ...]:
    """The names that `policy` accepts."""
    return tuple(_REGISTRY)


def policy(name: str, **options: Any) -> Policy:
    """The policy called `name`, with its options. ValueError for an unknown name or option, listing the valid ones."""
    if name not in _REGISTRY:
        raise ValueError(f"policy={name!r} is unknown; use one of {', '.join(map(repr, _REGISTRY))}")
    factory = _REGISTRY[name]
    known = [field.name for field in fields(factory)] if is_dataclass(factory) else list(options)
    for option in options:
        if option not in known:
            accepted = f"use {', '.join(map(repr, known))}" if known else "it takes no options"
            raise ValueError(f"policy {name!r} has no option {option!r}; {accepted}")
    return factory(**options)


class LossyCombinationError(ValueError):
    """A combination of policy, drafting, verification and sizing that does not preserve the target's distribution."""


class NamedVerifier(Protocol):
    """What is read of a verifier here: its name and, if it has that attribute, `depends_on_drafts`."""

    @property
    def name(self) -> str: ...


def _column(verify: str | NamedVerifier) -> tuple[str, str]:
    """The column of the table of what is lossless that a verifier belongs to, one of VERIFY_MODES, and its name.

    Verifiers of other authors belong with rejection unless they say that no draft changes what they emit; a name
    alone says nothing.
    """
    if isinstance(verify, str):
        return verify if verify in VERIFY_MODES else "rejection", verify
    return "rejection" if getattr(verify, "depends_on_drafts", True) else "coupled", verify.name


def lossy_reason(
    policy: Policy, drafting: str, verify: str | NamedVerifier, budget_delay: int, *, budget: str | int = "adaptive"
) -> str | None:
    """Why this combination would lose exactness at a temperature above 0, and the ways out; None if it would not.

    verify: a verifier, or the name of one. Any but "coupled" is judged like rejection, unless it is an object that says
    `depends_on_drafts = False`.
    budget_delay: steps between the survivals that a budget is chosen from and the step it sizes; 0 is fresh sizing.
    budget: "adaptive", or "all" or a number, which read no survivals.
    """
    if isinstance(budget_delay, bool) or not isinstance(budget_delay, int) or budget_delay < 0:
        raise ValueError(f"budget_delay={budget_delay!r} is not usable; use an integer of at least 0")
    ways = 'use drafting="greedy", verify="coupled"'
    column, name = _column(verify)
    if not policy.is_lossless(drafting, column, 1.0):
        exact = [known for known in ("ngram_first", "extension") if known != policy.name]
        return (
            f'policy={policy.name!r} with drafting="probabilistic" and verify="{name}" changes the output '
            "distribution above temperature 0: whether a sampled draft token is verified must not depend on that "
            "token, but this policy compares chains by the sampled tokens or by confidences computed from them. "
            f"Ways out: {ways}, or a policy that does not read samples ({', '.join(exact)}); "
            "allow_lossy=True runs it for study and marks the outputs."
        )
    sampled = policy.needs_model and drafting == "probabilistic" and column == "rejection"
    if sampled and budget_delay == 0 and budget == "adaptive":
        return (
            f'budget_delay=0 with drafting="probabilistic" and verify="{name}" changes the output distribution above '
            "temperature 0: a budget chosen from this step's survivals depends on this step's sampled tokens, and so "
            "would the choice of the slots that are verified. "
            f'Ways out: budget_delay of at least 1 (2 is usual), {ways}, or a fixed budget (a number or "all"); '
            "allow_lossy=True runs it for study and marks the outputs."
        )
    return None


def refuse_if_lossy(
    policy: Policy,
    drafting: str,
    verify: str | NamedVerifier,
    budget_delay: int,
    *,
    budget: str | int = "adaptive",
    temperature_positive: bool = True,
) -> None:
    """Raises LossyCombinationError with the words of `lossy_reason`; does nothing where exactness is kept.

    temperature_positive: False for a request (or an engine) that is greedy, where any draft only changes speed.
    """
    reason = lossy_reason(policy, drafting, verify, budget_delay, budget=budget)
    if reason is not None and temperature_positive:
        raise LossyCombinationError(reason)
