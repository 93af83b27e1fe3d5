"""Simulation: the engine's steps one by one, laws of counting, staleness, costs by price, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hspark.config import SamplingParams
from hspark.core import SOURCE_FREE, SOURCE_MODEL
from hspark.drafters.ngram import NgramDrafter
from hspark.engine import Engine
from hspark.lab.outputs import RecordedOutput
from hspark.lab.record import record
from hspark.lab.simulate import Prepared, simulate
from hspark.lab.simulate_cost import paper_like_cost, slot_ratio_for_price
from hspark.lab.simulate_sizing import Costs, allocate_counts, choose, evaluate
from hspark.lab.simulation import Simulation
from hspark.lab.table import RecordTable
from hspark.policy import CostModel, LinearCost, allocate, choose_budget, evaluate_budget, policy
from hspark.policy.selection import ModelOnly, Proposed
from hspark.sampling import SamplingMode
from tests.drafters.dspark_cases import rows_of
from tests.fixtures import MILD, STAIRS, PatternDrafter, ScriptedTarget, build_engine
from tests.lab.pairs import dspark, engine, jobs, ngram, recorded, target_model
from tests.plain import plain_decode, random_law

V, STOP, K = 12, 5, 4
LAW = random_law(V, seed=3)
POLICIES = ("proposed", "ngram_first", "extension", "model_only", "ngram_only", "vanilla", "expected_length",
            "no_contains", "threshold")  # fmt: skip
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


# -- a scripted pair whose model drafts are often right ------------------------------------------------------------


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table")


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Prepared:
    return Prepared(scripted_table(folder), scripted_free().estimator)


def scripted_engine(name: str, rows: int, **options: Any) -> Engine:
    target = ScriptedTarget(LAW, V, rows=rows, max_length=64)
    return build_engine(target, name, model=scripted_model(), free=scripted_free(), **options)


# -- the engine's steps ----------------------------------------------------------------------------------------------


def trace(decoding: Engine, requests: Any) -> list[dict[str, Any]]:
    """Runs an engine to its end; what every step decided and did, by row."""
    submitted = [decoding.submit(list(prompt), params) for prompt, params in requests]
    steps: list[dict[str, Any]] = []
    inner = decoding._run_verify

    def verify(rows: Any, chain: Any, kept: Any, *rest: Any) -> Any:
        outcome = inner(rows, chain, kept, *rest)
        owners = [owner if owner is not None and decoding._ready(owner) else None for owner in decoding.owners]
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


# -- replicas and requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [*COSTS.values(), OtherCost()])
def test_replicas_do_not_touch_each_other(cost: Any, prepared: Prepared) -> None:
    together = simulate(prepared, "proposed", cost, batch_size=2, replicas=3, by_row=True)
    outputs = np.arange(prepared.table.outputs)
    for replica in range(3):
        part = Prepared(prepared.table.select(outputs[replica::3]), scripted_free().estimator)
        alone = simulate(part, "proposed", cost, batch_size=2)
        for field in ("requests", "context", "budget", "price", "goodput", "seconds", "tokens", "verified", "accepted"):
            column = getattr(together, field)[:, replica]
            np.testing.assert_allclose(column[: alone.steps], getattr(alone, field)[:, 0], rtol=1e-6)
            assert not column[alone.steps :].any()


@dataclasses.dataclass(frozen=True)
class Own(Proposed):
    """A policy from elsewhere, which cannot take a price per row."""

    def __call__(self, model_chain: Any, free_chain: Any, price: Any) -> Any:
        assert price.dim() == 0
        return super().__call__(model_chain, free_chain, price)


def test_policies_from_elsewhere_are_called_replica_by_replica(prepared: Prepared) -> None:
    ours = simulate(prepared, policy("proposed"), CONTEXT, batch_size=2, replicas=3)
    theirs = simulate(prepared, Own(), CONTEXT, batch_size=2, replicas=3)
    assert ours.summary() == theirs.summary()
    np.testing.assert_array_equal(ours.verified, theirs.verified)


def test_requests_are_repeated_shuffled_and_cut(prepared: Prepared) -> None:
    tokens = int(prepared.table.output_length.sum())
    assert simulate(prepared, "vanilla", MILD, batch_size=4, copies=3).tokens.sum() == 3 * tokens
    runs = [simulate(prepared, "proposed", MILD, shuffle=seed, by_row=True) for seed in (1, 1, 2)]
    orders = [run.by_row.output[:, 0, 0].tolist() for run in runs if run.by_row is not None]
    assert orders[0] == orders[1] != orders[2]
    assert [run.tokens.sum() for run in runs] == [tokens] * 3
    cut = simulate(prepared, "proposed", MILD, batch_size=2, replicas=2, max_steps=5)
    assert cut.budget.shape == (5, 2)
    assert cut.steps == 10


def test_long_runs_are_put_together_from_their_blocks(prepared: Prepared) -> None:
    once = simulate(prepared, "vanilla", CONTEXT, by_row=True)
    often = simulate(prepared, "vanilla", CONTEXT, copies=8, by_row=True)
    assert often.steps == 8 * once.steps > 1024
    assert often.by_row is not None
    assert once.by_row is not None
    for name in ("context", "seconds", "tokens"):
        np.testing.assert_array_equal(getattr(often, name), np.tile(getattr(once, name), (8, 1)))
    np.testing.assert_array_equal(often.by_row.position, np.tile(once.by_row.position, (8, 1, 1)))


# -- laws ------------------------------------------------------------------------------------------------------------


@given(order=st.permutations(range(10)), count=st.integers(1, 10), rows=st.integers(1, 4))
def test_tokens_and_steps_are_those_of_walking_the_outputs(order: list[int], count: int, rows: int) -> None:
    """With every slot verified, a step moves on by the accepted length and one: nothing else decides."""
    whole = scripted_prepared()
    table = whole.table.select(order[:count])
    run = simulate(Prepared(table, scripted_free().estimator), "ngram_only", MILD, batch_size=rows, budget="all")
    steps = 0
    for output in range(table.outputs):
        at, end = table.start[output], table.start[output + 1]
        while at < end:
            at += min(int(table.free_accepted[at]), int(end - at) - 1) + 1
            steps += 1
    assert run.row_steps == steps
    assert run.acceptance_length == pytest.approx(table.positions / steps)
    assert run.tokens.sum() == table.positions
    assert (run.tokens == run.accepted + run.requests).all()


@functools.cache
def scripted_prepared() -> Prepared:
    import tempfile

    return Prepared(scripted_table(Path(tempfile.mkdtemp())), scripted_free().estimator)


@st.composite
def batches(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Survivals float32 [P, B, W], non-increasing and full of ties, and lengths int64 [P, B]."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)))
    levels = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
    flat = draw(st.lists(levels, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    survival = -np.sort(-np.array(flat, dtype=np.float32).reshape(shape), axis=2)
    lengths = draw(st.lists(st.integers(0, shape[2]), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    length = np.array(lengths).reshape(shape[:2])
    return survival * (np.arange(shape[2]) < length[:, :, None]), length


@given(batch=batches(), budget=st.integers(-1, 30))
def test_allocation_is_the_devices(batch: tuple[np.ndarray, np.ndarray], budget: int) -> None:
    survival, length = batch
    budgets = budget - np.arange(survival.shape[0])
    kept = allocate_counts(survival, length, budgets)
    for replica, own in enumerate(budgets.tolist()):
        expected = allocate(torch.from_numpy(survival[replica]), torch.from_numpy(length[replica]), own)
        assert kept[replica].tolist() == expected.tolist()


@given(batch=batches(), cost=st.sampled_from([*COSTS.values(), OtherCost()]), budget=st.integers(0, 30))
def test_sizing_is_the_hosts(batch: tuple[np.ndarray, np.ndarray], cost: Any, budget: int) -> None:
    survival, _ = batch
    replicas, rows, _ = survival.shape
    requests = np.array([1 + replica % rows for replica in range(replicas)])
    context = 10 * requests
    chosen = choose(survival, requests, Costs(cost), context)
    fixed = evaluate(survival, requests, Costs(cost), context, budget)
    for replica in range(replicas):
        given_ = (torch.from_numpy(survival[replica]), int(requests[replica]), cost)
        best = choose_budget(*given_, int(context[replica]))
        other = evaluate_budget(*given_, budget, int(context[replica]))
        assert tuple(field[replica] for field in chosen) == pytest.approx(tuple(best), rel=1e-12)
        assert tuple(field[replica] for field in fixed) == pytest.approx(tuple(other), rel=1e-12)


def test_seconds_are_the_cost_of_the_slots_that_were_verified(prepared: Prepared) -> None:
    run = simulate(prepared, "proposed", CONTEXT, batch_size=3, budget="all")
    for number in range(run.steps):
        n, b, context = (int(getattr(run, name)[number, 0]) for name in ("requests", "verified", "context"))
        assert run.seconds[number, 0] == pytest.approx(float(CONTEXT.step_cost(n, [b], context)[0]))
    assert run.tokens_per_second == pytest.approx(run.tokens.sum() / run.seconds.sum())
    assert run.verified_per_step == pytest.approx(run.verified.sum() / run.steps)


# -- staleness -------------------------------------------------------------------------------------------------------


def test_fresh_sizing_loses_nothing_to_itself_and_stale_sizing_does(prepared: Prepared) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "copies": 4, "shuffle": 0}
    run = simulate(prepared, "proposed", CONTEXT, staleness=True, by_row=True, **settings)
    stale = run.staleness
    assert stale is not None
    live = run.requests > 0
    lost = stale.goodput_lost[live]
    assert (lost > -1e-9).all()
    assert lost.mean() > 0
    assert lost[(stale.fresh_budget == run.budget)[live]] == pytest.approx(0.0, abs=1e-9)
    assert (stale.known_requests <= run.requests).all()
    assert stale.batch_miscount[~live].sum() == 0
    full = run.steady()
    assert full.staleness is not None
    assert np.isnan(full.staleness.miscount[run.requests[:, 0] < 4]).all()
    assert 0 < full.steps < run.steps


def test_miscounts_by_hand(prepared: Prepared) -> None:
    """One row, so the fresh and the stale survivals of a step are those of two positions of one chain of steps."""
    run = simulate(prepared, ModelOnly(), LinearCost(1.0, 1e-6), budget_delay=1, staleness=True, by_row=True)
    assert run.staleness is not None
    assert run.by_row is not None
    survival = prepared.model.survival.sum(dim=1).numpy()
    output, position = run.by_row.output[:, 0, 0], run.by_row.position[:, 0, 0]
    drafted = run.by_row.drafted[:, 0, 0]
    at = prepared.table.start[output] + position
    whole = drafted == prepared.model.length.numpy()[at]  # not cut by the limit
    checked = 0
    for step in range(1, len(at)):
        miscount = run.staleness.miscount[step, 0, 0]
        if output[step - 1] != output[step]:
            assert np.isnan(miscount)
        elif whole[step] and whole[step - 1]:
            assert miscount == pytest.approx(survival[at[step - 1]] - survival[at[step]], abs=1e-5)
            checked += 1
    assert checked > 10


# -- costs by price --------------------------------------------------------------------------------------------------


def test_a_cost_for_a_wanted_price(prepared: Prepared) -> None:
    cost = paper_like_cost(prepared, {2: 0.1, 6: 0.4}, base=0.02, row_steps=2000)
    for size, price in ((2, 0.1), (6, 0.4)):
        run = simulate(prepared, "proposed", cost, batch_size=size, copies=60, shuffle=5, max_steps=400)
        assert run.steady(3).mean_price == pytest.approx(price, rel=0.1)
    assert float(cost.step_cost(2, [0])[0]) == 0.02
    ratio = slot_ratio_for_price(prepared, 0.1, batch_size=2, row_steps=2000)
    assert cost.slot_cost(2, 0) == pytest.approx(0.02 * ratio)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "policy='best' is unknown"),
        ({"batch_size": 0}, "batch_size=0 is not usable"),
        ({"budget": "some"}, "budget='some' is not usable"),
        ({"budget": -1}, "budget=-1 is not usable"),
        ({"budget_delay": -1}, "budget_delay=-1 is not usable"),
        ({"copies": 0}, "copies=0 is not usable"),
        ({"replicas": 11}, "replicas=11 is more than the 10 requests"),
        ({"max_steps": 0}, "max_steps=0 is not usable"),
        ({"shuffle": -1}, "shuffle=-1 is not usable"),
        ({"staleness": True, "budget": "all"}, "staleness=True with budget='all'"),
        ({"staleness": True, "budget_delay": 0}, "staleness=True with budget='adaptive' and budget_delay=0"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str, prepared: Prepared) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(prepared, options.pop("policy", "proposed"), MILD, **options)


def test_policies_without_their_drafter_are_refused(tmp_path: Path) -> None:
    table = record(recorded("qwen3", 2), tmp_path)
    with pytest.raises(ValueError, match="policy='model_only' needs a model drafter's chains"):
        simulate(table, "model_only", MILD)
    assert simulate(table, "proposed", MILD).tokens.sum() == table.positions


def test_prices_that_cannot_be_met_are_refused(prepared: Prepared) -> None:
    with pytest.raises(ValueError, match="prices is empty"):
        paper_like_cost(prepared, {})
    with pytest.raises(ValueError, match=r"price=-0\.1 is not usable"):
        slot_ratio_for_price(prepared, -0.1, batch_size=2)
    with pytest.raises(ValueError, match=r"price=500\.0 is not reached with batch_size=2"):
        slot_ratio_for_price(prepared, 500.0, batch_size=2, row_steps=200)
