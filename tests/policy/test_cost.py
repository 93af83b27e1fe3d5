"""Cost models: the formula, the graph limit, stairs and slopes, profiling with a fake clock, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspark.policy import CostModel, LinearCost, StepCostTable, load_cost, profile_cost
from tests.strategies import cost_models


def _seconds(cost: CostModel, requests: int, budgets: list[int], context: float = 0) -> list[float]:
    return cost.step_cost(requests, budgets, context).tolist()


def test_the_line() -> None:
    cost = LinearCost(0.5, 0.25, 0.001)
    assert _seconds(cost, 3, [0, 1, 4]) == [0.5, 0.75, 1.5]
    assert _seconds(cost, 3, [0, 4], context=1000) == [1.5, 2.5]
    assert cost.slot_cost(3, 7) == 0.25
    assert cost.step_cost(3, torch.arange(2)).dtype == torch.float64


def test_entries_per_request_count_are_interpolated_and_held() -> None:
    cost = LinearCost({2: 1.0, 6: 3.0}, {2: 0.5, 4: 0.25})
    assert [_seconds(cost, n, [0])[0] for n in (1, 2, 3, 6, 9)] == [1.0, 1.0, 1.5, 3.0, 3.0]
    assert [cost.slot_cost(n, 0) for n in (1, 3, 8)] == [0.5, 0.375, 0.25]


def test_above_the_graph_limit_the_larger_of_line_and_eager_step_holds() -> None:
    """Equation 4: below the limit of 8 tokens the line alone, above it the maximum, context added to both."""
    cost = LinearCost(1.0, 0.125, 0.001, graph_limit=8, eager={4: 3.0, 12: 5.0, 16: 5.5})
    assert _seconds(cost, 4, [0, 4, 5, 8]) == [1.0, 1.5, 4.25, 5.0]
    assert _seconds(cost, 4, [4, 8], context=1000) == [2.5, 6.0]
    assert cost.slot_cost(4, 4) == 0.125
    assert cost.slot_cost(4, 7) == 0.25
    steep = LinearCost(1.0, 2.0, graph_limit=8, eager={4: 3.0, 12: 5.0})
    assert _seconds(steep, 4, [8]) == [17.0]
    assert steep.slot_cost(4, 8) == 2.0


def test_a_staircase_charges_for_the_padded_size() -> None:
    cost = StepCostTable([2, 4, 8], [1.0, 1.5, 3.5])
    assert _seconds(cost, 1, list(range(9))) == [1.0, 1.0, 1.5, 1.5, 3.5, 3.5, 3.5, 3.5, 4.0]
    assert _seconds(StepCostTable([2, 4], [1.0, 1.5], 0.001), 1, [0, 1], context=100) == [1.1, 1.1]


def test_interpolation_is_for_engines_that_do_not_pad() -> None:
    cost = StepCostTable([2, 4, 8], [1.0, 1.5, 3.5], interpolate=True)
    assert _seconds(cost, 1, [0, 1, 2, 3, 5, 7, 9]) == [1.0, 1.0, 1.25, 1.5, 2.5, 3.5, 4.5]


@pytest.mark.parametrize("interpolate", [False, True])
def test_the_slot_cost_is_the_slope_around_the_budget(interpolate: bool) -> None:
    cost = StepCostTable([2, 4, 8, 9], [1.0, 1.5, 3.5, 3.0], interpolate=interpolate)
    inside, at_edge = 2.0 / 4, 2.5 / 6
    assert [cost.slot_cost(1, b) for b in (4, 5, 6)] == [inside] * 3
    assert cost.slot_cost(1, 3) == pytest.approx(at_edge)
    assert [cost.slot_cost(1, b) for b in (0, 1)] == [0.25, 0.25]  # at or below the first size: the first slope
    assert cost.slot_cost(1, 8) == cost.slot_cost(1, 20) == 0.0  # the last slope falls: never a negative price
    assert StepCostTable([4], [1.0], interpolate=interpolate).slot_cost(1, 9) == 0.0


def test_no_step_is_cheaper_than_what_was_measured_at_an_end() -> None:
    for interpolate in (False, True):
        cost = StepCostTable([2, 4], [2.0, 1.0], interpolate=interpolate)
        assert min(_seconds(cost, 1, list(range(50)))) == 1.0
    assert _seconds(StepCostTable([10, 11], [1.0, 9.0], interpolate=True), 1, [0]) == [1.0]


@given(cost_models(), st.integers(1, 6), st.floats(0, 1e4))
@settings(max_examples=60)
def test_costs_are_positive_and_context_adds_its_share(cost: CostModel, requests: int, context: float) -> None:
    bare = cost.step_cost(requests, range(40))
    assert bool((bare > 0).all())
    assert bool(torch.isfinite(bare).all())
    share = cost.per_context_token * context  # type: ignore[attr-defined]
    torch.testing.assert_close(cost.step_cost(requests, range(40), context), bare + share)
    assert all(cost.slot_cost(requests, b) >= 0 for b in range(40))


def test_the_papers_line_from_a_measured_table() -> None:
    table = StepCostTable([2, 8, 16, 32], [1.0, 1.5, 2.0, 4.0], 0.001)
    cost = LinearCost.from_table(table, [2, 8], width=3)
    assert cost.base == {2: 1.0, 8: 1.5}
    assert cost.per_slot == {2: 0.5 / 6, 8: 2.5 / 24}
    assert cost.per_context_token == 0.001
    falling = LinearCost.from_table(StepCostTable([1, 4], [2.0, 1.0]), [1], width=3)
    assert falling.per_slot == {1: 0.0}  # a table that falls gives no slot a negative price


# Profiling


class FakeClock:
    """Time that passes only while a step runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_profiler_runs_the_sizes_that_it_records() -> None:
    clock, sizes = FakeClock(), [1, 2, 5, 16, 64]
    ran = []

    def run(size: int) -> None:
        ran.append(size)
        clock.now += 0.5 + 0.25 * size

    table = profile_cost(run, reversed(sizes), warmup=1, repeats=3, clock=clock)  # type: ignore[arg-type]
    assert table.sizes == sizes
    assert table.seconds == [0.5 + 0.25 * size for size in sizes]
    assert sorted(ran) == sorted(sizes * 4)
    assert table.per_context_token == 0.0
    assert not table.interpolate


def test_warm_up_is_not_recorded_and_a_slow_run_is_outvoted() -> None:
    clock, count = FakeClock(), {1: 0, 4: 0}

    def run(size: int) -> None:
        count[size] += 1
        slow = 100.0 if count[size] in (1, 2, 4) else 0.0
        clock.now += size + slow

    assert profile_cost(run, [1, 4], warmup=2, repeats=3, clock=clock).seconds == [1.0, 4.0]


def test_noise_never_makes_a_larger_size_cheaper() -> None:
    clock, seconds = FakeClock(), {1: 1.0, 2: 3.0, 3: 2.0, 4: 4.0, 5: 3.0, 6: 2.0}

    def run(size: int) -> None:
        clock.now += seconds[size]

    table = profile_cost(run, seconds, repeats=1, clock=clock)  # type: ignore[arg-type]
    assert table.seconds == [1.0, 2.5, 2.5, 3.0, 3.0, 3.0]


def test_the_price_of_context_is_the_difference_per_token() -> None:
    clock, done = FakeClock(), []

    def step(extra: float) -> Any:
        def run(size: int) -> None:
            clock.now += size + extra

        return run

    table = profile_cost(
        step(0.0),
        [1, 2],
        clock=clock,
        warmup=1,
        repeats=2,
        run_with_context=step(2.0),
        context_tokens=1000,
        interpolate=True,
        progress=lambda *counts: done.append(counts),
    )
    assert table.per_context_token == 0.002
    assert table.seconds == [1.0, 2.0]
    assert table.interpolate
    assert done == [(i + 1, 12) for i in range(12)]


def test_a_step_that_is_faster_with_context_makes_context_free() -> None:
    clock = FakeClock()

    def step(seconds: float) -> Any:
        def run(size: int) -> None:
            clock.now += seconds

        return run

    table = profile_cost(step(2.0), [1], clock=clock, run_with_context=step(1.5), context_tokens=10)
    assert table.per_context_token == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": []}, "sizes is empty"),
        ({"sizes": [0]}, "sizes=0"),
        ({"repeats": 0}, "repeats=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"context_tokens": 5}, "give both, or neither"),
        ({"run_with_context": print}, "give both, or neither"),
    ],
)
def test_profiling_checks_its_arguments_first(arguments: dict[str, Any], message: str) -> None:
    def run(size: int) -> None:
        raise RuntimeError("work began")

    with pytest.raises(ValueError, match=message):
        profile_cost(run, **({"sizes": [1]} | arguments))


# Files and bad values


@given(cost_models())
@settings(max_examples=50)
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, cost: CostModel) -> None:
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    cost.save(path)
    loaded = load_cost(path)
    assert type(loaded) is type(cost)
    for requests in (1, 5):
        assert _seconds(loaded, requests, list(range(30)), 100.0) == _seconds(cost, requests, list(range(30)), 100.0)
        assert [loaded.slot_cost(requests, b) for b in range(30)] == [cost.slot_cost(requests, b) for b in range(30)]


TABLE = {"kind": "table", "sizes": [1, 2], "seconds": [1.0, 2.0], "per_context_token": 0.0, "interpolate": False}
LINE = {
    "kind": "linear",
    "base": [[1, 1.0]],
    "per_slot": [[1, 0.1]],
    "per_context_token": 0.0,
    "graph_limit": None,
    "eager": None,
}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "is not JSON"),
        ([], "key 'kind' is None; use one of 'linear', 'table'"),
        ({"kind": "cubic"}, "key 'kind' is 'cubic'"),
        ({"kind": "table"}, "lacks .*'seconds'"),
        (TABLE | {"price": 1}, r"has unknown \['price'\]"),
        (TABLE | {"sizes": [2, 1]}, "not strictly increasing"),
        (TABLE | {"sizes": [1]}, "equally many"),
        ({"kind": []}, r"key 'kind' is \[\]; use one of"),
        (TABLE | {"sizes": [1, 2.5]}, "sizes=2.5"),
        (TABLE | {"sizes": [1, "a"]}, "sizes='a' is not usable; use an integer of at least 1"),
        (TABLE | {"seconds": [1.0, -2.0]}, r"seconds\[2\]=-2.0"),
        (TABLE | {"interpolate": 1}, "interpolate=1"),
        (TABLE | {"sizes": 3}, "cost.json"),
        (LINE | {"base": 3}, "base=3 is not a table"),
        (LINE | {"per_slot": [[1, "a"]]}, r"per_slot\[1\]='a'"),
        (LINE | {"base": [[1, 1.0], [2, 1.0], [1, 3.0]]}, "base=.* several values for one whole number"),
        (LINE | {"base": [[[], 1.0]]}, r"base key=\[\]"),
        (LINE | {"per_context_token": 10**400}, "per_context_token=1000"),
        (LINE | {"graph_limit": 4}, "give both, or neither"),
        (LINE | {"per_context_token": -1.0}, "per_context_token=-1.0"),
    ],
)
def test_a_bad_file_is_named_with_the_key(tmp_path: Path, record: Any, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(ValueError, match=message) as raised:
        load_cost(path)
    assert "cost.json" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.json' cannot be read"):
        load_cost(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearCost(0.0, 0.1), "base=0.0"),
        (lambda: LinearCost(1.0, -0.1), "per_slot=-0.1"),
        (lambda: LinearCost(float("nan"), 0.1), "base=nan"),
        (lambda: LinearCost({}, 0.1), "base is empty"),
        (lambda: LinearCost({0: 1.0}, 0.1), "base key=0"),
        (lambda: LinearCost(1.0, 0.1, graph_limit=4), "give both, or neither"),
        (lambda: LinearCost(1.0, 0.1, graph_limit=0, eager={1: 1.0}), "graph_limit=0"),
        (lambda: StepCostTable([], []), "at least 1"),
        (lambda: StepCostTable([1, 1], [1.0, 2.0]), "strictly increasing"),
        (lambda: StepCostTable([1, True], [1.0, 2.0]), "sizes=True"),
        (lambda: StepCostTable([1], [float("inf")]), "seconds"),
        (lambda: LinearCost(1.0, 0.1).step_cost(0, [0]), "requests=0"),
        (lambda: LinearCost(1.0, 0.1).step_cost(1, [-1]), "budgets="),
        (lambda: LinearCost(1.0, 0.1).step_cost(1, [0], -5), "context_tokens=-5"),
    ],
)
def test_bad_values_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_of_arrays_count_as_numbers(tmp_path: Path) -> None:
    one, two, half, single = np.int64(1), np.int32(2), np.float64(0.5), np.float32(0.5)
    sizes: Any = np.array([2, 4])
    seconds: Any = [1.0, single]
    table = StepCostTable(sizes, seconds, half)
    assert (table.sizes, table.seconds, table.per_context_token) == ([2, 4], [1.0, 0.5], 0.5)
    options: dict[str, Any] = {"base": {two: 1.0}, "per_slot": single, "graph_limit": one, "eager": {one: half}}
    for cost in (table, LinearCost(**options)):
        count: Any = two
        assert _seconds(cost, count, [0, 2]) == _seconds(cost, 2, [0, 2])
        assert cost.slot_cost(count, count) == cost.slot_cost(2, 2)
        cost.save(tmp_path / "cost.json")
        assert _seconds(load_cost(tmp_path / "cost.json"), 2, [1]) == _seconds(cost, 2, [1])
    assert LinearCost.from_table(table, sizes, 1).base == {2: 1.0, 4: 0.5}


def test_models_describe_themselves() -> None:
    assert "base={1: 1.0}" in repr(LinearCost(1.0, 0.5))
    assert "sizes=[1, 2]" in repr(StepCostTable([1, 2], [1.0, 2.0]))
