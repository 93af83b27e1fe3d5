"""Allocation: the best slots for the budget, as a prefix of each chain, whatever the ties."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspark.policy import allocate
from tests.assertions import assert_one_graph
from tests.strategies import survivals


def _summed(survival: Tensor, kept: list[int]) -> float:
    return sum(float(row[:count].double().sum()) for row, count in zip(survival, kept, strict=True))


@given(survivals(max_batch=3), st.integers(0, 14))
@settings(max_examples=60)
def test_no_other_counts_have_a_larger_sum(drawn: tuple[Tensor, Tensor], budget: int) -> None:
    survival, length = drawn
    kept = allocate(survival, length, budget)
    assert kept.dtype == torch.int64
    assert bool(((kept >= 0) & (kept <= length)).all())
    # Neither over the budget nor under it while slots are left.
    assert int(kept.sum()) == min(budget, int(length.sum()))
    choices = itertools.product(*(range(int(n) + 1) for n in length))
    best = max(_summed(survival, list(counts)) for counts in choices if sum(counts) <= budget)
    assert _summed(survival, kept.tolist()) == best


@given(survivals(), st.integers(0, 18))
@settings(max_examples=60)
def test_kept_slots_are_the_ones_that_outrank_the_rest(drawn: tuple[Tensor, Tensor], budget: int) -> None:
    """Counts say the same as marking the best slots one by one: marks never skip a slot, so no chain has a hole."""
    survival, length = drawn
    slots = [(-float(survival[b, k]), k, b) for b in range(len(length)) for k in range(int(length[b]))]
    best = {(b, k) for _, k, b in sorted(slots)[:budget]}
    kept = allocate(survival, length, budget).tolist()
    assert best == {(b, k) for b, count in enumerate(kept) for k in range(count)}


@given(survivals(), st.integers(0, 18), st.data())
@settings(max_examples=60)
def test_a_slot_is_kept_whatever_comes_after_it_in_its_row(
    drawn: tuple[Tensor, Tensor], budget: int, data: st.DataObject
) -> None:
    """What rejection verification of sampled drafts needs: later survivals of a row cannot touch its earlier slots."""
    survival, length = drawn
    row = data.draw(st.integers(0, len(length) - 1))
    slot = data.draw(st.integers(0, survival.shape[1] - 1))
    changed = survival.clone()
    changed[row, slot + 1 :] = changed[row, slot + 1 :] * data.draw(st.sampled_from([0.0, 0.5]))
    before, after = (int(allocate(values, length, budget)[row]) for values in (survival, changed))
    assert (before > slot) == (after > slot)


def test_worked_example() -> None:
    survival = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.6, 0.4]])
    assert allocate(survival, torch.tensor([3, 3]), 4).tolist() == [2, 2]


def test_ties_go_to_the_earlier_slot_and_then_to_the_lower_row() -> None:
    survival, length = torch.ones(3, 4), torch.tensor([4, 4, 4])
    expected = {0: [0, 0, 0], 1: [1, 0, 0], 4: [2, 1, 1], 6: [2, 2, 2], 11: [4, 4, 3], 99: [4, 4, 4]}
    assert {budget: allocate(survival, length, budget).tolist() for budget in expected} == expected


def test_slots_of_survival_zero_are_slots_and_padding_is_not() -> None:
    survival = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert allocate(survival, torch.tensor([2, 1]), 5).tolist() == [2, 1]


@given(survivals(), st.integers(0, 16), st.data())
@settings(max_examples=60)
def test_a_chain_ends_before_its_first_nan(drawn: tuple[Tensor, Tensor], budget: int, data: st.DataObject) -> None:
    survival, length = drawn
    first = torch.tensor([data.draw(st.integers(0, survival.shape[1])) for _ in length])
    broken = survival.clone()
    for row, slot in enumerate(first.tolist()):
        broken[row, slot : slot + 1] = float("nan")
    expected = allocate(survival, torch.minimum(length, first), budget)
    assert allocate(broken, length, budget).tolist() == expected.tolist()


@pytest.mark.parametrize("budget", [-1, torch.tensor(-5)])
def test_a_budget_below_zero_keeps_nothing(budget: int | Tensor) -> None:
    assert allocate(torch.ones(2, 2), torch.tensor([2, 2]), budget).tolist() == [0, 0]


def test_one_graph_serves_every_budget() -> None:
    survival, length = torch.rand(4, 7).cumprod(dim=1), torch.tensor([7, 0, 3, 7])
    kept = assert_one_graph(allocate, survival, length, torch.tensor(5))
    assert kept.tolist() == allocate(survival, length, 5).tolist()
    assert_one_graph(allocate, survival[:, :0], torch.zeros(4, dtype=torch.int64), torch.tensor(5))


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"use \[B, W\] and \[B\]"):
        allocate(torch.ones(3, 2), torch.ones(2, dtype=torch.int64), 1)
