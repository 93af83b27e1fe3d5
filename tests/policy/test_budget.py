"""Sizing: the best budget of all, its price, and survivals that are two steps old."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspark.policy import CostModel, LinearCost, StepCostTable, SurvivalHistory, choose_budget, evaluate_budget
from tests.strategies import cost_models, survivals


@given(survivals(), cost_models(), st.integers(1, 6), st.sampled_from([0, 500]), st.none() | st.integers(0, 5))
@settings(max_examples=60)
def test_equals_trying_every_budget(
    drawn: tuple[Tensor, Tensor], cost: CostModel, requests: int, context: int, maximum: int | None
) -> None:
    survival, _ = drawn
    slots = sorted((s for row in survival.tolist() for s in row if s > 0), reverse=True)
    tried = {}
    for b in range(len(slots) + 1 if maximum is None else min(maximum, len(slots)) + 1):
        expected = requests + sum(slots[:b])
        tried[b] = expected / float(cost.step_cost(requests, [b], context)[0])
    decision = choose_budget(survival, requests, cost, context, maximum=maximum)
    assert decision.goodput == pytest.approx(max(tried.values()), rel=1e-12)
    assert tried[decision.budget] == pytest.approx(max(tried.values()), rel=1e-12)
    # The price by its definition, with the budget's own goodput.
    assert decision.price == pytest.approx(tried[decision.budget] * cost.slot_cost(requests, decision.budget))
    assert decision.expected_tokens == pytest.approx(requests + sum(slots[: decision.budget]))
    fixed = evaluate_budget(survival, requests, cost, decision.budget, context)
    assert fixed == pytest.approx(decision)


@given(survivals(), st.integers(1, 4))
@settings(max_examples=60)
def test_with_a_linear_cost_every_chosen_slot_beats_the_price(drawn: tuple[Tensor, Tensor], requests: int) -> None:
    """Equation 2: a slot improves goodput iff its survival exceeds the price, so b* counts exactly those."""
    cost = LinearCost(1.0, 0.125)
    decision = choose_budget(drawn[0], requests, cost)
    assert decision.price == pytest.approx(decision.goodput * 0.125)
    ranked = drawn[0].reshape(-1).sort(descending=True).values.double()
    tolerance = 1e-9
    assert bool((ranked[: decision.budget] >= decision.price - tolerance).all())
    assert bool((ranked[decision.budget :] <= decision.price + tolerance).all())


def test_a_flat_cost_verifies_everything_and_a_steep_one_nothing() -> None:
    survival = torch.tensor([[0.9, 0.4, 0.01], [0.2, 0.1, 0.0]])
    flat = choose_budget(survival, 2, StepCostTable([64], [1.0]))
    assert (flat.budget, flat.price) == (5, 0.0)
    assert choose_budget(survival, 2, LinearCost(1.0, 0.0)).budget == 5
    assert choose_budget(survival, 2, LinearCost(1.0, 10.0)).budget == 0


def test_a_staircase_has_many_peaks_and_the_best_is_found() -> None:
    """One step up from b = 0 the goodput falls, and two stairs further it is highest."""
    cost = StepCostTable([1, 2, 16], [1.0, 2.5, 2.6])
    decision = choose_budget(torch.full((1, 15), 0.9), 1, cost)
    assert decision.budget == 15
    assert decision.price == pytest.approx((1 + 15 * 0.9) / 2.6 * 0.1 / 14)


def test_the_smallest_budget_wins_among_equals() -> None:
    """Goodput 1 at every budget: each slot adds one token and one second."""
    assert choose_budget(torch.ones(2, 3), 2, LinearCost(2.0, 1.0))[0] == 0
    plateau = StepCostTable([1, 2, 3, 4], [2.0, 2.0, 3.0, 4.0])
    assert choose_budget(torch.ones(3), 1, plateau)[0] == 1


def test_sums_are_exact_beyond_single_precision() -> None:
    decision = choose_budget(torch.tensor([0.5, 0.5]), 2**24, LinearCost(1.0, 0.0))
    assert decision.budget == 2
    assert decision.expected_tokens == 2**24 + 1


def test_integers_of_arrays_count_as_integers() -> None:
    survival, cost = np.array([0.5, 0.5]), LinearCost(1.0, 0.25)
    two: Any = np.int64(2)
    one: Any = torch.tensor(1)
    assert choose_budget(survival, two, cost, two, maximum=one) == choose_budget(survival, 2, cost, 2, maximum=1)
    assert evaluate_budget(survival, two, cost, one) == evaluate_budget(survival, 2, cost, 1)


def test_no_slots_or_no_room() -> None:
    cost = LinearCost(2.0, 0.25)
    expected = (0, 3 / 2 * 0.25, 1.5, 3.0)
    assert choose_budget(torch.zeros(3, 4), 3, cost) == pytest.approx(expected)
    assert choose_budget(torch.zeros(0), 3, cost) == pytest.approx(expected)
    assert choose_budget(torch.ones(3, 4), 3, cost, maximum=0) == pytest.approx(expected)


def test_arrays_lists_and_nan() -> None:
    cost = LinearCost(1.0, 0.0)
    for values in ([[0.5, 0.25]], np.array([[0.5, 0.25]]), torch.tensor([0.25, 0.5, float("nan"), 0.0])):
        assert choose_budget(values, 1, cost)[:1] == (2,)


def test_a_fixed_budget_beyond_the_slots_is_reported_as_given() -> None:
    decision = evaluate_budget(torch.tensor([0.5, 0.5]), 1, LinearCost(1.0, 0.5), 10)
    assert decision == pytest.approx((10, 0.5, 1.0, 2.0))


def test_sizing_is_fast_for_large_batches() -> None:
    survival = torch.rand(4096, 15, generator=torch.Generator().manual_seed(0)).cumprod(dim=1)
    cost = StepCostTable([64 * i for i in range(1, 1100)], [1.0 + 0.01 * i for i in range(1, 1100)])
    begun = time.perf_counter()
    choose_budget(survival, 4096, cost)
    # Far above what it takes (about 20 ms), far below a Python loop over 61,440 budgets.
    assert time.perf_counter() - begun < 1.0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.ones(2), 0), {}, "requests=0"),
        ((torch.ones(2), 1.5), {}, "requests=1.5"),
        ((torch.ones(2), 1), {"maximum": -1}, "maximum=-1"),
        ((torch.ones(2), 1), {"context_tokens": -1}, "context_tokens=-1"),
    ],
)
def test_bad_values_are_named(arguments: tuple[Tensor, int], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_budget(*arguments, LinearCost(1.0, 0.1), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget=-1"):
        evaluate_budget(torch.ones(2), 1, LinearCost(1.0, 0.1), -1)


# Stale survivals


def test_a_step_is_sized_from_survivals_two_steps_old() -> None:
    history = SurvivalHistory(rows=1, width=2, delay=2)
    history.claim(0, step=0)
    seen = []
    for step in range(5):
        seen.append(history.read(step)[0].tolist())
        history.push(step, torch.full((1, 2), step / 8))
    assert seen == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.125, 0.125], [0.25, 0.25]]


def test_a_recycled_row_starts_at_survival_one() -> None:
    history = SurvivalHistory(rows=2, width=1, delay=2)
    history.claim(0, step=0)
    history.claim(1, step=0)
    for step in range(4):
        history.push(step, torch.tensor([[0.25], [0.5]]))
    assert history.read(4).tolist() == [[0.25], [0.5]]
    history.release(0)
    assert history.read(4).tolist() == [[0.0], [0.5]]
    # The new request's first step is 5: steps 5 and 6 are sized from steps that the previous owner took part in.
    history.claim(0, step=5)
    history.push(4, torch.tensor([[0.25], [0.5]]))
    assert history.read(5).tolist() == [[1.0], [0.5]]
    history.push(5, torch.tensor([[0.75], [0.5]]))
    assert history.read(6).tolist() == [[1.0], [0.5]]
    assert history.read(7).tolist() == [[0.75], [0.5]]


def test_a_late_report_counts_as_unknown_and_old_ones_are_dropped() -> None:
    history = SurvivalHistory(rows=1, width=1, delay=1)
    history.claim(0, step=0)
    assert history.read(3).tolist() == [[1.0]]
    for step in range(100):
        history.push(step, torch.tensor([[0.5]]))
    assert history.read(100).tolist() == [[0.5]]
    assert len(history._steps) == 2


def test_without_delay_a_step_reads_its_own_survivals() -> None:
    history = SurvivalHistory(rows=1, width=1, delay=0)
    history.claim(0, step=3)
    history.push(3, torch.tensor([[0.5]]))
    assert history.read(3).tolist() == [[0.5]]


def test_history_checks_its_arguments() -> None:
    for arguments in ((0, 1, 2), (1, -1, 2), (1, 1, -1)):
        with pytest.raises(ValueError, match="is not usable"):
            SurvivalHistory(*arguments)
    with pytest.raises(ValueError, match=r"use \(1, 2\)"):
        SurvivalHistory(1, 2).push(0, torch.ones(2, 2))
