"""One request's life on the host: its tokens, its text, and where it ends."""

from __future__ import annotations

import time
from typing import Any

from hspark.config import SamplingParams
from hspark.core import REASON_NAMES, SOURCE_TARGET, DrafterMetrics, RequestMetrics, RequestOutput


class Detokenizer:
    """Turns token ids into text piece by piece; the pieces add up to what decoding everything at once gives.

    A piece is held back while it ends inside a character of several tokens (the replacement character marks it).
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
