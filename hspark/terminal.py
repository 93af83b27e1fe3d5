"""Generated text on a terminal, each token in the colour of who proposed it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from hspark.request import Detokenizer

RESET, DIM = "\033[0m", "\033[2m"
# Tokens of the target itself keep the terminal's own colour.
COLOURS = {"ngram": "\033[32m", "dspark": "\033[36m", "draft_model": "\033[36m", "target": ""}
_OTHER = "\033[35m"
# A model must not be able to move the cursor or set the title of somebody's terminal.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def wants_colour(stream: TextIO, choice: str = "auto", environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour `stream`. choice: "always", "never", or "auto": on a terminal, unless NO_COLOR is set."""
    if choice not in ("auto", "always", "never"):
        raise ValueError(f"color={choice!r} is unknown; use 'auto', 'always' or 'never'")
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def paint(text: str, source: str) -> str:
    """`text` in the colour of a source ("ngram", "dspark", "target")."""
    code = COLOURS.get(source, _OTHER)
    return f"{code}{text}{RESET}" if code and text else text


class Painter:
    """Writes one request's text to `stream` as it becomes certain.

    Text lags behind the tokens (characters of several tokens, beginnings of stop strings), so the tokens are decoded
    here once more, only to learn how far each one reaches.
    """

    def __init__(self, stream: TextIO, tokenizer: Any | None, colour: bool) -> None:
        self.stream, self.colour = stream, colour
        self._clean = colour or stream.isatty()
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None and colour else None
        self._spans: deque[tuple[int, str]] = deque()  # (where the token's text ends, its source)
        self._decoded = self._written = 0
        self._source = "target"

    def write(self, text: str, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        """Adds newly certain `text`, and the tokens (with their sources) that were committed with it."""
        if self._detokenizer is not None:
            for token, source in zip(token_ids, sources, strict=True):
                if piece := self._detokenizer.push(token):
                    self._decoded += len(piece)
                    self._spans.append((self._decoded, source))
        while text:
            count = self._reach(len(text))
            part, text = text[:count], text[count:]
            self._written += count
            shown = part.translate(_CONTROLS) if self._clean else part
            self.stream.write(paint(shown, self._source) if self.colour else shown)
        self.stream.flush()

    def _reach(self, available: int) -> int:
        """How many of the next characters belong to one token, whose source becomes the current one."""
        while self._spans and self._spans[0][0] <= self._written:
            self._spans.popleft()
        if not self._spans:
            return available
        end, self._source = self._spans[0]
        return min(available, end - self._written)


def legend() -> str:
    """One line that says which colour is whose."""
    return ", ".join((paint("n-gram drafts", "ngram"), paint("model drafts", "dspark"), "the target's own tokens"))


def dim(text: str, colour: bool) -> str:
    return f"{DIM}{text}{RESET}" if colour else text
