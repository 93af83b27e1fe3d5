"""One request's life on the host: its tokens, its text, and where it ends."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from hspark.config import SamplingParams
from hspark.core import REASON_NAMES, SOURCE_TARGET, DrafterMetrics, RequestMetrics, RequestOutput


class Detokenizer:
    """Turns token ids into text piece by piece; the pieces add up to what decoding everything at once gives.

    A piece is held back while it ends inside a character of several tokens (the replacement character marks it). Where
    bytes are no text at all, replacement characters may be more or fewer than at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first token of the window that is decoded again for context
        self._read = 0  # tokens whose text has been returned

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """What was held back, as it is."""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return after[len(before) :]


class Request:
    """A request inside the engine. `done` becomes True once; nothing changes afterwards.

    token_ids, sources, logprobs grow by `commit`; `text` is what is certain and safe to show: text that might still
    turn out to be the beginning of a stop string is withheld.
    """

    def __init__(
        self,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        stop_ids: frozenset[int],
        tokenizer: Any | None,
        lossy: bool = False,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.lossy = lossy
        self.token_ids: list[int] = []
        self.sources: list[str] = []
        self.logprobs: list[float] = []
        self.metrics = RequestMetrics()
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.prefilled = 0
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._text = ""
        self._overlap = max((len(stop) for stop in params.stop), default=1) - 1  # of a stop string and older text
        self.submitted = self.admitted = time.perf_counter()

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str | None:
        """Everything that may be shown so far; all of it once the request is done. None without a tokenizer."""
        if self.detokenizer is None:
            return None
        if self.done:
            return self._text
        begun = [n for stop in self.params.stop for n in range(1, len(stop)) if self._text.endswith(stop[:n])]
        return self._text[: len(self._text) - max(begun, default=0)]

    def commit(self, token: int, source: str, logprob: float | None, last: bool) -> bool:
        """Appends one token; True if the request goes on. `last`: this token reaches the request's length limit."""
        self.token_ids.append(token)
        self.sources.append(source)
        if logprob is not None:
            self.logprobs.append(logprob)
        stopped = token in self.stop_ids
        if self.detokenizer is not None and not stopped:
            piece = self.detokenizer.push(token)
            if last:
                piece += self.detokenizer.finish()
            stopped = self._append(piece)
        if stopped or last:
            self.finish("stop" if stopped else "length")
        return not self.done

    def deliver(self, seen: dict[str, Any], names: list[str], logprobs: list[float] | None, limit: int) -> None:
        """Commits what one step emitted, up to a stop or to `limit` output tokens, and books the step.

        seen: this row's values of the step's `Outcome`. names: what each SOURCE_* code is called. logprobs: one for
        each token, if anybody asked.
        """
        delivered = 0
        for slot in range(seen["count"]):
            value = logprobs[slot] if logprobs is not None and self.params.logprobs else None
            delivered += 1
            last = len(self.token_ids) + 1 >= limit
            try:
                if not self.commit(seen["tokens"][slot], names[seen["sources"][slot]], value, last):
                    break
            except Exception as error:  # a tokenizer's
                self.finish("error", f"token id {seen['tokens'][slot]} cannot be decoded: {error!r}")
                break
        # A stop at an accepted draft takes the place of the step's own token, so that tokens = steps + accepted.
        accepted = max(0, min(delivered - 1, seen["accepted"]))
        self.count_step(names, seen["chain_sources"], seen["drafted"], seen["kept"], accepted, seen["reason"])
        if self.done:
            self.metrics.tokens = len(self.token_ids)

    def _append(self, piece: str) -> bool:
        """Adds text; True if it completes a stop string, before which the text is then cut."""
        begin = max(0, len(self._text) - self._overlap)
        self._text += piece
        found = [at for stop in self.params.stop if (at := self._text.find(stop, begin)) >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def finish(self, reason: str, error: str | None = None) -> None:
        """Ends the request with "stop", "length", "cancelled" or "error"; later calls change nothing."""
        if self.done:
            return
        by_id = reason == "stop" and self.token_ids[-1] in self.stop_ids
        if self.detokenizer is not None and (by_id or reason in ("cancelled", "error")):
            with contextlib.suppress(Exception):  # a tokenizer that raised before would do so again
                self._append(self.detokenizer.finish())
        self.finish_reason, self.error = reason, error
        self.metrics.tokens = len(self.token_ids)
        self.metrics.seconds = time.perf_counter() - self.admitted

    def count_step(
        self, names: list[str], sources: list[int], drafted: int, kept: int, delivered: int, reason: int
    ) -> None:
        """Books one step: `drafted` slots of a chain by `sources`, the first `kept` verified, `delivered` accepted.

        A stop token that a drafter had right is the step's own token, as every other last token of a step is.
        """
        self.metrics.steps += 1
        # Where a request ends at a draft token, nobody looked at the verdict on the next one.
        graded = delivered if self.done and self.sources[-1] != names[SOURCE_TARGET] else delivered + 1
        if self.done:
            self.sources[-1] = names[SOURCE_TARGET]
        chain = names[sources[0]] if drafted else "none"
        key = f"{chain}:{REASON_NAMES[reason]}"
        self.metrics.reasons[key] = self.metrics.reasons.get(key, 0) + 1
        for slot in range(drafted):
            count = self.metrics.drafters.setdefault(names[sources[slot]], DrafterMetrics())
            count.drafted += 1
            if slot < kept:
                count.verified += 1
                _bump(count.verified_by_position, slot)
            if slot < min(kept, graded):
                _bump(count.reached_by_position, slot)
            if slot < delivered:
                count.accepted += 1
                _bump(count.accepted_by_position, slot)

    def output(self) -> RequestOutput:
        return RequestOutput(
            prompt_token_ids=list(self.prompt),
            token_ids=list(self.token_ids),
            text=self.text,
            finish_reason=self.finish_reason or "",
            sources=list(self.sources),
            metrics=self.metrics,
            logprobs=list(self.logprobs) if self.params.logprobs else None,
            error=self.error,
            lossy=self.lossy,
        )


def _bump(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1


def check_request(prompt: list[int], params: SamplingParams, capacity: int, vocab: int, tokenizer: Any | None) -> None:
    """ValueError, by name, for what cannot run: on rows of `capacity` tokens and a target of `vocab` token ids."""
    if not prompt:
        raise ValueError("prompt is empty; use at least one token")
    if len(prompt) >= capacity:
        raise ValueError(
            f"prompt has {len(prompt)} tokens, which leaves no room in max_length={capacity}; "
            f"use at most {capacity - 1} tokens, or a larger max_length"
        )
    named = {"prompt": prompt, "logit_bias": params.logit_bias or (), "stop_token_ids": params.stop_token_ids}
    for name, ids in named.items():
        bad = [i for i in ids if not 0 <= i < vocab]
        if bad:
            raise ValueError(f"{name} holds token id {bad[0]}; the target's ids are 0 to {vocab - 1}")
    if params.stop and tokenizer is None:
        raise ValueError(f"stop={params.stop!r} needs a tokenizer, and this target has none; use stop_token_ids")
    for special in getattr(tokenizer, "all_special_tokens", ()) if params.stop else ():
        if any(special in stop for stop in params.stop):
            raise ValueError(
                f"stop={params.stop!r} holds the special token {special!r}, which is no part of the text; "
                f"use stop_token_ids=[{tokenizer.convert_tokens_to_ids(special)}]"  # type: ignore[union-attr]
            )
