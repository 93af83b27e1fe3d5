"""Replay against a one-prefix-at-a-time reading of its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.drafters import NgramDrafter
from hspark.lab import replay
from hspark.lab.outputs import RecordedOutput
from hspark.lab.replay import NgramReplay, replay_ngram
from tests.drafters.ngram_cases import Expected, Settings, slow_match


def slow_replay(outputs: list[RecordedOutput], settings: Settings, visit: str) -> tuple[list[tuple[int, ...]], int]:
    records: list[tuple[int, ...]] = []
    visited = 0
    for index, output in enumerate(outputs):
        prompt, answer = list(output.prompt_token_ids), list(output.output_token_ids)
        position = 0
        while position < len(answer):
            visited += 1
            draft: Expected = slow_match(prompt + answer[:position], settings)
            ahead = answer[position:]
            accepted = graded = 0
            for token, truth in zip(draft.tokens, ahead, strict=False):
                graded += 1
                if token != truth:
                    break
                accepted += 1
            features = (draft.match_length, draft.agreement, draft.copy_length)
            if draft.match_length:
                records.append((index, position, *features, len(draft.tokens), graded, accepted))
            position += 1 if visit == "positions" else accepted + 1
    return records, visited


def rows(result: NgramReplay) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in np.stack(result[:8], axis=1)]


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)
recorded = st.builds(lambda p, o: RecordedOutput(tuple(p), tuple(o)), tokens, st.just([]) | tokens)


@given(st.lists(recorded, max_size=3), st.sampled_from(replay.VISITS), st.booleans(), st.integers(1, 2000))
def test_equals_the_definition(outputs: list[RecordedOutput], visit: str, periodic: bool, chunk: int) -> None:
    settings = Settings(width=6, min_match=2, max_match=4, copy_cap=7, periodic=periodic)
    drafter = NgramDrafter(length=6, min_match=2, max_match=4, copy_cap=7, periodic=periodic)
    before, replay._CHUNK_COMPARISONS = replay._CHUNK_COMPARISONS, chunk
    try:
        result = replay_ngram(outputs, drafter, visit=visit)
    finally:
        replay._CHUNK_COMPARISONS = before
    records, visited = slow_replay(outputs, settings, visit)
    assert rows(result) == records
    assert result.visited == visited
    assert result.tokens == sum(len(output.output_token_ids) for output in outputs)
    assert np.all((result.accepted == result.graded) | (result.accepted == result.graded - 1))
    assert np.all((result.graded >= 1) & (result.graded <= result.drafted))


def test_a_copy_by_hand() -> None:
    """The answer copies the prompt's eight tokens: the match begins at its sixth prefix and is right to the end."""
    passage = (10, 11, 12, 13, 14, 15, 16, 17)
    output = RecordedOutput((*passage, 1), (*passage, 2))
    done: list[int] = []
    result = replay_ngram([output], progress=done.append)
    # (output, position, match, agreement, copy, drafted, graded, accepted); the last token of the answer is not 1.
    assert rows(result) == [
        (0, 5, 5, 1, 5, 15, 4, 3),
        (0, 6, 6, 1, 6, 15, 3, 2),
        (0, 7, 7, 1, 7, 15, 2, 1),
        (0, 8, 8, 1, 8, 15, 1, 0),
    ]
    assert (result.visited, result.tokens, done) == (9, 9, [9])
    assert result.accepted_per_visit == pytest.approx(6 / 9)
    assert rows(replay_ngram([output], visit="steps")) == [(0, 5, 5, 1, 5, 15, 4, 3)]


def test_positions_past_the_end_are_not_graded() -> None:
    """The output ends inside a right draft: graded equals accepted, and no label is made up for the rest."""
    output = RecordedOutput((10, 11, 12, 13, 14, 15, 16, 1), (10, 11, 12, 13, 14, 15))
    assert rows(replay_ngram([output])) == [(0, 5, 5, 1, 5, 15, 1, 1)]


def test_nothing_to_replay() -> None:
    result = replay_ngram([])
    assert rows(result) == []
    assert (result.visited, result.accepted_per_visit) == (0, 0.0)


def test_bad_visit_is_named() -> None:
    with pytest.raises(ValueError, match="visit='all' is unknown; use one of 'positions', 'steps'"):
        replay_ngram([], visit="all")
