"""Costs of hardware that is not here: step costs by hand under which a simulation meets a wanted price of a slot.

The price lambda = G(b*) * p depends on p / C_0 and on the table. The paper prints it for its accelerator (about 0.04
expected tokens per slot in batches of 4, 0.3 in batches of 128), so the ratio p / C_0 that gives the same price
reproduces what its decisions were made of, whatever the seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hspark.lab.simulate import Prepared, simulate
from hspark.lab.table import RecordTable
from hspark.policy import LinearCost, Policy
from hspark.policy.curves import seconds, whole

# The paper's prices of a slot by batch size, on an H100.
PAPER_PRICES: dict[int, float] = {4: 0.04, 128: 0.3}


def slot_ratio_for_price(
    table: RecordTable | Prepared,
    price: float,
    *,
    batch_size: int,
    policy: Policy | str = "proposed",
    budget_delay: int = 2,
    row_steps: int = 50_000,
    tolerance: float = 0.005,
) -> float:
    """p / C_0 at which a simulation of `batch_size` rows has the mean price `price`, in expected tokens per slot.

    row_steps: length of each trial simulation, in steps of one request. tolerance: relative error of the price that is
    accepted. The price grows with p / C_0 until no slot pays any more; ValueError, with the nearest price that was
    reached, where the table does not allow the wanted one.
    """
    whole("batch_size", batch_size, 1)
    whole("row_steps", row_steps, 1)
    price = seconds("price", price, positive=True)
    prepared = table if isinstance(table, Prepared) else Prepared(table)
    steps = max(8, row_steps // batch_size)
    replicas = max(1, min(64, row_steps // (64 * batch_size)))
    steps = max(8, steps // replicas)
    requests = max(1, int((prepared.table.output_length > 0).sum()))
    # Enough requests that all rows stay busy, if every step delivered a token more than the longest chain.
    longest = 1 + max(prepared.table.model_width, prepared.table.free_width)
    mean = max(1.0, prepared.table.positions / requests)
    wanted = replicas * batch_size * (2 + steps * longest / mean)
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "budget_delay": budget_delay,
        "copies": math.ceil(wanted / requests),
        "shuffle": 0,
        "replicas": replicas,
        "max_steps": steps,
    }

    def reached(log_ratio: float) -> float:
        run = simulate(prepared, policy, LinearCost(1.0, math.exp(log_ratio)), **settings)
        return run.steady(min(budget_delay + 1, steps - 1)).mean_price

    low, high = math.log(1e-7), math.log(10.0)
    best = (math.inf, 0.0, 0.0)
    for _ in range(40):
        middle = (low + high) / 2
        got = reached(middle)
        best = min(best, (abs(got - price), got, middle))
        if abs(got - price) <= tolerance * price:
            return math.exp(middle)
        low, high = (middle, high) if got < price else (low, middle)
    raise ValueError(
        f"price={price!r} is not reached with batch_size={batch_size} on this table; the nearest is {best[1]:.4g}, at "
        f"p / C_0 = {math.exp(best[2]):.3g}"
    )


def paper_like_cost(
    table: RecordTable | Prepared,
    prices: Mapping[int, float] | None = None,
    *,
    base: float = 0.01,
    policy: Policy | str = "proposed",
    budget_delay: int = 2,
    row_steps: int = 50_000,
) -> LinearCost:
    """A linear cost that reproduces prices by batch size on this table: the paper's H100 by default.

    prices: {batch size: lambda}, `PAPER_PRICES` if None. base: seconds of a step without drafts, the same for all batch
    sizes, as decoding is bound by the weights' bandwidth. Between the batch sizes p is interpolated, beyond them held.
    """
    wanted = PAPER_PRICES if prices is None else dict(prices)
    if not wanted:
        raise ValueError("prices is empty; use {batch size: expected tokens per slot}")
    base = seconds("base", base, positive=True)
    options: dict[str, Any] = {"policy": policy, "budget_delay": budget_delay, "row_steps": row_steps}
    prepared = table if isinstance(table, Prepared) else Prepared(table)
    per_slot = {
        size: base * slot_ratio_for_price(prepared, price, batch_size=size, **options) for size, price in wanted.items()
    }
    return LinearCost(base, per_slot)
