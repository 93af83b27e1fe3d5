"""Throughput of a policy in simulation, with every step's seconds booked to the requests that caused them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hspark.core import SOURCE_FREE
from hspark.lab.simulate import Prepared, simulate
from hspark.lab.simulate_sizing import Costs
from hspark.lab.simulation import Simulation
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.studies.statistics import Bootstrap, divided
from hspark.policy import CostModel, Policy

Array = NDArray[Any]

# Requests that each row of a batch serves at least, so that most steps have all rows busy.
WAVES = 6


@dataclass(frozen=True)
class Served:
    """The full-batch steps of a simulation, request by request: arrays [n], one entry per request and step.

    output: index in the table. position: output tokens before the step. tokens: delivered. free: the model-free chain
    was kept. slots: verified. seconds: the request's part of the step: an equal share of a step without drafts, and of
    the rest a share by its own slots; the parts of a step add up to it.
    """

    name: str
    outputs: int
    price: float
    output: Array
    position: Array
    tokens: Array
    slots: Array
    free: Array
    seconds: Array

    def summed(self, values: Array) -> Array:
        """float64 [M]: values [n] by output."""
        return np.bincount(self.output, weights=values, minlength=self.outputs)

    @cached_property
    def output_tokens(self) -> Array:
        return self.summed(self.tokens)

    @cached_property
    def output_seconds(self) -> Array:
        return self.summed(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def acceptance_length(self) -> float:
        return float(self.tokens.mean())

    @property
    def free_share(self) -> float:
        return float(self.free.mean())

    @property
    def slots_per_request(self) -> float:
        return float(self.slots.mean())

    def speed(self, bootstrap: Bootstrap) -> Array:
        """Tokens per second, [1 + R]."""
        return bootstrap.ratio(self.output_tokens, self.output_seconds)


def pooled(parts: list[Served]) -> Served:
    """Several simulations of one table taken together."""
    names = ("output", "position", "tokens", "slots", "free", "seconds")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Served(parts[0].name, parts[0].outputs, float(np.mean([part.price for part in parts])), **joined)


def relative(served: Served, baseline: Served, bootstrap: Bootstrap) -> Array:
    """Throughput over the baseline's, [1 + R], draw by draw over the same prompts."""
    return divided(served.speed(bootstrap), baseline.speed(bootstrap))


def serve(
    prepared: Prepared,
    policy: Policy | str,
    cost: CostModel,
    *,
    batch_size: int,
    budget: str | int = "adaptive",
    budget_delay: int = 2,
    seed: int = 0,
    row_steps: int = 30_000,
    name: str = "",
) -> Served:
    """Serves the outputs in random order, again and again, under a full batch.

    row_steps: about how many steps of a request are wanted, at three tokens each; at least WAVES requests per row.
    """
    whole = simulate(
        prepared,
        policy,
        cost,
        batch_size=batch_size,
        budget=budget,
        budget_delay=budget_delay,
        by_row=True,
        **load(prepared, batch_size, row_steps, seed),
    )
    run = whole.steady(warm_up(prepared, budget_delay))
    if not run.steps:  # chains so good that requests ended sooner than was thought
        run = whole.steady(budget_delay + 1)
    if not run.steps:
        raise LeftOutError(f"batch_size={batch_size} is never full on this table; use a smaller one, or more outputs")
    return _booked(run, Costs(cost), prepared.table.outputs, name or str(policy))


def warm_up(prepared: Prepared, budget_delay: int) -> int:
    """Steps after which the requests of a batch no longer go in step: about the length of one, at three tokens each."""
    table = prepared.table
    return budget_delay + 1 + math.ceil(table.positions / max(1, table.outputs) / 3)


def load(prepared: Prepared, batch_size: int, row_steps: int, seed: int) -> dict[str, Any]:
    """The settings of `simulate` that keep a batch full for long."""
    outputs = max(1, int((prepared.table.output_length > 0).sum()))
    mean = prepared.table.positions / outputs
    wanted = max(WAVES * batch_size, math.ceil(3 * row_steps / max(mean, 1.0)))
    copies = math.ceil(wanted / outputs)
    replicas = max(1, min(64, copies * outputs // (WAVES * batch_size)))
    return {"copies": copies, "replicas": replicas, "shuffle": seed}


def _booked(run: Simulation, costs: Costs, outputs: int, name: str) -> Served:
    rows = run.by_row
    assert rows is not None
    busy = run.requests > 0
    requests, context, verified = (getattr(run, field)[busy] for field in ("requests", "context", "verified"))
    bare = costs.at(requests, np.zeros_like(requests), context, int(verified.max()))
    kept = rows.kept[busy].astype(np.int64)
    per_slot = divided(run.seconds[busy] - bare, verified.astype(np.float64))
    drafts = np.where(verified[:, None] > 0, kept * np.nan_to_num(per_slot)[:, None], 0.0)
    return Served(
        name=name,
        outputs=outputs,
        price=run.mean_price,
        output=rows.output[busy].reshape(-1),
        position=rows.position[busy].reshape(-1).astype(np.int64),
        tokens=(rows.accepted[busy].astype(np.int64) + 1).reshape(-1),
        slots=kept.reshape(-1),
        free=(rows.source[busy] == SOURCE_FREE).reshape(-1),
        seconds=((bare / requests)[:, None] + drafts).reshape(-1),
    )
