"""Simulation: replicas and requests, laws of counting, staleness, costs by price, and refusals."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.lab.record import record
from hspark.lab.simulate import Prepared, simulate
from hspark.lab.simulate_cost import paper_like_cost, slot_ratio_for_price
from hspark.policy import LinearCost, policy
from hspark.policy.selection import ModelOnly, Proposed
from tests.fixtures import MILD
from tests.lab.pairs import recorded
from tests.lab.scripted import CONTEXT, COSTS, OtherCost, scripted_free, scripted_table

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
