"""Simulation takes the engine's steps, one by one, of a scripted pair and of a real one."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hspark.core import SOURCE_FREE, SOURCE_MODEL
from hspark.engine import Engine
from hspark.lab.record import record
from hspark.lab.simulate import Prepared, simulate
from hspark.lab.simulation import Simulation
from tests.fixtures import MILD, ScriptedTarget, build_engine
from tests.lab.pairs import dspark, engine, jobs, ngram, recorded, target_model
from tests.lab.scripted import CONTEXT, COSTS, LAW, STOP, V, scripted_free, scripted_jobs, scripted_model

POLICIES = ("proposed", "ngram_first", "extension", "model_only", "ngram_only", "vanilla", "expected_length",
            "no_contains", "threshold")  # fmt: skip


def scripted_engine(name: str, rows: int, **options: Any) -> Engine:
    target = ScriptedTarget(LAW, V, rows=rows, max_length=64)
    return build_engine(target, name, model=scripted_model(), free=scripted_free(), **options)


def trace(decoding: Engine, requests: Any) -> list[dict[str, Any]]:
    """Runs an engine to its end; what every step decided and did, by row."""
    submitted = [decoding.submit(list(prompt), params) for prompt, params in requests]
    steps: list[dict[str, Any]] = []
    inner = decoding._run_verify

    def verify(rows: Any, chain: Any, kept: Any, *rest: Any) -> Any:
        outcome = inner(rows, chain, kept, *rest)
        owners = [owner if owner is not None and decoding.ready(owner) else None for owner in decoding.owners]
        places = [0 if owner is None else len(owner.token_ids) for owner in owners]
        steps.append({"owners": owners, "places": places, "outcome": outcome, "decision": decoding.decision})
        return outcome

    decoding._run_verify = verify
    while not all(request.done for request in submitted):
        decoding.step()
    return steps


def check_same(steps: list[dict[str, Any]], run: Simulation) -> None:
    """Step by step: budgets, prices, expectations, and each row's request, place, chain, slots and acceptance."""
    assert run.by_row is not None
    assert run.steps == len(steps)
    for number, step in enumerate(steps):
        decision, outcome = step["decision"], step["outcome"]
        assert run.budget[number, 0] == decision.budget
        for name, value in (("price", decision.price), ("goodput", decision.goodput)):
            assert getattr(run, name)[number, 0] == pytest.approx(value, rel=1e-5)
        assert run.expected[number, 0] == pytest.approx(decision.expected_tokens, rel=1e-5)
        for row, (owner, place) in enumerate(zip(step["owners"], step["places"], strict=True)):
            seen = {f.name: int(getattr(run.by_row, f.name)[number, 0, row]) for f in dataclasses.fields(run.by_row)}
            if owner is None:
                assert seen["output"] == -1
                continue
            drafted = int(outcome.drafted[row])
            remaining = len(owner.token_ids) - place
            assert seen == {
                "output": owner.number,
                "position": place,
                "source": int(outcome.chain_sources[row, 0]) if drafted else 0,
                "reason": int(outcome.reason[row]),
                "drafted": drafted,
                "kept": int(outcome.kept[row]),
                "accepted": min(int(outcome.accepted[row]), remaining - 1),
            }


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("rows", "cost", "budget", "delay"),
    [
        (1, "line", "adaptive", 2),
        (3, "context", "adaptive", 2),
        (3, "stairs", "adaptive", 1),
        (2, "graphs", "adaptive", 0),
        (3, "line", "all", 2),
        (3, "line", 5, 2),
    ],
)
def test_every_step_is_the_engines(
    name: str, rows: int, cost: str, budget: Any, delay: int, prepared: Prepared
) -> None:
    settings: dict[str, Any] = {"budget": budget, "budget_delay": delay}
    steps = trace(scripted_engine(name, rows, cost=COSTS[cost], **settings), scripted_jobs())
    check_same(steps, simulate(prepared, name, COSTS[cost], batch_size=rows, by_row=True, **settings))


def test_the_scripted_pair_has_every_kind_of_step(prepared: Prepared) -> None:
    """What makes the comparison above worth something."""
    run = simulate(prepared, "proposed", MILD, batch_size=3, by_row=True)
    assert run.by_row is not None
    busy = run.by_row.output >= 0
    assert {1, 2, 3} <= set(run.by_row.reason[busy].tolist())
    assert {SOURCE_MODEL, SOURCE_FREE} <= set(run.by_row.source[busy].tolist())
    assert (run.by_row.kept < run.by_row.drafted).any()
    assert (run.by_row.accepted > 0).any()
    stopped = prepared.table.token[prepared.table.start[1:] - 1] == STOP
    assert stopped.any()
    extended = simulate(prepared, "extension", MILD, batch_size=3, by_row=True)
    assert extended.by_row is not None
    assert 4 in extended.by_row.reason[extended.by_row.output >= 0]


@pytest.mark.parametrize("name", ["proposed", "ngram_first", "extension", "model_only", "ngram_only", "vanilla"])
@pytest.mark.parametrize("rows", [1, 3])
def test_recorded_outputs_of_a_real_pair_replay_as_its_engine_runs(name: str, rows: int, tmp_path: Path) -> None:
    outputs = recorded("qwen3", 5)
    model, limits = copy.deepcopy(target_model("qwen3")), [params.max_new_tokens for _, params in jobs(5)]
    table = record(
        outputs, tmp_path, ngram=ngram(), model=model, drafter=dspark("qwen3"), max_new_tokens=limits, blocks=7
    )
    steps = trace(engine("qwen3", rows, name, cost=CONTEXT), jobs(5))
    check_same(steps, simulate(Prepared(table, ngram().estimator), name, CONTEXT, batch_size=rows, by_row=True))
