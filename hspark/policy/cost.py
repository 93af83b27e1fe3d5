"""Seconds of a verification step as a function of its slots (the paper, section 2 and appendix F)."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hspark.policy import curves


@runtime_checkable
class CostModel(Protocol):
    """What sizing asks of a cost: host-side arithmetic, no device work.

    requests: N, running requests, each with one non-draft token in the step. budgets: draft slots, whole numbers of at
    least 0. context_tokens: total tokens in the KV cache, for the term C_KV proportional to it.
    """

    def step_cost(self, requests: int, budgets: Tensor | Sequence[int], context_tokens: float = 0) -> Tensor:
        """C(b) in seconds, float64 [n], for budgets [n]."""
        ...

    def slot_cost(self, requests: int, budget: int) -> float:
        """p, the seconds that one more slot costs around this budget; never negative."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file that `load_cost` reads."""
        ...


class LinearCost:
    """C(b) = C_0 + p * b with C_0 = T(N) + C_KV (the paper, section 4.3), and equation 4 above the graph limit.

    base: T(N), seconds of a step with one token per request: a number, or {requests: seconds}.
    per_slot: p, seconds per draft slot: a number, or {requests: seconds}.
    per_context_token: seconds per token of context; C_KV is this times the total context.
    graph_limit: the most packed tokens N + b that run as a captured graph, or None. eager: {tokens: seconds} of eager
    steps, needed with a limit. Above it C(b) = max(C_0 + p * b, T_eager(N + b) + C_KV).

    Between the request counts of a mapping values are interpolated; beyond its ends the nearest entry holds. `eager`
    is interpolated too, and goes on beyond its last entry with the last slope.
    """

    kind = "linear"

    def __init__(
        self,
        base: float | Mapping[int, float],
        per_slot: float | Mapping[int, float],
        per_context_token: float = 0.0,
        *,
        graph_limit: int | None = None,
        eager: Mapping[int, float] | None = None,
    ) -> None:
        self.base = curves.entries("base", base, positive=True)
        self.per_slot = curves.entries("per_slot", per_slot, positive=False)
        self.per_context_token = curves.seconds("per_context_token", per_context_token, positive=False)
        if (graph_limit is None) != (eager is None):
            raise ValueError(f"graph_limit={graph_limit!r} and eager={eager!r}: give both, or neither")
        self.graph_limit = None if graph_limit is None else curves.whole("graph_limit", graph_limit, 1)
        self.eager = None if eager is None else curves.entries("eager", eager, positive=True)

    @classmethod
    def from_table(
        cls,
        table: StepCostTable,
        requests: Sequence[int],
        width: int,
        *,
        graph_limit: int | None = None,
        eager: Mapping[int, float] | None = None,
    ) -> LinearCost:
        """The paper's line through a measured table, for every request count N of `requests`.

        base = T(N); per_slot = (T(N * (1 + width)) - T(N)) / (N * width): a step with every slot filled against one
        with one token per request. For exact entries the table has to hold the sizes N and N * (1 + width).
        """
        slots = {count: count * curves.whole("width", width, 1) for count in requests}
        costs = {count: table.step_cost(count, [0, filled]).tolist() for count, filled in slots.items()}
        base = {count: bare for count, (bare, _) in costs.items()}
        per_slot = {count: max(0.0, full - bare) / slots[count] for count, (bare, full) in costs.items()}
        return cls(base, per_slot, table.per_context_token, graph_limit=graph_limit, eager=eager)

    def step_cost(self, requests: int, budgets: Tensor | Sequence[int], context_tokens: float = 0) -> Tensor:
        requests, slots = curves.whole("requests", requests, 1), _slots(budgets, context_tokens)
        seconds = curves.held(self.base, requests) + curves.held(self.per_slot, requests) * slots
        if self.graph_limit is not None and self.eager is not None:
            eager = curves.curve(self.eager, requests + slots)
            seconds = torch.where(requests + slots > self.graph_limit, torch.maximum(seconds, eager), seconds)
        return seconds + self.per_context_token * context_tokens

    def slot_cost(self, requests: int, budget: int) -> float:
        slope = curves.held(self.per_slot, requests)
        tokens = requests + budget
        if self.graph_limit is None or self.eager is None or tokens <= self.graph_limit:
            return slope
        graphed = curves.held(self.base, requests) + slope * budget
        eager = float(curves.curve(self.eager, torch.tensor([float(tokens)], dtype=torch.float64))[0])
        return curves.slope(self.eager, tokens) if eager > graphed else slope

    def save(self, path: str | os.PathLike[str]) -> None:
        record = {
            "kind": self.kind,
            "base": curves.listed(self.base),
            "per_slot": curves.listed(self.per_slot),
            "per_context_token": self.per_context_token,
            "graph_limit": self.graph_limit,
            "eager": None if self.eager is None else curves.listed(self.eager),
        }
        Path(path).write_text(json.dumps(record, indent=1) + "\n")

    def __repr__(self) -> str:
        return f"LinearCost(base={self.base}, per_slot={self.per_slot}, per_context_token={self.per_context_token})"


class StepCostTable:
    """Measured seconds of steps of given packed sizes, tokens N + b.

    sizes: increasing whole numbers [n]. seconds: [n]. per_context_token: seconds per token of context.
    interpolate=False: a staircase, for engines that pad a step up to the next size of the table. Every step within a
    stair costs the same, and straight lines would charge for slots that are free. interpolate=True: straight lines
    between the sizes, for engines that run exactly the tokens they have, where the table only samples a curve.
    Beyond the last size both go on with the last slope; an engine that cannot run larger steps sizes with a `maximum`.

    The price of a slot is the slope of the table around N + b*, from the nearest smaller to the nearest larger size.
    Inside a stair that is not 0: slots are free only until the stair is full, and a price of 0 would let any tail in.
    """

    kind = "table"

    def __init__(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        per_context_token: float = 0.0,
        *,
        interpolate: bool = False,
    ) -> None:
        sizes, seconds = [curves.whole("sizes", size, 1) for size in sizes], list(seconds)
        if len(sizes) != len(seconds) or not sizes:
            raise ValueError(f"sizes has {len(sizes)} entries and seconds {len(seconds)}; use equally many, at least 1")
        if sizes != sorted(set(sizes)):
            raise ValueError(f"sizes={sizes!r} is not strictly increasing; sort it and drop repeats")
        self.table = curves.entries("seconds", dict(zip(sizes, seconds, strict=True)), positive=True)
        self.per_context_token = curves.seconds("per_context_token", per_context_token, positive=False)
        if not isinstance(interpolate, bool):
            raise ValueError(f"interpolate={interpolate!r} is not a bool; use True or False")
        self.interpolate = interpolate

    @property
    def sizes(self) -> list[int]:
        return list(self.table)

    @property
    def seconds(self) -> list[float]:
        return list(self.table.values())

    def step_cost(self, requests: int, budgets: Tensor | Sequence[int], context_tokens: float = 0) -> Tensor:
        tokens = curves.whole("requests", requests, 1) + _slots(budgets, context_tokens)
        seconds = curves.curve(self.table, tokens)
        if not self.interpolate:
            sizes = torch.tensor(self.sizes, dtype=torch.float64)
            stair = torch.searchsorted(sizes, tokens).clamp(max=len(sizes) - 1)
            stairs = torch.tensor(self.seconds, dtype=torch.float64)[stair]
            seconds = torch.where(tokens <= sizes[-1], stairs, seconds)
        return seconds + self.per_context_token * context_tokens

    def slot_cost(self, requests: int, budget: int) -> float:
        return curves.slope(self.table, requests + budget)

    def save(self, path: str | os.PathLike[str]) -> None:
        record = {
            "kind": self.kind,
            "sizes": self.sizes,
            "seconds": self.seconds,
            "per_context_token": self.per_context_token,
            "interpolate": self.interpolate,
        }
        Path(path).write_text(json.dumps(record, indent=1) + "\n")

    def __repr__(self) -> str:
        return (
            f"StepCostTable(sizes={self.sizes}, seconds={self.seconds}, per_context_token={self.per_context_token}, "
            f"interpolate={self.interpolate})"
        )


def load_cost(path: str | os.PathLike[str]) -> LinearCost | StepCostTable:
    """The cost model saved at `path`. ValueError naming the file, the key that is wrong, and what would be accepted."""
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"cost file {str(path)!r} cannot be read ({error.strerror}); use a file written by save()"
        ) from error
    except ValueError as error:
        raise ValueError(f"cost file {str(path)!r} is not JSON ({error}); use a file written by save()") from error
    return cost_from(record, f"cost file {str(path)!r}")


def cost_from(record: Any, where: str) -> LinearCost | StepCostTable:
    """The cost model of a record that `save` wrote; `where` names it in errors."""
    keys = {
        "linear": ("base", "per_slot", "per_context_token", "graph_limit", "eager"),
        "table": ("sizes", "seconds", "per_context_token", "interpolate"),
    }
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in keys:
        raise ValueError(f"{where}: key 'kind' is {kind!r}; use one of {', '.join(map(repr, keys))}")
    values = {key: value for key, value in record.items() if key != "kind"}
    missing, unknown = [set(keys[kind]) - set(values), set(values) - set(keys[kind])]
    if missing or unknown:
        problem = f"lacks {sorted(missing)}" if missing else f"has unknown {sorted(unknown)}"
        raise ValueError(f"{where} {problem}; the keys of kind {kind!r} are {list(keys[kind])}")
    try:
        if kind == "table":
            return StepCostTable(**values)
        for key in ("base", "per_slot", "eager"):
            # Without a graph limit there is no eager table.
            values[key] = None if key == "eager" and values[key] is None else curves.unlisted(key, values[key])
        return LinearCost(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def profile_cost(
    run: Callable[[int], object],
    sizes: Sequence[int],
    *,
    warmup: int = 2,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    run_with_context: Callable[[int], object] | None = None,
    context_tokens: int = 0,
    interpolate: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> StepCostTable:
    """Measures steps of the given packed sizes and returns their table; meant for engine start-up.

    run: executes one step of exactly that many packed tokens and returns when it is done (on an accelerator: after a
    synchronisation). sizes: the packed sizes, any order. warmup, repeats: unmeasured and measured runs of each size.
    clock: seconds. run_with_context, context_tokens: the same step over a KV cache that holds `context_tokens` tokens
    in total; the difference, per token, becomes per_context_token (never below 0). interpolate: as in StepCostTable.
    progress: called with (runs done, runs in all).

    A size's time is the median of its runs; the runs go round the sizes, so a slow spell of the machine touches all of
    them alike. Where noise still makes a larger size cheaper than a smaller one, both take their common mean (isotonic
    regression).
    """
    ordered = sorted({curves.whole("sizes", size, 1) for size in sizes})
    if not ordered:
        raise ValueError("sizes is empty; use the packed sizes that the engine runs")
    curves.whole("warmup", warmup, 0)
    curves.whole("repeats", repeats, 1)
    if (run_with_context is None) != (curves.whole("context_tokens", context_tokens, 0) == 0):
        raise ValueError(f"run_with_context and context_tokens={context_tokens!r}: give both, or neither")
    jobs: list[tuple[Callable[[int], object], int]] = [(run, size) for size in ordered]
    if run_with_context is not None:
        jobs += [(run_with_context, size) for size in ordered]
    times: list[list[float]] = [[] for _ in jobs]
    rounds = warmup + repeats
    for turn in range(rounds):
        for index, (step, size) in enumerate(jobs):
            start = clock()
            step(size)
            elapsed = clock() - start
            if turn >= warmup:
                times[index].append(elapsed)
            if progress is not None:
                progress(turn * len(jobs) + index + 1, rounds * len(jobs))
    medians = [statistics.median(measured) for measured in times]
    plain, filled = medians[: len(ordered)], medians[len(ordered) :]
    extra = [with_context - without for with_context, without in zip(filled, plain, strict=False)]
    per_context_token = max(0.0, statistics.median(extra) / context_tokens) if extra else 0.0
    return StepCostTable(ordered, _non_decreasing(plain), per_context_token, interpolate=interpolate)


def _non_decreasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares: neighbours out of order share their mean."""
    blocks: list[list[float]] = []  # sums and counts of runs that share one value
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    return [total / count for total, count in blocks for _ in range(int(count))]


def _slots(budgets: Tensor | Sequence[int], context_tokens: float) -> Tensor:
    """The budgets as checked float64 [n] on the host."""
    curves.seconds("context_tokens", context_tokens, positive=False)
    slots = torch.as_tensor(budgets).to(device="cpu", dtype=torch.float64)
    if slots.dim() != 1 or bool((slots < 0).any()):
        raise ValueError(f"budgets={budgets!r} is not usable; use a vector of whole numbers of at least 0")
    return slots
