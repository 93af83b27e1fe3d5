"""Plain decoding, one token at a time, without cache, batch or drafts: what every engine output is compared with.

Written apart from the engine on purpose: from the definitions, in float64, sharing nothing but the noise. A *law* is a
target reduced to one function: the tokens so far -> logits [V] of the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hspark.config import SamplingParams
from hspark.sampling import gumbel_noise
from tests.tiny import plain_logits

Law = Callable[[tuple[int, ...]], Tensor]


class Plain(NamedTuple):
    """ids of the output; why it ended; the law's own log-probability of each token; text as far as it is shown."""

    ids: list[int]
    finish_reason: str
    logprobs: list[float]
    text: str | None


def plain_decode(
    law: Law,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Sequence[int] = (),
    max_length: int = 10**6,
    decode: Callable[[list[int]], str] | None = None,
) -> Plain:
    """Decodes one request. A prompt and output that reach max_length end with "length"; NaN logits with "error"."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    output: list[int] = []
    logprobs: list[float] = []
    text = None if decode is None else ""
    while True:
        logits = law((*prompt, *output)).float()
        if logits.isnan().any():
            return Plain(output, "error", logprobs, text)
        token = next_token(logits, prompt, output, params)
        output.append(token)
        logprobs.append(float(logits.double().log_softmax(dim=0)[token]))
        stopped = token in stops
        if decode is not None:
            text = decode(output)
            found = [at for stop in params.stop if (at := text.find(stop)) >= 0]
            if found and not stopped:
                return Plain(output, "stop", logprobs, text[: min(found)])
        if stopped:
            return Plain(output, "stop", logprobs, text)
        if len(output) == params.max_new_tokens or len(prompt) + len(output) == max_length:
            return Plain(output, "length", logprobs, text)


def next_token(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> int:
    """The token that follows `prompt` and `output`: the lowest argmax, or with the request's own noise."""
    log_probs = sampling_law(logits, prompt, output, params)
    if params.temperature > 1e-5:
        position = torch.tensor(len(prompt) + len(output))
        log_probs = log_probs + gumbel_noise(torch.tensor(params.seed), position, len(logits)).double()
    return int((log_probs == log_probs.max()).nonzero()[0, 0])


def sampling_law(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """Log-probabilities [V], float64, of the next token: penalties, bias, temperature, top-k, top-p, min-p in turn."""
    scores = logits.double().clone()
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, value in (params.logit_bias or {}).items():
        scores[token] += value
    if params.temperature <= 1e-5:
        return scores.log_softmax(dim=0)
    probs = (scores / params.temperature).softmax(dim=0)
    if params.top_k:
        weakest = probs.sort(descending=True).values[min(params.top_k, len(probs)) - 1]
        probs = torch.where(probs >= weakest, probs, 0.0)
        probs = probs / probs.sum()
    if params.top_p < 1:
        ranked = probs.sort(descending=True).values
        inside = [float(p) for i, p in enumerate(ranked) if i == 0 or float(ranked[:i].sum()) < params.top_p]
        probs = torch.where(probs >= inside[-1], probs, 0.0)
    if params.min_p > 0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    return (probs / probs.sum()).log()


# -- laws ------------------------------------------------------------------------------------------------------------


def model_law(model: Any) -> Law:
    """The law of an untouched transformers model; the last few hundred prefixes are remembered."""

    @lru_cache(maxsize=4096)
    def law(prefix: tuple[int, ...]) -> Tensor:
        return plain_logits(model, torch.tensor(prefix))[-1]

    return law


def scripted_law(vocab: int, *scripts: tuple[Sequence[int], Sequence[int]], after: int = 0) -> Law:
    """Peaked at a script: each of `scripts` is (prompt, continuation); what follows a continuation is token `after`."""
    table = {tuple(prompt): list(continuation) for prompt, continuation in scripts}

    def law(prefix: tuple[int, ...]) -> Tensor:
        for prompt, continuation in table.items():
            place = len(prefix) - len(prompt)
            if place >= 0 and prefix[: len(prompt)] == prompt:
                return peaked(vocab, continuation[place] if place < len(continuation) else after)
        raise AssertionError(f"no script begins with the prompt of {prefix}")

    return law


@dataclass(frozen=True)
class TailLaw:
    """A law that reads only the last `order` tokens; a target that knows this need not look at the others."""

    order: int
    of: Callable[[tuple[int, ...]], Tensor]

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        return self.of(prefix[-self.order :])


def table_law(vocab: int, table: Sequence[int]) -> Law:
    """Peaked at table[newest token]."""
    return TailLaw(1, lambda tail: peaked(vocab, table[tail[0]]))


def random_law(vocab: int, seed: int = 0, order: int = 3, scale: float = 2.0) -> Law:
    """Random logits that depend on the last `order` tokens: loops now and then, and notices a wrong context."""

    @lru_cache(maxsize=65536)
    def of(tail: tuple[int, ...]) -> Tensor:
        key = seed
        for token in tail:
            key = (key * 1_000_003 + token + 1) % 2**31
        return scale * torch.randn(vocab, generator=torch.Generator().manual_seed(key))

    return TailLaw(order, of)


def peaked(vocab: int, *tokens: int) -> Tensor:
    """Logits [vocab] that are 8 at `tokens` (several: a tie) and 0 elsewhere."""
    logits = torch.zeros(vocab)
    logits[list(tokens)] = 8.0
    return logits
