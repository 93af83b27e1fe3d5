"""What several tests of batches share: one law, its plain outputs, and an engine with drafts that know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hspark.config import SamplingParams
from tests.fixtures import PatternDrafter, ScriptedTarget, build_engine
from tests.plain import plain_decode, random_law

V = 16
LAW = random_law(V, seed=3)
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


def greedy(cap: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=cap, **more)


def plain(prompt: tuple[int, ...], cap: int) -> list[int]:
    return plain_decode(LAW, prompt, greedy(cap)).ids


def engine_for(
    prompts: Sequence[tuple[int, ...]],
    *,
    rows: int = 3,
    width: int = 7,
    right: Any = None,
    max_length: int = 64,
    **options: Any,
) -> Any:
    """A scripted target, and a drafter that knows the outputs of `prompts` (two of three drafts right by default)."""
    rule = (lambda place, slot: (place + slot) % 3 != 0) if right is None else right
    drafter = PatternDrafter({p: plain(p, 50) for p in prompts}, V, width=width, right=rule)
    target = ScriptedTarget(LAW, V, rows=rows, max_length=max_length)
    return build_engine(target, free=drafter, **{"budget": "all", **options})
