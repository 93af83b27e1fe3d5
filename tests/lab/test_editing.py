"""Edit distance equals the textbook table; code blocks are found as Markdown reads them; buckets have exact edges."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hspark.lab.editing import (
    bucket,
    bucket_name,
    edit_distance,
    longest_code_block,
    normalised_distance,
    output_distance,
)

TEXTS = st.text(alphabet="abc\n", max_size=40)


def table_distance(left: Sequence[object], right: Sequence[object]) -> int:
    """The definition: row by row."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        above = [i]
        for j, b in enumerate(right, 1):
            above.append(min(row[j] + 1, above[-1] + 1, row[j - 1] + (a != b)))
        row = above
    return row[-1]


@given(TEXTS, TEXTS)
@example("", "")
@example("a", "")
@example("aa", "aaa")
def test_distance_equals_the_table(left: str, right: str) -> None:
    assert edit_distance(left, right) == table_distance(left, right)


@given(st.text(max_size=300), st.text(max_size=300))
def test_distance_equals_the_table_beyond_one_machine_word(left: str, right: str) -> None:
    assert edit_distance(left, right) == table_distance(left, right)


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_distance_of_token_ids(left: list[int], right: list[int]) -> None:
    assert edit_distance(left, right) == table_distance(left, right)


def test_a_wrong_recurrence_is_caught() -> None:
    def without_substitution(left: str, right: str) -> int:
        row = list(range(len(right) + 1))
        for i, a in enumerate(left, 1):
            above = [i]
            for j, b in enumerate(right, 1):
                above.append(row[j - 1] if a == b else min(row[j], above[-1]) + 1)
            row = above
        return row[-1]

    assert without_substitution("ab", "cb") != edit_distance("ab", "cb") == 1


def test_known_distances() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert normalised_distance("", "") == 0.0
    assert normalised_distance("abc", "") == 1.0
    assert normalised_distance("abcd", "abce") == 0.25
    assert normalised_distance("ab", "abcd") == 0.5


@given(TEXTS, TEXTS)
def test_normalised_is_symmetric_and_within_0_and_1(left: str, right: str) -> None:
    value = normalised_distance(left, right)
    assert 0 <= value <= 1
    assert value == normalised_distance(right, left)
    assert (value == 0) == (left == right)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("no code here", None),
        ("```python\nx = 1\n```", "x = 1"),
        ("a\n```\nshort\n```\nb\n~~~\nmuch longer\n~~~\n", "much longer"),
        ("```\nab\n```\n```\ncd\n```", "ab"),
        ("````\nx\n```\ny\n````", "x\n```\ny"),
        ("```py\ncut off\nhere", "cut off\nhere"),
        ("`inline` and ```also inline``` only", None),
        ("```x``` is inline\n```\ny\n```", "y"),
        ("```\n```", ""),
        ("```\nx\n~~~\n```", "x\n~~~"),
        ("```\nx\n```python\n```", "x\n```python"),
    ],
)
def test_longest_code_block(text: str, block: str | None) -> None:
    assert longest_code_block(text) == block


def test_output_distance_uses_the_block_or_else_the_text() -> None:
    assert output_distance("x = 1\n", "Sure!\n```python\nx = 1\n```\nDone.") == 0
    assert output_distance("x = 1", "x = 2") == 0.2


@pytest.mark.parametrize(
    ("distance", "edge"),
    [(0, 0), (0.0499, 0), (0.05, 5), (0.07, 5), (0.15, 15), (0.29, 25), (0.3, 30), (0.6999, 65), (0.7, 70), (1, 95)],
)
def test_buckets(distance: float, edge: int) -> None:
    assert bucket(distance) == edge


@given(st.integers(0, 20))
def test_every_lower_edge_is_in_its_own_bucket(number: int) -> None:
    assert bucket(number * 5 / 100) == min(number * 5, 95)
    assert bucket(number / 20) == min(number * 5, 95)


def test_bucket_names_and_bad_input() -> None:
    assert bucket_name(15) == "15-20%"
    with pytest.raises(ValueError, match=r"distance=1\.5 is out of range"):
        bucket(1.5)
    with pytest.raises(ValueError, match=r"distance=nan is out of range"):
        bucket(float("nan"))
    with pytest.raises(ValueError, match="percent=7 does not divide 100"):
        bucket(0.5, percent=7)
