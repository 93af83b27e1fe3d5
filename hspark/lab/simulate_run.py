"""The loop of a simulation: all replicas take one step at a time (see `hspark.lab.simulate`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hspark.core import SOURCE_FREE, SOURCE_MODEL, Chain
from hspark.lab.simulate_sizing import Costs, Decisions, allocate_counts, choose, evaluate, expected_tokens
from hspark.lab.simulation import Recorder, Simulation
from hspark.lab.table import Estimator, RecordTable
from hspark.policy import AcceptanceEstimator, Policy

Array = NDArray[Any]
Ints = NDArray[np.int64]


class Prepared:
    """A table with the survivals of one estimator, ready for many simulations.

    estimator: for the model-free chains, or conditional acceptances float [N, L]; None for the published fit for
    Qwen3-4B. model_acceptance: float [N, K] in place of the recorded one.
    """

    def __init__(
        self,
        table: RecordTable,
        estimator: Estimator | Array | None = None,
        *,
        model_acceptance: Array | None = None,
    ) -> None:
        self.table = table
        given = AcceptanceEstimator.preset("qwen3-4b") if estimator is None else estimator
        self.model = _clean(table.model_chain(model_acceptance))
        self.free = _clean(table.free_chain(given))
        widest = max(table.model_width, table.free_width)
        self.truth = np.concatenate([table.token.astype(np.int64), np.full(widest, -1)])
        self.remaining = table.remaining
        self.room = table.limit[table.output].astype(np.int64) - table.position - 1
        self.context = table.prompt_length[table.output].astype(np.int64) + table.position


class _Sized(NamedTuple):
    """What a step was sized from: survival [P, B, W], and which rows' values are their own, bool [P, B]."""

    survival: Array
    own: Array


class Run:
    """The state of all replicas that still have requests; finished ones are dropped from the arrays."""

    def __init__(
        self,
        prepared: Prepared,
        policy: Policy,
        costs: Costs,
        rows: int,
        budget: str | int,
        delay: int,
        queues: list[Ints],
        by_row: bool,
        staleness: bool,
    ) -> None:
        self.prepared, self.policy, self.costs, self.rows = prepared, policy, costs, rows
        self.delay, self.total, self.by_row, self.staleness = delay, len(queues), by_row, staleness
        self.model, self.free = prepared.model if policy.needs_model else None, None
        if policy.needs_free:
            self.free = prepared.free
        self.width = max((chain.width for chain in (self.model, self.free) if chain is not None), default=0)
        self.budget = budget if budget == "adaptive" else self.width * rows if budget == "all" else budget
        # Broadcasting a price per row is what this package's policies are known to take.
        self.together = type(policy).__module__ == "hspark.policy.selection"
        longest = max(len(queue) for queue in queues)
        self.queue = np.stack([np.pad(queue, (0, longest - len(queue)), constant_values=-1) for queue in queues])
        self.queued = np.array([len(queue) for queue in queues])
        self.head = np.zeros(self.total, dtype=np.int64)
        self.replicas = np.arange(self.total)
        shape = (self.total, rows)
        self.at = np.full(shape, -1)  # position in the table, -1 for a free row
        self.end = np.zeros(shape, dtype=np.int64)
        self.first = np.zeros(shape, dtype=np.int64)  # first step of the row's request
        self.decided = Decisions.none(self.total)
        self.history: dict[int, Array] = {}
        self.time = 0
        self.recorder = Recorder(self.total)

    # -- one step of every replica -------------------------------------------------------------------------------

    def step(self) -> int:
        """Admits, sizes, proposes, allocates, verifies and commits; returns the row-steps done."""
        self._admit()
        running = self.at >= 0
        place = np.where(running, self.at, 0)
        requests = running.sum(axis=1)
        context = (self.prepared.context[place] * running).sum(axis=1)
        sized = None
        if self.delay:
            sized = self._stale(running)
            self.decided = self._size(sized.survival, requests, context)
        chain, length, survival = self._propose(place, running)
        self.history[self.time] = survival
        if not self.delay:
            self.decided = self._size(survival, requests, context)
        kept = allocate_counts(survival, length, self.decided.budget)
        accepted = np.minimum(self._right(chain, place, length), kept)
        accepted = np.minimum(accepted, self.prepared.remaining[place] - 1) * running
        self._note(chain, place, running, length, kept, accepted, requests, context)
        if sized is not None and self.staleness:
            self._note_staleness(sized, survival, length, running, requests, context)
        self._advance(accepted, running)
        return int(requests.sum())

    def _admit(self) -> None:
        """Fills free rows, in their order, from each replica's queue."""
        vacant = self.at < 0
        if not vacant.any():
            return
        turn = self.head[:, None] + vacant.cumsum(axis=1) - 1
        filled = vacant & (turn < self.queued[:, None])
        replica, row = np.nonzero(filled)
        output = self.queue[replica, turn[filled]]
        start = self.prepared.table.start
        self.at[replica, row], self.end[replica, row] = start[output], start[output + 1]
        self.first[replica, row] = self.time
        self.head += filled.sum(axis=1)

    def _stale(self, running: Array) -> _Sized:
        """What `SurvivalHistory.read` gives: own survivals where they are old enough, 1 for new requests, else 0."""
        source = self.time - self.delay
        known = self.history.get(source)
        if known is None:
            own = np.zeros_like(running)
            values = np.broadcast_to(running[:, :, None], (*running.shape, self.width)).astype(np.float32)
            return _Sized(values, own)
        own = running & (self.first <= source)
        values = known
        if not own.all():
            values = np.where(own[:, :, None], known, running[:, :, None].astype(np.float32))
        return _Sized(values, own)

    def _size(self, survival: Array, requests: Ints, context: Ints) -> Decisions:
        if self.budget == "adaptive":
            return choose(survival, requests, self.costs, context)
        return evaluate(survival, requests, self.costs, context, int(self.budget))

    def _propose(self, place: Ints, running: Array) -> tuple[Chain, Ints, Array]:
        """The policy's chains [P * B, W], their length [P, B] cut to the room left, and survival [P, B, W]."""
        index = torch.from_numpy(place.reshape(-1))
        count = index.shape[0]
        model, free = (
            Chain.empty(count, 0, source=source) if chain is None else _take(chain, index, source)
            for chain, source in ((self.model, SOURCE_MODEL), (self.free, SOURCE_FREE))
        )
        price = torch.from_numpy(self.decided.price.astype(np.float32))
        if price.shape[0] == 1:
            chain = self.policy(model, free, price[0])
        elif self.together:
            chain = self.policy(model, free, price.repeat_interleave(self.rows)[:, None])
        else:
            parts = [slice(start, start + self.rows) for start in range(0, count, self.rows)]
            chain = _joined([self.policy(_cut(model, p), _cut(free, p), x) for p, x in zip(parts, price, strict=True)])
        room = np.maximum(self.prepared.room[place], 0)
        length = np.minimum(chain.length.numpy().reshape(place.shape), room) * running
        inside = np.arange(self.width) < length[:, :, None]
        survival = np.where(inside, chain.survival.numpy().reshape(*place.shape, self.width), np.float32(0.0))
        return chain, length, survival

    def _right(self, chain: Chain, place: Ints, length: Ints) -> Ints:
        """Leading draft tokens that are what followed in the output, int64 [P, B]."""
        slot = np.arange(self.width)
        truth = self.prepared.truth[place[:, :, None] + slot]
        wrong = chain.tokens.numpy().reshape(truth.shape) != truth
        wrong |= slot >= np.minimum(length, self.prepared.remaining[place])[:, :, None]
        if not self.width:
            return np.zeros_like(place)
        return np.where(wrong.any(axis=2), wrong.argmax(axis=2), self.width)

    def _advance(self, accepted: Ints, running: Array) -> None:
        self.at += (accepted + 1) * running
        self.at[self.at >= self.end] = -1
        self.time += 1
        for old in [known for known in self.history if known < self.time - self.delay]:
            del self.history[old]
        alive = (self.at >= 0).any(axis=1) | (self.head < self.queued)
        if alive.all():
            return
        for name in ("queue", "queued", "head", "replicas", "at", "end", "first"):
            setattr(self, name, getattr(self, name)[alive])
        self.history = {known: values[alive] for known, values in self.history.items()}
        self.decided = self.decided.take(np.flatnonzero(alive))

    # -- what is kept of it --------------------------------------------------------------------------------------

    def _note(
        self,
        chain: Chain,
        place: Ints,
        running: Array,
        length: Ints,
        kept: Ints,
        accepted: Ints,
        requests: Ints,
        context: Ints,
    ) -> None:
        slots = self.width * self.rows
        verified = kept.sum(axis=1)
        source = np.zeros((*place.shape, max(self.width, 1)), dtype=np.int64)
        if chain.source is not None and self.width:
            source = chain.source.numpy().reshape(*place.shape, self.width)
        first = np.where(length > 0, source[:, :, 0], 0)
        free = (source == SOURCE_FREE) & (np.arange(source.shape[2]) < accepted[:, :, None])
        noted: dict[str, Array] = {
            "requests": requests,
            "context": context,
            "budget": self.decided.budget,
            "price": self.decided.price,
            "goodput": self.decided.goodput,
            "expected": self.decided.expected_tokens,
            "seconds": self.costs.at(requests, verified, context, slots),
            "tokens": accepted.sum(axis=1) + requests,
            "drafted": length.sum(axis=1),
            "verified": verified,
            "accepted": accepted.sum(axis=1),
            "rows_model": (first == SOURCE_MODEL).sum(axis=1),
            "rows_free": (first == SOURCE_FREE).sum(axis=1),
            "accepted_free": free.sum(axis=(1, 2)),
        }
        if self.by_row:
            reason = np.zeros_like(place) if chain.reason is None else chain.reason.numpy().reshape(place.shape)
            table = self.prepared.table
            values = {
                "output": np.where(running, table.output[place], -1),
                "position": table.position[place] * running,
                "source": first,
                "reason": reason * running,
                "drafted": length,
                "kept": kept,
                "accepted": accepted,
            }
            noted |= {f"row_{name}": value for name, value in values.items()}
        self.recorder.add(self.replicas, noted)

    def _note_staleness(
        self, sized: _Sized, survival: Array, length: Ints, running: Array, requests: Ints, context: Ints
    ) -> None:
        """Sizes this step again from its own survivals, and compares."""
        fresh = choose(survival, requests, self.costs, context)
        expected, slots = expected_tokens(survival, requests)
        used = np.minimum(self.decided.budget, slots)
        tokens = expected[np.arange(used.shape[0]), used]
        stale_length = np.where(running, (sized.survival > 0).sum(axis=2), 0)
        counted = _worth(sized.survival, allocate_counts(sized.survival, stale_length, self.decided.budget))
        due = _worth(survival, allocate_counts(survival, length, fresh.budget))
        self.recorder.extend(
            {
                "fresh_budget": fresh.budget,
                "fresh_expected": fresh.expected_tokens - requests,
                "stale_goodput": tokens / self.costs.at(requests, used, context, self.width * self.rows),
                "fresh_goodput": fresh.goodput,
                "miscount": np.where(sized.own, counted - due, np.nan),
            }
        )

    def result(self) -> Simulation:
        return self.recorder.simulation(self.rows)


def _worth(survival: Array, kept: Ints) -> Array:
    """Expected accepted drafts of each row, [P, B]: the sum of its first kept[p, r] survivals."""
    return (survival * (np.arange(survival.shape[2]) < kept[:, :, None])).sum(axis=2, dtype=np.float64)


def _clean(chain: Chain) -> Chain:
    """Without NaN, which an estimator may give where nothing matched and a broken drafter anywhere."""
    # The source of each slot is a constant, which `_take` fills in.
    return chain._replace(acceptance=chain.acceptance.nan_to_num(), survival=chain.survival.nan_to_num(), source=None)


def _take(chain: Chain, index: Tensor, source: int) -> Chain:
    """The chains at the positions `index` int64 [n]; all slots are of one source, which needs no memory of its own."""
    shape = (index.shape[0], chain.width)
    return Chain(
        tokens=chain.tokens.index_select(0, index),
        length=chain.length.index_select(0, index),
        acceptance=chain.acceptance.index_select(0, index),
        survival=chain.survival.index_select(0, index),
        point_mass=torch.tensor(True).expand(shape),
        source=torch.tensor(source).expand(shape),
    )


def _cut(chain: Chain, part: slice) -> Chain:
    return Chain(**{name: value[part] for name, value in chain._asdict().items() if value is not None})


def _joined(chains: list[Chain]) -> Chain:
    names = [name for name, value in chains[0]._asdict().items() if value is not None]
    return Chain(**{name: torch.cat([getattr(chain, name) for chain in chains]) for name in names})
