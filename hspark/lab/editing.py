"""How much an edit changes: edit distance, the code block of an answer, and 5% buckets (the paper, section 5.1)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# An opening fence: up to three spaces, at least three backticks or tildes, and an info string such as "python".
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})(.*)$")
BUCKET_PERCENT = 5


def edit_distance(left: Sequence[object], right: Sequence[object]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions of single items from left to right.

    left, right: strings, or any sequences of hashable items (token ids) [N], [M]. Time grows with N·M / word size:
    Myers' bit-parallel algorithm, one column of the table held in the bits of two integers of length N.

    Example: edit_distance("kitten", "sitting") == 3.
    """
    left, right = _without_common_ends(left, right)
    if not left or not right:
        return max(len(left), len(right))
    if len(left) > len(right):
        left, right = right, left
    places: dict[object, int] = {}
    for index, item in enumerate(left):
        places[item] = places.get(item, 0) | (1 << index)
    mask, last = (1 << len(left)) - 1, 1 << (len(left) - 1)
    # Bit i: going down the column from i to i + 1 adds one (rise) or takes one away (fall).
    rise, fall, distance = mask, 0, len(left)
    for item in right:
        equal = places.get(item, 0)
        diagonal = (((equal & rise) + rise) ^ rise) | equal | fall
        across_rise = fall | ~(diagonal | rise) & mask
        across_fall = rise & diagonal
        distance += bool(across_rise & last) - bool(across_fall & last)
        across_rise = (across_rise << 1 | 1) & mask
        across_fall = (across_fall << 1) & mask
        rise = across_fall | ~(diagonal | across_rise) & mask
        fall = across_rise & diagonal
    return distance


def normalised_distance(left: Sequence[object], right: Sequence[object]) -> float:
    """`edit_distance` over the length of the longer one: 0 for equal texts (two empty ones too), 1 for nothing shared.

    The paper (section 5.1) says "normalized Levenshtein distance" without the divisor; the longer length is the one
    that keeps it within 0 and 1.
    """
    longest = max(len(left), len(right))
    return edit_distance(left, right) / longest if longest else 0.0


def longest_code_block(text: str) -> str | None:
    """The longest fenced block of `text` (by characters, the first of equals), without its fences; None if none.

    Fences are Markdown's: at least three backticks or tildes on their own line; a block ends at a fence of the same
    character at least as long, or with the text, as in an answer that was cut off.
    """
    blocks: list[str] = []
    fence: str | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if fence is None:
            # Backticks after the opening ones are inline code, not a fence.
            if mark and not (mark[1][0] == "`" and "`" in mark[2]):
                fence, lines = mark[1], []
        elif mark and mark[1].startswith(fence) and not mark[2].strip():
            blocks.append("\n".join(lines))
            fence = None
        else:
            lines.append(line)
    if fence is not None:
        blocks.append("\n".join(lines))
    return max(blocks, key=len) if blocks else None


def output_distance(program: str, output: str) -> float:
    """Normalised distance between the input program and the longest code block of the target's plain output.

    The paper, section 5.1. An output without a block is taken as the program itself; line ends at either end are not
    counted, since a prompt's fence strips them.
    """
    block = longest_code_block(output)
    return normalised_distance(program.strip("\n"), (output if block is None else block).strip("\n"))


def bucket(distance: float, percent: int = BUCKET_PERCENT) -> int:
    """The lower edge, in per cent, of the bucket that holds `distance` (0 to 1): 0.07 is in bucket 5, that is 5-10%.

    A lower edge belongs to its bucket; a distance of 1 belongs to the last one.
    """
    if not 0 <= distance <= 1:
        raise ValueError(f"distance={distance!r} is out of range; use a normalised distance from 0 to 1")
    if percent < 1 or 100 % percent:
        raise ValueError(f"percent={percent!r} does not divide 100; use for example 5, 10 or 20")
    # 0.15 * 100 is 15.000000000000002 and 0.29 * 100 is 28.999999999999996: round before taking the floor.
    edge = math.floor(round(distance * 100 / percent, 9)) * percent
    return min(edge, 100 - percent)


def bucket_name(edge: int, percent: int = BUCKET_PERCENT) -> str:
    """How a bucket is written: "15-20%"."""
    return f"{edge}-{edge + percent}%"


def _without_common_ends(left: Sequence[object], right: Sequence[object]) -> tuple[Sequence[object], Sequence[object]]:
    """Both without their common prefix and suffix, which a shortest edit can leave alone."""
    shorter = min(len(left), len(right))
    start = 0
    while start < shorter and left[start] == right[start]:
        start += 1
    end = 0
    while end < shorter - start and left[-1 - end] == right[-1 - end]:
        end += 1
    return left[start : len(left) - end], right[start : len(right) - end]
