"""A record table without a model: texts that partly repeat their prompts, n-gram chains as recorded.

The model chains are right at each slot with a chance that their acceptance states, so they are calibrated.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hspark.drafters.ngram import NgramDrafter
from hspark.lab.outputs import RecordedOutput
from hspark.lab.record import record
from hspark.lab.table import RecordTable

VOCABULARY, WIDTH = 200, 7


def texts(count: int, seed: int = 0, temperature: float = 0.0) -> list[RecordedOutput]:
    """Outputs that copy their prompt from place to place, and write new tokens in between."""
    draw = np.random.default_rng(seed)
    outputs = []
    for number in range(count):
        prompt = draw.integers(0, VOCABULARY, size=int(draw.integers(30, 60)))
        answer: list[int] = []
        while len(answer) < 60:
            start = int(draw.integers(0, len(prompt) - 8))
            answer += prompt[start : start + int(draw.integers(6, 40))].tolist()
            answer += draw.integers(0, VOCABULARY, size=int(draw.integers(1, 2 + number % 5))).tolist()
        outputs.append(RecordedOutput(tuple(prompt.tolist()), tuple(answer), temperature, f"task/{number}"))
    return outputs


@functools.cache
def made_table(count: int = 12, seed: int = 0, model: bool = True, temperature: float = 0.0) -> RecordTable:
    outputs = texts(count, seed, temperature)
    with tempfile.TemporaryDirectory() as folder:
        table = record(outputs, Path(folder), ngram=NgramDrafter(), name="made")
    return with_model(table, seed) if model else table


def with_model(table: RecordTable, seed: int = 0) -> RecordTable:
    draw = np.random.default_rng(seed + 1)
    count = table.positions
    chance = np.clip(draw.uniform(0.5, 0.98, size=(count, 1)) - 0.02 * np.arange(WIDTH), 0.05, 0.99)
    at = np.minimum(np.arange(count)[:, None] + np.arange(WIDTH), count - 1)
    truth = table.token[at].astype(np.int64)
    right = draw.uniform(size=chance.shape) < chance
    tokens = np.where(right, truth, (truth + 1) % VOCABULARY)
    inside = np.arange(WIDTH) < table.remaining[:, None]
    accepted = np.cumprod(right & inside, axis=1).sum(axis=1)
    columns: dict[str, Any] = {
        "model_tokens": tokens.astype(np.int32),
        "model_acceptance": chance.astype(np.float32),
        "model_length": np.full(count, WIDTH, dtype=np.uint8),
        "model_accepted": accepted.astype(np.uint8),
    }
    info = {**table.info, "model_width": WIDTH, "drafter": {"drafting": "greedy"}}
    return dataclasses.replace(table, info=info, **columns)
