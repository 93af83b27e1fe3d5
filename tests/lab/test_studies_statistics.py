"""What studies count with: seconds booked to positions, the bootstrap over prompts, and intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hspark.lab.simulate import simulate
from hspark.lab.studies.serving import load, serve, warm_up
from hspark.lab.studies.statistics import Bootstrap, interval, mean_interval
from tests.lab.made_studies import COST, lab


def test_seconds_are_booked_whole_and_by_slots() -> None:
    own = lab()
    served = serve(own.ready, "proposed", COST, batch_size=6, row_steps=300, budget_delay=2, seed=1)
    run = simulate(own.ready, "proposed", COST, batch_size=6, **load(own.ready, 6, 300, 1)).steady(
        warm_up(own.ready, 2)
    )
    assert served.seconds.sum() == pytest.approx(run.seconds.sum())
    assert served.tokens.sum() == run.tokens.sum()
    assert served.tokens_per_second == pytest.approx(run.tokens_per_second)
    assert served.free_share == pytest.approx(run.free_share)
    np.testing.assert_allclose(served.seconds, 1.1 / 6 + 0.06 * served.slots, rtol=1e-9)
    assert served.output_tokens.sum() == served.tokens.sum()


def test_bootstrap_draws_prompts_whole() -> None:
    values, groups = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 0, 1, 2])
    draws = Bootstrap(groups, resamples=500)
    sums = draws.sums(values)
    assert sums[0] == 15
    possible = {3 * a + 4 * b + 8 * c for a in range(4) for b in range(4 - a) for c in [3 - a - b]}
    assert set(sums[1:].tolist()) <= possible
    assert interval(draws.ratio(values, values)) == (1.0, 1.0, 1.0)
    assert interval(Bootstrap(np.zeros(4, dtype=int)).sums(values)) == (15.0, None, None)


def test_bootstrap_intervals_cover() -> None:
    """Coverage of the mean of 40 draws over 300 trials. A correct 95% interval by percentiles covers about 93%;
    fewer than 87% would be off by four standard errors of 1.5%: a false alarm is below 1e-3."""
    draw = np.random.default_rng(0)
    covered = []
    for trial in range(300):
        data = draw.normal(1.0, 1.0, size=40)
        boot = Bootstrap(np.arange(40), 200, seed=trial)
        found = interval(boot.ratio(data, np.ones(40)))
        assert found.low is not None
        assert found.high is not None
        covered.append(found.low <= 1.0 <= found.high)
    assert 0.87 <= np.mean(covered) < 0.99


def test_mean_interval_is_students() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.value == 3.0
    assert found.high == pytest.approx(3 + 2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert mean_interval([2.0]) == (2.0, None, None)
