"""A benchmark of a tiny pair, replayed from its record: the same steps, and refusals where that cannot be."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hspark.drafters.ngram import NgramDrafter
from hspark.lab.bench import run_bench
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.observer import Observer
from hspark.lab.outputs import RecordedOutput
from hspark.lab.record import record
from hspark.lab.runs import BenchPrompt, GroupRun
from hspark.lab.studies import LeftOutError, run_study
from hspark.lab.study import Study
from hspark.lab.table import RecordTable
from hspark.models import LoadedTarget
from hspark.policy import AcceptanceEstimator, LinearCost
from tests.lab.pairs import dspark, jobs, target_model

COST = LinearCost({1: 1.0, 3: 1.3}, {1: 0.02, 3: 0.05}, per_context_token=1e-4)
ARMS = ("vanilla", "ngram_only", "ngram_only:all", "model_only", "proposed", "transformers")
TOKENS = 24


class Keep(Observer):
    """Remembers what vanilla decoding emits at batch 1."""

    def __init__(self) -> None:
        self.outputs: list[list[int]] = []
        self.sizes: list[int] = []
        self.size = 0

    def begin(self, arm: str, batch_size: int, prompts: Any) -> None:
        self.size = batch_size

    def end(self, arm: str, run: GroupRun) -> None:
        if arm == "vanilla" and self.size == 1:
            self.outputs += run.token_ids


@functools.cache
def measured() -> tuple[dict[str, Any], RecordTable]:
    """A benchmark's report, and the table of its requests."""
    prompts = [BenchPrompt(f"p{i}", "edit", list(prompt)) for i, (prompt, _) in enumerate(jobs(7))]
    model, seen = target_model("qwen3"), Keep()
    settings = BenchSettings(
        arms=ARMS, batch_sizes=(1, 3), max_new_tokens=TOKENS, cost=COST, drafter="given", estimator="smollm2-135m"
    )
    target = LoadedTarget("tiny", copy.deepcopy(model), None, (), None)
    report = run_bench(target, prompts, settings, drafter=dspark("qwen3"), observer=seen)
    outputs = [
        RecordedOutput(tuple(prompt.token_ids), tuple(ids), 0.0, prompt.task_id)
        for prompt, ids in zip(prompts, seen.outputs, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        table = record(
            outputs,
            Path(folder) / "table",
            ngram=NgramDrafter(AcceptanceEstimator.preset("smollm2-135m")),
            model=copy.deepcopy(model),
            drafter=dspark("qwen3"),
            max_new_tokens=TOKENS,
        )
    return report.to_dict(), table


def studied(bench: dict[str, Any], table: RecordTable) -> Study:
    return run_study("against_engine", table, bench=bench, cost=COST)


def test_tokens_per_step_are_those_of_the_benchmark() -> None:
    """In float32 with one cost for both there is nothing left to chance."""
    report, table = measured()
    study = studied(report, table)
    found: list[dict[str, Any]] = [dict(zip(study.tables[0].columns, row, strict=True)) for row in study.tables[0].rows]
    drafting = [name for name in ARMS if name not in ("vanilla", "transformers")]
    assert [(row["batch"], row["policy"]) for row in found] == [(size, name) for size in (1, 3) for name in drafting]
    for row in found:
        arm = next(
            arm
            for batch in report["batches"]
            for arm in batch["arms"]
            if (batch["batch_size"], arm["name"]) == (row["batch"], row["policy"])
        )
        assert row["tokens per step, simulated"] == pytest.approx(arm["acceptance_length"], rel=1e-9)
        assert row["tokens/s, measured"] == arm["decode_tokens_per_second"]
        first = next(other for other in found if other["batch"] == row["batch"])
        ratio = row["tokens/s, simulated"] / first["tokens/s, simulated"]
        assert row["speed-up, simulated"] == pytest.approx(ratio)
    assert max(row["measured"] for row in found) > 1.5  # drafts were accepted
    assert study.data["worst_length"] < 1e-9


def test_another_cost_is_seen() -> None:
    """The negative control: sized by another cost than the engine's the simulation leaves it."""
    report, table = measured()
    other = copy.deepcopy(report)
    for each in other["header"]["costs"]:
        each |= {"per_slot": [[1, 0.6], [3, 0.6]]}
    assert studied(other, table).data["worst_length"] > 0.01


def edited(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    report = copy.deepcopy(measured()[0])
    change(report)
    return report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("header"), "no header with costs"),
        (lambda r: r["header"]["settings"].update(temperature=1.0), "only greedy benchmarks"),
        (lambda r: r["header"]["settings"].update(max_new_tokens=9), "after 9 tokens, and the table 'p0' after 24"),
        (lambda r: r["header"]["settings"].update(estimator="qwen3-4b"), "--min-match 5"),
        (lambda r: r["batches"][0]["runs"]["groups"].append(["p9"]), "1 of its requests are not in the table, 'p9'"),
        (lambda r: r["header"].update(costs=[]), "no policy with drafts and a measured cost"),
    ],
)
def test_what_cannot_be_replayed_is_refused(change: Any, message: str) -> None:
    with pytest.raises(LeftOutError, match=message):
        studied(edited(change), measured()[1])


def test_without_a_benchmark_it_is_left_out() -> None:
    with pytest.raises(LeftOutError, match="--bench"):
        run_study("against_engine", measured()[1], cost=COST)
