"""What a simulation returns: arrays by step and replica, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class RowSteps:
    """Every row of every step, arrays [T, P, B]; `output` is -1 where the row had no request.

    output: int32 index in the table.  position: int32 output tokens before the step.
    source: int8 who drafted the kept chain (SOURCE_* code of its first slot; 0 where nothing was drafted).
    reason: int8 REASON_* code.  drafted, kept, accepted: int16 length of the chain, slots verified, slots accepted.
    """

    output: Array
    position: Array
    source: Array
    reason: Array
    drafted: Array
    kept: Array
    accepted: Array


@dataclass(frozen=True)
class Staleness:
    """The budgets in use against fresh ones, re-picked from each step's own survivals; arrays [T, P] unless said.

    fresh_budget: int64.  fresh_expected: expected accepted drafts of the batch at the fresh budget.
    goodput: of the budget in use, judged by the fresh survivals.  fresh_goodput: of the fresh budget.
    miscount: float32 [T, P, B] expected accepted drafts of each request under the survivals and budget in use, minus
        those under the fresh ones; NaN where the row had no request, or none of its own survivals to be sized from.
    """

    fresh_budget: Array
    fresh_expected: Array
    goodput: Array
    fresh_goodput: Array
    miscount: Array

    @property
    def batch_miscount(self) -> Array:
        """float64 [T, P]: the sum of a step's miscounts."""
        return np.asarray(np.nansum(self.miscount, axis=2, dtype=np.float64))

    @property
    def known_requests(self) -> Array:
        """int64 [T, P]: requests that have a miscount."""
        return (~np.isnan(self.miscount)).sum(axis=2)

    @property
    def goodput_lost(self) -> Array:
        """float64 [T, P]: 1 - goodput / fresh_goodput; NaN in steps after a replica's end."""
        with np.errstate(invalid="ignore"):
            return np.asarray(1 - self.goodput / np.where(self.fresh_goodput > 0, self.fresh_goodput, np.nan))


@dataclass(frozen=True)
class Simulation:
    """T steps of P replicas with B rows each; arrays [T, P], 0 after a replica has served all its requests.

    requests: int64 rows with a request.  context: int64 their prompt and output tokens before the step.
    budget: int64.  price, goodput, expected: float64, as sized: lambda (expected tokens per slot), G (expected tokens
        per second), A (expected tokens of the batch).
    seconds: float64, the cost model at the slots that were verified.
    tokens: int64 delivered.  drafted, verified, accepted: int64 slots of all rows.
    rows_model, rows_free: int64 rows whose kept chain begins with the model's, with the model-free drafter's token.
    accepted_free: int64 accepted slots that the model-free drafter drafted.
    batch_size: B.  by_row, staleness: None unless asked for.
    """

    batch_size: int
    requests: Array
    context: Array
    budget: Array
    price: Array
    goodput: Array
    expected: Array
    seconds: Array
    tokens: Array
    drafted: Array
    verified: Array
    accepted: Array
    rows_model: Array
    rows_free: Array
    accepted_free: Array
    by_row: RowSteps | None = None
    staleness: Staleness | None = None

    @property
    def steps(self) -> int:
        """Steps of all replicas together."""
        return int((self.requests > 0).sum())

    @property
    def row_steps(self) -> int:
        """Steps of all requests together."""
        return int(self.requests.sum())

    @property
    def acceptance_length(self) -> float:
        """AL: tokens per request and step."""
        return _ratio(self.tokens.sum(), self.row_steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one replica per second of the cost model."""
        return _ratio(self.tokens.sum(), self.seconds.sum())

    @property
    def free_share(self) -> float:
        """Share of the requests' steps in which the model-free chain was kept."""
        return _ratio(self.rows_free.sum(), self.row_steps)

    @property
    def verified_per_step(self) -> float:
        """Draft slots verified in a step of the batch."""
        return _ratio(self.verified.sum(), self.steps)

    @property
    def mean_price(self) -> float:
        """lambda, mean over the steps; expected tokens per slot."""
        return _ratio(self.price.sum(), self.steps)

    @property
    def mean_goodput(self) -> float:
        """G as sized, mean over the steps; expected tokens per second."""
        return _ratio(self.goodput.sum(), self.steps)

    def steady(self, warm_up: int = 0) -> Simulation:
        """Only the steps with all B rows busy, from step `warm_up` on: what a server under load does.

        Replicas keep their columns; steps that are left out are 0 (by row: -1, NaN), and count nowhere.
        """
        busy = self.requests == self.batch_size
        busy[:warm_up] = False
        arrays: dict[str, Any] = {name: np.where(busy, getattr(self, name), 0) for name in _by_step(self)}
        by_row, staleness = self.by_row, self.staleness
        if by_row is not None:
            by_row = replace(by_row, output=np.where(busy[:, :, None], by_row.output, -1))
        if staleness is not None:
            kept = {f.name: np.where(busy, getattr(staleness, f.name), 0) for f in fields(Staleness)[:-1]}
            staleness = Staleness(**kept, miscount=np.where(busy[:, :, None], staleness.miscount, np.nan))
        return replace(self, **arrays, by_row=by_row, staleness=staleness)

    def summary(self) -> dict[str, float]:
        """The totals, JSON-ready."""
        names = ("acceptance_length", "tokens_per_second", "free_share", "verified_per_step", "mean_price")
        totals: dict[str, float] = {name: getattr(self, name) for name in (*names, "mean_goodput")}
        return totals | {"steps": self.steps, "row_steps": self.row_steps, "tokens": int(self.tokens.sum())}


class Recorder:
    """Collects what the replicas did, step by step; blocks of steps are put together as they fill up."""

    _BLOCK = 1024

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._steps: list[tuple[Array, dict[str, Array]]] = []
        self._blocks: list[dict[str, Array]] = []

    def add(self, replicas: Array, values: dict[str, Array]) -> None:
        """One step of the replicas numbered `replicas` [P']; values: arrays [P', ...]."""
        if len(self._steps) >= self._BLOCK:
            self._join()
        self._steps.append((replicas, values))

    def extend(self, values: dict[str, Array]) -> None:
        """More of the step that was added last."""
        self._steps[-1][1].update(values)

    def _join(self) -> None:
        block = {}
        for name, like in self._steps[0][1].items():
            kind = _NARROW.get(name, like.dtype)
            shape = (len(self._steps), self._replicas, *like.shape[1:])
            block[name] = np.full(shape, _FILL.get(name, 0), dtype=kind)
            for step, (replicas, values) in enumerate(self._steps):
                block[name][step, replicas] = values[name]
        self._blocks.append(block)
        self._steps = []

    def simulation(self, batch_size: int) -> Simulation:
        """Everything collected; needs at least one step."""
        if self._steps:
            self._join()
        joined = {name: np.concatenate([block[name] for block in self._blocks]) for name in self._blocks[0]}
        by_row = staleness = None
        if "row_output" in joined:
            by_row = RowSteps(**{field.name: joined.pop(f"row_{field.name}") for field in fields(RowSteps)})
        if "miscount" in joined:
            joined["goodput"], used = joined.pop("stale_goodput"), joined["goodput"]
            staleness = Staleness(**{field.name: joined.pop(field.name) for field in fields(Staleness)})
            joined["goodput"] = used
        return Simulation(batch_size=batch_size, by_row=by_row, staleness=staleness, **joined)


# What replicas hold that have ended, where that is not 0; and types narrower than those computed with.
_FILL = {"row_output": -1, "miscount": np.nan}
_NARROW: dict[str, Any] = {
    "row_output": np.int32,
    "row_position": np.int32,
    "row_source": np.int8,
    "row_reason": np.int8,
    "row_drafted": np.int16,
    "row_kept": np.int16,
    "row_accepted": np.int16,
    "miscount": np.float32,
}


def _by_step(simulation: Simulation) -> list[str]:
    return [field.name for field in fields(simulation) if field.name not in ("batch_size", "by_row", "staleness")]


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
