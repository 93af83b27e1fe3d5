"""The n-gram matcher against a slow reading of its definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hspark.drafters.ngram import NgramMatch, match
from tests.drafters.ngram_cases import Expected, Settings, as_batch, slow_match

ALPHABET = 4


def read(found: NgramMatch, row: int) -> Expected:
    length = int(found.length[row])
    return Expected(
        found.tokens[row, :length].tolist(),
        int(found.match_length[row]),
        int(found.agreement[row]),
        int(found.copy_length[row]),
    )


@st.composite
def texts(draw: st.DrawFn, max_size: int = 60) -> list[int]:
    """Random texts over few tokens; texts with a period; random texts that end by copying a part of themselves."""
    token = st.integers(0, draw(st.integers(1, ALPHABET)) - 1)
    text = draw(st.lists(token, min_size=1, max_size=max_size // 2))
    kind = draw(st.sampled_from(["random", "periodic", "copy"]))
    if kind == "periodic":
        period = draw(st.integers(1, 20))
        text = text[-period:]
        text = (text * max_size)[: draw(st.integers(1, max_size))]
    elif kind == "copy":
        start = draw(st.integers(0, len(text) - 1))
        text = text + text[start : start + draw(st.integers(1, 20))]
    if draw(st.booleans()):
        text = [*text[: draw(st.integers(0, 3))], ALPHABET, *text][:max_size]
    return text


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    min_match = draw(st.integers(1, 6))
    max_match = draw(st.integers(min_match, 16))
    return Settings(
        width=draw(st.integers(1, 16)),
        min_match=min_match,
        max_match=max_match,
        copy_cap=draw(st.integers(max_match, 24)),
        periodic=draw(st.booleans()),
    )


@given(st.lists(texts(), min_size=1, max_size=5), st.integers(0, 20), all_settings())
@example([[7] * 48], 0, Settings())
@example([[7] * 48, [1, 2, 3, 4, 5] * 2, [1]], 9, Settings(periodic=False))
def test_equals_the_definition(batch: list[list[int]], room: int, settings: Settings) -> None:
    tokens, length = as_batch(batch, max(map(len, batch)) + room)
    found = match(tokens, length, **dataclasses.asdict(settings))
    for row, text in enumerate(batch):
        assert read(found, row) == slow_match(text, settings)


@given(st.lists(texts(), min_size=1, max_size=3), st.booleans())
def test_equals_the_definition_at_default_settings(batch: list[list[int]], periodic: bool) -> None:
    settings = Settings(periodic=periodic)
    tokens, length = as_batch(batch, 64)
    found = match(tokens, length, periodic=periodic)
    for row, text in enumerate(batch):
        assert read(found, row) == slow_match(text, settings)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("copied", [4, 5, 6, 14, 15, 16, 255, 256, 257, 300])
@pytest.mark.parametrize("gap", [0, 1, 14, 15, 16])
def test_copies_around_every_cap(copied: int, gap: int, periodic: bool) -> None:
    """`copied` distinct tokens, a different token before each occurrence, and `gap` more tokens between the two."""
    passage = list(range(10, 10 + copied))
    text = [1, *passage, *range(1000, 1000 + gap), 2, *passage]
    tokens, length = as_batch([text], len(text) + 3)
    found = read(match(tokens, length, periodic=periodic), 0)
    assert found == slow_match(text, Settings(periodic=periodic))
    if copied < 5:
        assert found == Expected([], 0, 0, 0)
    else:
        assert found.match_length == min(copied, 15)
        assert found.copy_length == min(copied, 256)
        assert found.agreement == 1
        assert found.tokens[: gap + 1] == [*range(1000, 1000 + gap), 2][:15]


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("room", [0, 1, 300])
def test_short_prompts(size: int, room: int) -> None:
    """Six equal tokens are the shortest text with a match: five that agree, and one that follows."""
    tokens, length = as_batch([[3] * size], size + room)
    found = read(match(tokens, length), 0)
    expected = Expected([3] * 15, 5, 1, 5) if size == 6 else Expected([], 0, 0, 0)
    assert found == expected == slow_match([3] * size, Settings())


def test_worked_example() -> None:
    """The example in the docstring of `match`."""
    tokens = torch.tensor([[7, 8, 9, 1, 8, 9, 2, 7, 8, 9]])
    found = match(tokens, torch.tensor([10]), width=4, min_match=2, max_match=3, copy_cap=8)
    assert read(found, 0) == Expected([1, 8, 9, 2], match_length=3, agreement=0, copy_length=3)


def test_ties_go_to_the_most_recent() -> None:
    passage = [1, 2, 3, 4, 5]
    text = [*passage, 50, 9, *passage, 60, 9, *passage]
    found = read(match(*as_batch([text], len(text))), 0)
    assert found.tokens[0] == 60
    assert found.agreement == 0


def test_longest_wins_over_most_recent() -> None:
    text = [8, 1, 2, 3, 4, 5, 50, 9, 1, 2, 3, 4, 5, 60, 8, 1, 2, 3, 4, 5]
    found = read(match(*as_batch([text], len(text))), 0)
    assert (found.tokens[0], found.match_length, found.agreement) == (50, 6, 0)


def test_runner_up_may_overlap_the_match() -> None:
    """In a run of equal tokens the runner-up is the candidate one place earlier, and agrees."""
    found = read(match(*as_batch([[7] * 48], 48)), 0)
    assert found == Expected([7] * 15, 15, 1, 47)
    assert read(match(*as_batch([[7] * 48], 48), periodic=False), 0).tokens == [7]
    # Two candidates, side by side: the match ends at the last 7 of the first run, the runner-up one place earlier.
    text = [*[7] * 6, 8, *[7] * 5]
    assert read(match(*as_batch([text], 12)), 0) == Expected([8, *[7] * 5, 8, *[7] * 5, 8, 7, 7], 5, 0, 5)


@pytest.mark.parametrize("period", range(1, 17))
def test_periodic_text_is_continued_exactly(period: int) -> None:
    """Once a loop has run twice, and five tokens have a predecessor, the draft goes on with the loop exactly."""
    loop = list(range(100, 100 + period))
    for size in range(max(2 * period, period + 5), 3 * period + 12):
        text = (loop * 80)[: size + 15]
        tokens, length = as_batch([text[:size]], 80, garbage=55)
        assert read(match(tokens, length), 0).tokens == text[size:]


@given(st.lists(texts(), min_size=2, max_size=4), st.integers(-(2**62), 2**62))
def test_stale_tokens_change_nothing(batch: list[list[int]], garbage: int) -> None:
    """What an earlier request left behind `length` is invisible, in every field and every entry."""
    clean = match(*as_batch(batch, 80))
    dirty = match(*as_batch(batch, 80, garbage))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)


def test_stale_occurrence_is_not_matched() -> None:
    """The newest tokens also stand behind `length`, with a longer history in common: still no match."""
    text = [1, 2, 3, 4, 5, 6]
    tokens = torch.tensor([[*text, *text, *text]])
    assert int(match(tokens, torch.tensor([6])).length) == 0
    assert int(match(tokens, torch.tensor([12])).length) == 15


@given(st.lists(texts(), min_size=1, max_size=4))
def test_rows_do_not_influence_each_other(batch: list[list[int]]) -> None:
    together = match(*as_batch(batch, 70))
    for row, text in enumerate(batch):
        alone = match(*as_batch([text], 70))
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[row], b[0])


@given(st.lists(texts(), min_size=1, max_size=3), st.integers(0, 40))
def test_context_limit_changes_nothing_while_it_covers_the_rows(batch: list[list[int]], slack: int) -> None:
    tokens, length = as_batch(batch, 64)
    limited = match(tokens, length, context_limit=max(map(len, batch)) + slack)
    for a, b in zip(match(tokens, length), limited, strict=True):
        assert torch.equal(a, b)


@given(texts())
def test_draft_comes_from_the_context(text: list[int]) -> None:
    found = read(match(*as_batch([text], 64, garbage=77)), 0)
    assert set(found.tokens) <= set(text)


def test_no_large_intermediate() -> None:
    """Nothing of size rows x context x copy_cap is made: the largest tensor is rows x context x max_match bytes."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            nonlocal largest
            if isinstance(result, Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    tokens = torch.zeros(8, 4000, dtype=torch.int64)
    with Sizes():
        match(tokens, torch.full((8,), 4000))
    assert largest <= 8 * (4000 + 14) * 15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"copy_cap": 14}, "copy_cap=14 is not usable; use an integer from 15 to"),
        ({"min_match": 16}, "min_match=16 is not usable; use an integer from 1 to 15"),
        ({"max_match": 300, "copy_cap": 400}, "max_match=300 is not usable; use an integer from 1 to 255"),
        ({"width": 0}, "width=0"),
        ({"context_limit": 0}, "context_limit=0 is not usable; use an integer of at least 1"),
        ({"context_limit": -3}, "context_limit=-3"),
    ],
)
def test_settings_that_never_match_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        match(*as_batch([[1, 2] * 10], 32), **settings)


def test_the_longest_match_that_a_byte_counts() -> None:
    tokens, length = as_batch([[1] * 600], 600)
    found = match(tokens, length, max_match=255, copy_cap=400)
    assert (int(found.match_length), int(found.copy_length)) == (255, 400)
    limits: dict[str, Any] = {"max_match": np.int64(255), "copy_cap": np.int64(400)}
    assert torch.equal(match(tokens, length, **limits).tokens, found.tokens)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens has shape"):
        match(torch.zeros(4, dtype=torch.int64), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"length \(3,\)"):
        match(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([4, 4, 4]))
