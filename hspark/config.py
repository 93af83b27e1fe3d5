"""Frozen, validated settings: what a user may ask of one request, and how an engine is built."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from hspark.sampling import GREEDY_TEMPERATURE, SamplingMode

T = TypeVar("T")


# Whole numbers end up in tensors of 64 bits, some of them added to others.
LARGEST = 2**31 - 1


def _number(name: str, value: Any, low: float, high: float, accepted: str, *, open_low: bool = False) -> float:
    """`value` as a float within [low, high] (or (low, high]); a ValueError that names it otherwise."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if number != number:
        raise ValueError(f"{name}={value!r} is not a number; use {accepted}")
    if not low <= number <= high or (open_low and number == low):
        raise ValueError(f"{name}={value!r} is out of range; use {accepted}")
    return float(number)


def _integer(name: str, value: Any, low: int, accepted: str, high: int = LARGEST) -> int:
    """`value` as an int within [low, high]; a ValueError that names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r} is not an integer; use {accepted}")
    number = int(value)
    if not low <= number <= high:
        beyond = f", up to {high}" if number > high == LARGEST else ""
        raise ValueError(f"{name}={value!r} is out of range; use {accepted}{beyond}")
    return number


class UnknownParameterError(ValueError, TypeError):
    """A parameter that does not exist; a TypeError too, as it is for every other Python class."""


def _refuses_unknown(cls: type[T]) -> type[T]:
    """Makes a dataclass name its fields when it is given another one."""
    made: Any = cls.__init__
    known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    @functools.wraps(made)
    def init(self: T, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise UnknownParameterError(f"{name}={values[name]!r} is not a parameter; use {', '.join(known)}")
        made(self, *args, **values)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


@_refuses_unknown
@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Values are checked when the object is made.

    max_new_tokens: at least 1; exactly this many tokens are returned unless a stop comes first, or prompt and output
    together reach the speculator's max_length, where the output is cut with finish reason "length".
    temperature: 0 is greedy (so is anything up to 1e-5).
    top_k (0 = off), top_p in (0, 1], min_p in [0, 1]: filters, in that order.
    repetition_penalty (at least 0.0001), presence_penalty, frequency_penalty: defined as by OpenAI and Hugging Face.
    logit_bias: {token id: added to its logit}; -100 bans, +100 forces.
    stop: strings that end the output; the text is cut before the first one found.
    stop_token_ids: ids that end the output, beside the model's own; the stop token is the last of `token_ids`.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    seed: noise seed. None draws a fresh one for every request; equal seeds give equal outputs for equal prompts.
    logprobs: return the target's log-probability of every output token (before temperature, penalties, filters).
    speculate: False decodes this request plainly, beside others that speculate.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = False
    speculate: bool = True

    def __post_init__(self) -> None:
        def fix(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        fix("max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, 1, "an integer of at least 1"))
        fix("temperature", _number("temperature", self.temperature, 0.0, 1e4, "a number from 0 (greedy) to 10000"))
        fix("top_k", _integer("top_k", self.top_k, 0, "an integer of at least 0 (0 = off)"))
        fix("top_p", _number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and up to 1 (1 = off)", open_low=True))
        fix("min_p", _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 (off) to 1"))
        accepted = "a number from 0.0001 to 10000 (1 = off)"
        fix("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 1e-4, 1e4, accepted))
        for name in ("presence_penalty", "frequency_penalty"):
            fix(name, _number(name, getattr(self, name), -1e4, 1e4, "a number from -10000 to 10000 (0 = off)"))
        fix("stop", self._check_stop(self.stop))
        fix("stop_token_ids", self._check_ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            fix("logit_bias", self._check_bias(self.logit_bias))
        if self.seed is not None:
            fix("seed", _integer("seed", self.seed, 0, "an integer from 0 to 2**63 - 1, or None", 2**63 - 1))
        for name in ("ignore_eos", "logprobs", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool; use True or False")

    @staticmethod
    def _check_stop(stop: Any) -> tuple[str, ...]:
        if stop is None:  # as other libraries write it
            return ()
        if not isinstance(stop, Iterable):
            raise ValueError(f"stop={stop!r} is not usable; use a string or a list of strings")
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop={stop!r} holds {string!r}; use non-empty strings")
        return strings

    @staticmethod
    def _check_ids(name: str, ids: Any) -> tuple[int, ...]:
        if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable):
            raise ValueError(f"{name}={ids!r} is not a list; use a list of token ids")
        return tuple(_integer(name, i, 0, "token ids of at least 0") for i in ids)

    @staticmethod
    def _check_bias(bias: Any) -> dict[int, float]:
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias={bias!r} is not a mapping; use {{token id: number}}")
        accepted = "{token id: number from -10000 to 10000}"
        return {
            _integer("logit_bias", token, 0, accepted): _number("logit_bias", value, -1e4, 1e4, accepted)
            for token, value in bias.items()
        }

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def mode(self) -> SamplingMode:
        """The static flags that this request needs."""
        return SamplingMode(
            sampled=not self.greedy,
            filters=not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0),
            penalties=self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0,
            bias=bool(self.logit_bias),
        )


# Steps between survivals and the step that they size, where the device runs ahead of the host (the paper, appendix O).
PAPER_DELAY = 2


@_refuses_unknown
@dataclass(frozen=True)
class EngineConfig:
    """How a speculator decodes. Names of policies and verifiers are checked where they are looked up.

    policy: which chain each request keeps. budget: "adaptive", "all", or draft slots verified per step over the whole
    batch. drafting: "greedy" or "probabilistic" model drafts. verify: "coupled" or "rejection".
    budget_delay: steps between survivals and the step that they size. None: 0, fresh, where the host is the device and
    exactness allows it, since nothing has to wait there; else 2, as in the paper.
    max_batch_size: requests decoded at once; more are queued. max_length: tokens of prompt and output together.
    prefill_tokens: prompt tokens processed between two decode steps. run_ahead: steps enqueued before the oldest one
    is read; None for 0 where the host is the device and 1 elsewhere. compile: "step" compiles the whole device
    step, with a CUDA graph for each padded size where there is CUDA; True does that on an accelerator, and on a CPU
    compiles the target's layers; "auto" and False compile nothing. allow_lossy: run combinations that
    change the output distribution, for study; their outputs are marked.
    """

    policy: Any = "proposed"
    budget: str | int = "adaptive"
    drafting: str = "greedy"
    verify: Any = "coupled"
    budget_delay: int | None = None
    max_batch_size: int = 4
    max_length: int = 2048
    prefill_tokens: int = 1024
    run_ahead: int | None = None
    compile: str | bool = "auto"
    allow_lossy: bool = False

    def __post_init__(self) -> None:
        def whole(name: str, low: int, accepted: str) -> None:
            object.__setattr__(self, name, _integer(name, getattr(self, name), low, accepted))

        if isinstance(self.budget, str) and self.budget not in ("adaptive", "all"):
            raise ValueError(f"budget={self.budget!r} is unknown; use 'adaptive', 'all', or an integer of at least 0")
        if not isinstance(self.budget, str):
            whole("budget", 0, "'adaptive', 'all', or an integer of at least 0")
        if self.drafting not in ("greedy", "probabilistic"):
            raise ValueError(f"drafting={self.drafting!r} is unknown; use 'greedy' or 'probabilistic'")
        if self.budget_delay is not None:
            whole("budget_delay", 0, "an integer of at least 0 (2 is the paper's), or None")
        whole("max_batch_size", 1, "an integer of at least 1")
        whole("max_length", 2, "an integer of at least 2 tokens")
        whole("prefill_tokens", 1, "an integer of at least 1")
        if self.run_ahead is not None:
            whole("run_ahead", 0, "an integer of at least 0, or None")
            delay = PAPER_DELAY if self.budget_delay is None else self.budget_delay
            if self.budget == "adaptive" and 0 < delay <= self.run_ahead:  # fresh sizing waits for its own step
                raise ValueError(
                    f"budget_delay={delay} needs survivals that run_ahead={self.run_ahead} has not read "
                    f"yet; use a budget_delay above {self.run_ahead}"
                )
        if not (isinstance(self.compile, bool) or self.compile in ("auto", "step")):
            raise ValueError(f"compile={self.compile!r} is unknown; use 'auto', True, False or 'step'")
        if not isinstance(self.allow_lossy, bool):
            raise ValueError(f"allow_lossy={self.allow_lossy!r} is not a bool; use True or False")
