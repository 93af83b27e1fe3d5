"""A scripted pair whose model drafts are often right, its record table, and costs of every kind."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hspark.config import SamplingParams
from hspark.core import SOURCE_MODEL
from hspark.drafters.ngram import NgramDrafter
from hspark.lab.outputs import RecordedOutput
from hspark.lab.record import record
from hspark.lab.table import RecordTable
from hspark.policy import CostModel, LinearCost
from hspark.sampling import SamplingMode
from tests.drafters.dspark_cases import rows_of
from tests.fixtures import MILD, STAIRS, PatternDrafter
from tests.plain import plain_decode, random_law

V, STOP, K = 12, 5, 4
LAW = random_law(V, seed=3)
CONTEXT = LinearCost({1: 1.0, 3: 1.2}, {1: 0.05, 3: 0.08}, 0.004)
GRAPHS = LinearCost(1.0, 0.05, graph_limit=6, eager={1: 1.0, 4: 1.2, 40: 4.0})
COSTS: dict[str, CostModel] = {"line": MILD, "stairs": STAIRS, "context": CONTEXT, "graphs": GRAPHS}


class OtherCost:
    """A cost that this package does not know, and whose context term is no sum."""

    def step_cost(self, requests: int, budgets: Any, context_tokens: float = 0) -> torch.Tensor:
        slots = torch.as_tensor(budgets, dtype=torch.float64)
        return (requests + slots + 10) * (1 + 0.001 * context_tokens)

    def slot_cost(self, requests: int, budget: int) -> float:
        return 1.0

    def save(self, path: Any) -> None:
        raise AssertionError("nothing saves it")


@functools.cache
def scripted_jobs() -> tuple[tuple[tuple[int, ...], SamplingParams], ...]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, V, (2 + n % 5,), generator=generator).tolist() for n in range(10)]
    stops = [[STOP] if n % 3 == 0 else [] for n in range(10)]
    return tuple(
        (tuple(prompt), SamplingParams(max_new_tokens=30 - n, stop_token_ids=stops[n]))
        for n, prompt in enumerate(prompts)
    )


@functools.cache
def truths() -> dict[tuple[int, ...], list[int]]:
    return {prompt: plain_decode(LAW, prompt, SamplingParams(max_new_tokens=60)).ids for prompt, _ in scripted_jobs()}


def scripted_model() -> PatternDrafter:
    return PatternDrafter(
        truths(), V, width=K, right=lambda place, slot: place // 4 % 3 != 0, source=SOURCE_MODEL, acceptance=0.8
    )


def scripted_free() -> NgramDrafter:
    """Short matches count, and a simple estimator tells them apart."""

    def estimator(n: Tensor, a: Tensor, m: Tensor) -> Tensor:
        return (0.3 + 0.04 * n[:, None] + 0.1 * a[:, None] - 0.01 * torch.arange(9)).clamp(0.01, 0.99)

    return NgramDrafter(estimator, min_match=2, max_match=15, length=9)


@functools.cache
def scripted_table(folder: Path) -> RecordTable:
    """As `record` would make it, with the chains of the scripted model drafter."""
    outputs = []
    for prompt, params in scripted_jobs():
        ids = plain_decode(LAW, prompt, params).ids
        outputs.append(RecordedOutput(prompt, tuple(ids), 0.0))
    limits = [params.max_new_tokens for _, params in scripted_jobs()]
    table = record(outputs, folder, ngram=scripted_free(), max_new_tokens=limits)
    parts: dict[str, list[Any]] = {"model_tokens": [], "model_acceptance": [], "model_length": []}
    for output in outputs:
        text = [*output.prompt_token_ids, *output.output_token_ids]
        first = len(output.prompt_token_ids)
        rows = rows_of([text[:end] for end in range(first, len(text))], prompt_length=first)
        chain = scripted_model().propose(rows, SamplingMode())
        parts["model_tokens"].append(chain.tokens)
        parts["model_acceptance"].append(chain.acceptance)
        parts["model_length"].append(chain.length)
    columns: dict[str, Any] = {name: torch.cat(values).numpy() for name, values in parts.items()}
    return dataclasses.replace(table, **columns)
