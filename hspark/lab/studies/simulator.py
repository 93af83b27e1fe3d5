"""How fast the simulator itself is, and how its time grows with the batch and with the steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hspark.lab.simulate import simulate
from hspark.lab.studies.lab import Lab
from hspark.lab.study import Plot, Series, Study, Table

SIZES = (1, 4, 16, 64, 256, 1024)
# Steps of the runs that differ in their batch, and the batch of the runs that differ in their steps.
STEPS, ROWS = 60, 16
LENGTHS = (60, 120, 240, 480)


def simulator(lab: Lab) -> Study:
    policy = "proposed" if lab.has_model else "ngram_only"
    budget = 10 * lab.options.row_steps
    sizes = [size for size in SIZES if size * STEPS <= budget] or [1]
    lengths = [steps for steps in LENGTHS if ROWS * steps <= budget] or [LENGTHS[0]]
    _timed(lab, policy, sizes[0], 8)  # so that the first measurement does not pay for what is prepared once
    by_size = [(size, *_timed(lab, policy, size, STEPS)) for size in sizes]
    by_steps = [(steps, *_timed(lab, policy, ROWS, steps)) for steps in lengths]
    growth = exponent([row[0] for row in by_size[-3:]], [row[2] for row in by_size[-3:]])
    in_steps = exponent([row[0] for row in by_steps], [row[2] for row in by_steps])
    speeds = [done / seconds for _, done, seconds in by_size]
    rows: list[list[Any]] = [[size, STEPS, done, seconds, done / seconds] for size, done, seconds in by_size]
    rows += [[ROWS, steps, done, seconds, done / seconds] for steps, done, seconds in by_steps]
    largest = by_size[-1][0]
    words = "" if growth is None else f" Over the largest three batches its time grows as B to the power {growth:.2f}"
    words += "" if in_steps is None else f"{',' if words else ' Its time grows'} with steps to the power {in_steps:.2f}"
    return Study(
        name="simulator",
        title="",
        source="",
        question="How long does a simulation take, and how does that grow?",
        finding=f"One replica of {largest} rows does {speeds[-1]:,.0f} row-steps per second on this machine, and of "
        f"{by_size[0][0]} rows {speeds[0]:,.0f}.{words}{'.' if words else ''}",
        tables=[
            Table(
                f"One replica, policy {policy}",
                ["batch", "steps", "row-steps", "time (s)", "row-steps per second"],
                rows,
                "Small batches are faster by the row with many replicas side by side, as studies run them.",
            )
        ],
        plots=[
            Plot(
                "Row-steps per second by batch",
                "batch",
                "row-steps per second",
                [Series(policy, [float(size) for size in sizes], speeds)],
                log_x=True,
                log_y=True,
            )
        ],
        data={"exponent_batch": growth, "exponent_steps": in_steps},
    )


def exponent(x: list[int], seconds: list[float]) -> float | None:
    """The slope of log seconds over log x, by least squares; None from fewer than two points."""
    if len(x) < 2:
        return None
    return float(np.polyfit(np.log(x), np.log(seconds), 1)[0])


def _timed(lab: Lab, policy: str, size: int, steps: int) -> tuple[int, float]:
    """Row-steps done and seconds taken by `steps` steps of one full batch."""
    table = lab.ready.table
    # Steps of the longest chains end a request soonest.
    longest = 1 + max(table.model_width, table.free_width)
    copies = 1 + size * (2 + steps * longest * table.outputs // table.positions) // table.outputs
    begun = time.perf_counter()
    run = simulate(lab.ready, policy, lab.cost, batch_size=size, copies=copies, shuffle=0, max_steps=steps)
    return run.row_steps, time.perf_counter() - begun
