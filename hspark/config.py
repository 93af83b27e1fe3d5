"""Frozen, validated settings: what a user may ask of one request, and how an engine is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hspark.sampling import GREEDY_TEMPERATURE, SamplingMode


def _number(name: str, value: Any, low: float, high: float, accepted: str, *, open_low: bool = False) -> float:
    """`value` as a float within [low, high] (or (low, high]); a ValueError that names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name}={value!r} is not a number; use {accepted}")
    if value < low or value > high or (open_low and value == low):
        raise ValueError(f"{name}={value!r} is out of range; use {accepted}")
    return float(value)


def _integer(name: str, value: Any, low: int, accepted: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is not an integer; use {accepted}")
    if value < low:
        raise ValueError(f"{name}={value!r} is out of range; use {accepted}")
    return value


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Values are checked when the object is made.

    max_new_tokens: at least 1; exactly this many tokens are returned unless a stop comes first.
    temperature: 0 is greedy (so is anything up to 1e-5).
    top_k (0 = off), top_p in (0, 1], min_p in [0, 1]: filters, in that order.
    repetition_penalty > 0, presence_penalty, frequency_penalty: as in the OpenAI and Hugging Face definitions.
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

        _integer("max_new_tokens", self.max_new_tokens, 1, "an integer of at least 1")
        fix("temperature", _number("temperature", self.temperature, 0.0, 1e4, "a number from 0 (greedy) to 10000"))
        _integer("top_k", self.top_k, 0, "an integer of at least 0 (0 = off)")
        fix("top_p", _number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and up to 1 (1 = off)", open_low=True))
        fix("min_p", _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 (off) to 1"))
        fix(
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, 0.0, 1e4, "a number above 0 (1 = off)", open_low=True),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            fix(name, _number(name, getattr(self, name), -1e4, 1e4, "a number from -10000 to 10000 (0 = off)"))
        fix("stop", self._check_stop(self.stop))
        fix("stop_token_ids", self._check_ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            fix("logit_bias", self._check_bias(self.logit_bias))
        if self.seed is not None:
            _integer("seed", self.seed, 0, "an integer from 0 to 2**63 - 1, or None")
            if self.seed >= 2**63:
                raise ValueError(f"seed={self.seed!r} is out of range; use an integer from 0 to 2**63 - 1, or None")
        for name in ("ignore_eos", "logprobs", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool; use True or False")

    @staticmethod
    def _check_stop(stop: Any) -> tuple[str, ...]:
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop={stop!r} holds {string!r}; use non-empty strings")
        return strings

    @staticmethod
    def _check_ids(name: str, ids: Any) -> tuple[int, ...]:
        if isinstance(ids, int | str):
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
