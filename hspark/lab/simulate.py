"""Continuous batching replayed over a record table: the engine's decisions, step by step, without a model.

Everything that decides is the engine's own: the policy is called as it is, sizing and allocation follow the same
definitions (`simulate_sizing`), rows are refilled in the same order, survivals are as old as the engine's, and a new
request counts with survival 1 until its own are old enough. Many replicas of a batch run side by side, each with its
own requests, price and budget; that is what makes small batches fast.

Two things of a real engine are left out: prompts longer than its `prefill_tokens` may delay a row's start by some
steps, and with steps in flight (`run_ahead`) an end is seen later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hspark.lab.simulate_run import Prepared, Run
from hspark.lab.simulate_sizing import Costs
from hspark.lab.simulation import Simulation
from hspark.lab.table import RecordTable
from hspark.policy import CostModel, Policy
from hspark.policy import policy as policy_by_name
from hspark.policy.curves import whole

Array = NDArray[Any]
Ints = NDArray[np.int64]


def simulate(
    table: RecordTable | Prepared,
    policy: Policy | str,
    cost: CostModel,
    *,
    batch_size: int = 1,
    budget: str | int = "adaptive",
    budget_delay: int = 2,
    copies: int = 1,
    shuffle: int | None = None,
    replicas: int = 1,
    max_steps: int | None = None,
    by_row: bool = False,
    staleness: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Simulation:
    """Serves the table's outputs as an engine with `batch_size` rows would.

    table: a record table, with the published estimator for Qwen3-4B; or `Prepared` with one of your choice.
    policy: a policy or its name. cost: seconds of a step, for sizing and for the clock.
    budget: "adaptive", "all", or slots per step. budget_delay: age in steps of the survivals that a step is sized from.
    copies: each output is served this many times. shuffle: seed of the order of the requests, None for the table's
    order (all outputs, then all again). Outputs without tokens are left out.
    replicas: independent batches; replica r serves requests r, r + replicas, ... A policy of your own is called
    replica by replica, those of this package all at once.
    max_steps: end each replica after so many steps. by_row, staleness: return these parts too; they take memory
    (steps x replicas x rows). staleness needs budget="adaptive" and a budget_delay of at least 1.
    progress: called with the number of row-steps done since the last call.
    ValueError for a setting out of range, for a policy that needs drafts which the table does not have, and for a
    replica without requests.
    """
    prepared = table if isinstance(table, Prepared) else Prepared(table)
    chosen = policy_by_name(policy) if isinstance(policy, str) else policy
    for name, value, low in (
        *(("batch_size", batch_size, 1), ("budget_delay", budget_delay, 0), ("copies", copies, 1)),
        *(("replicas", replicas, 1), ("max_steps", 1 if max_steps is None else max_steps, 1)),
    ):
        whole(name, value, low)
    if budget not in ("adaptive", "all"):
        whole("budget", budget, 0)
    if staleness and (budget != "adaptive" or budget_delay == 0):
        raise ValueError(
            f"staleness=True with budget={budget!r} and budget_delay={budget_delay!r}; use budget='adaptive' and a "
            "budget_delay of at least 1, or there is nothing stale"
        )
    for needed, width, what in (
        (chosen.name == "model_only", prepared.table.model_width, "a model drafter's"),
        (chosen.name == "ngram_only", prepared.table.free_width, "a model-free drafter's"),
    ):
        if needed and not width:
            raise ValueError(f"policy={chosen.name!r} needs {what} chains, and the table has none; use another policy")
    queues = _queues(prepared.table, copies, shuffle, replicas)
    run = Run(prepared, chosen, Costs(cost), batch_size, budget, budget_delay, queues, by_row, staleness)
    while run.replicas.size and (max_steps is None or run.time < max_steps):
        done = run.step()
        if progress is not None:
            progress(done)
    return run.result()


def _queues(table: RecordTable, copies: int, shuffle: int | None, replicas: int) -> list[Ints]:
    """The outputs that each replica serves, in order."""
    requests = np.tile(np.flatnonzero(table.output_length > 0), copies)
    if shuffle is not None:
        np.random.default_rng(whole("shuffle", shuffle, 0)).shuffle(requests)
    if len(requests) < replicas:
        raise ValueError(f"replicas={replicas} is more than the {len(requests)} requests; use fewer, or more copies")
    return [requests[replica::replicas] for replica in range(replicas)]
