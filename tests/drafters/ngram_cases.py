"""The n-gram matcher's definition, read slowly, and texts as rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    width: int = 15
    min_match: int = 5
    max_match: int = 15
    copy_cap: int = 256
    periodic: bool = True


@dataclass(frozen=True)
class Expected:
    tokens: list[int]
    match_length: int
    agreement: int
    copy_length: int


def agreeing(text: list[int], end: int, cap: int) -> int:
    """Tokens that agree backwards from positions `end` and the last of `text` (0-based), counted up to `cap`."""
    count = 0
    while count < cap and count <= end and text[end - count] == text[-1 - count]:
        count += 1
    return count


def slow_match(text: list[int], settings: Settings) -> Expected:
    """The definition, one candidate at a time."""
    newest = len(text) - 1
    candidates = []
    for end in range(newest):
        length = agreeing(text, end, settings.max_match)
        if length >= settings.min_match:
            candidates.append((length, end))
    candidates.sort(reverse=True)
    if not candidates:
        return Expected([], 0, 0, 0)
    length, end = candidates[0]
    known = text[end + 1 :]
    tokens = known[: settings.width]
    if settings.periodic:
        tokens = (known * settings.width)[: settings.width]
    agreement = int(len(candidates) == 1 or text[candidates[1][1] + 1] == known[0])
    return Expected(tokens, length, agreement, agreeing(text, end, settings.copy_cap))


def as_batch(texts: list[list[int]], size: int, garbage: int = 0) -> tuple[Tensor, Tensor]:
    """tokens [B, size] and length [B]; behind each text lies its own continuation, or `garbage` if that is not 0."""
    tokens = torch.zeros(len(texts), size, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row] = torch.tensor((text * (size // len(text) + 1))[:size])
        if garbage:
            tokens[row, len(text) :] = garbage
    return tokens, torch.tensor([len(text) for text in texts])
