"""Slots and budgets of many replicas at once are those that the device and the host choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspark.lab.simulate_sizing import Costs, allocate_counts, choose, evaluate
from hspark.policy import allocate, choose_budget, evaluate_budget
from tests.lab.scripted import COSTS, OtherCost


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
