"""What the hybrid's own work costs: shares of one decode step, and the price of a drafter that is never chosen.

Shares are measured around the real calls of a running engine, each part without what other parts do inside it. The
engine steps are the usual ones; only the clocks are added.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import hspark.step
from hspark.config import SamplingParams
from hspark.core import REASON_ONLY, Chain
from hspark.engine import Engine
from hspark.lab.arms import Arm, SpeculatorArm, parse_arm
from hspark.lab.bench import ArmBuilder
from hspark.lab.floor import linear_seconds
from hspark.policy import chain_value
from hspark.policy.merging import keep, pair
from hspark.policy.selection import ModelOnly

# In the order of a step. "host" is what remains of the engine's step.
TARGET, DRAFTER = "target forward", "drafter forward"
SCAN, ESTIMATE, CHOOSE, ALLOCATE = "n-gram scan", "estimate", "choose", "allocate"
VERIFY, COMMIT, SIZING, COLLECT, HOST = "verify", "commit", "sizing", "collect", "host"
PARTS = (TARGET, DRAFTER, SCAN, ESTIMATE, CHOOSE, ALLOCATE, VERIFY, COMMIT, SIZING, COLLECT, HOST)
MODELS = (TARGET, DRAFTER)
BASELINE, NEVER = "model_only", "never_choose"


@dataclass(frozen=True)
class NeverChoose(ModelOnly):
    """Always d, after all the work of choosing: the overhead of an n-gram drafter that is run and never used.

    Not in the registry, as it is of no use but for this measurement.
    """

    name: ClassVar[str] = NEVER
    needs_free: ClassVar[bool] = True

    def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
        model, free = pair(model_chain, free_chain)
        value = chain_value(free.survival, price)
        # A value is a sum of terms of at least 0, which a compiler does not know, so that it drops none of the work.
        wins = (free.length > 0) & (value >= chain_value(model.survival, price)) & (value < 0)
        return keep(wins, model, free, torch.full_like(model.length, REASON_ONLY))


def never_choose_arm(builder: ArmBuilder, batch_size: int) -> Arm:
    """The arm that is compared with model_only: same model drafter, same cost model, so budgets are the same too."""
    spec = parse_arm(BASELINE)
    return SpeculatorArm(spec, builder.speculator(spec, batch_size, NeverChoose()))


class Stopwatch:
    """Seconds by part, each without the parts called inside it. synchronise: waits for the device."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, synchronise: Callable[[], Any] = lambda: None
    ) -> None:
        self.clock, self.synchronise = clock, synchronise
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time booked to `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.synchronise()
            begun = self.clock()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                self.synchronise()
                elapsed = self.clock() - begun
                self.seconds[part] = self.seconds.get(part, 0.0) + elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        return timed

    def take(self) -> dict[str, float]:
        """What was booked since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


@contextmanager
def timed_parts(engine: Engine, watch: Stopwatch) -> Iterator[None]:
    """Books the parts of every step of an engine that is not compiled, while the context lasts."""
    step = engine.device_step
    model, free = step.model_drafter, step.free_drafter
    places: list[tuple[Any, str, str]] = [
        (engine.sizing, "decide", SIZING),
        (engine, "_collect", COLLECT),
        (engine, "_run_propose", CHOOSE),
        (engine, "_run_verify", VERIFY),
        (step, "policy", CHOOSE),
        (engine, "_run_allocate", ALLOCATE),
        (step, "verifier", VERIFY),
        (hspark.step, "commit", COMMIT),
        (step.target, "plan", TARGET),
        (step.target, "forward", TARGET),
    ]
    if model is not None:
        places += [(model, "propose", DRAFTER), (model, "observe", DRAFTER)]
    if free is not None:
        places += [(free, "propose", ESTIMATE), (free, "match", SCAN)]
    before = [(owner, name, name in vars(owner), getattr(owner, name)) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, watch.wrap(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, own, value in before:
            setattr(owner, name, value) if own else delattr(owner, name)


@dataclass(frozen=True)
class Share:
    """One part: the median over steps of its seconds, and of its share of its step (0 to 1)."""

    part: str
    seconds: float
    share: float


@dataclass(frozen=True)
class StepShares:
    """Shares of a decode step. seconds: of the step, median. hybrid_share: of all that is neither the target's nor the
    model drafter's forward, median over steps. context: mean tokens per row. tokens, slots: emitted and verified by a
    step, over the batch, means. linear_seconds: of the target's linear layers alone (`hspark.lab.floor`), on as many
    tokens as a step packs on average."""

    steps: int
    batch_size: int
    context: float
    seconds: float
    tokens: float
    slots: float
    linear_seconds: float
    parts: list[Share]
    hybrid_share: float


def measure_shares(
    engine: Engine,
    prompts: Sequence[list[int]],
    steps: int,
    *,
    steps_per_round: int = 16,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> StepShares:
    """Decodes with all rows running and books at least `steps` steps.

    prompts: token ids, more than there are rows or not; they take turns. A round decodes `steps_per_round` steps after
    `warmup` ones, and ends there, so that contexts stay near the prompts' lengths and texts are not run past their end.
    The engine has to be idle, not compiled, and its rows long enough for a round in which every draft is accepted.
    """
    if engine.has_work:
        raise ValueError("engine is decoding; use one that is idle")
    rows = engine.target.rows
    room = (warmup + steps_per_round + engine.run_ahead + 1) * (engine.device_step.width + 1)
    longest = max(map(len, prompts))
    if longest + room > engine.capacity:
        raise ValueError(
            f"prompts of up to {longest} tokens: the engine's rows hold {engine.capacity} tokens, and a round in which "
            f"every draft is accepted emits {room}; use rows of at least {longest + room}, or shorter rounds"
        )
    synchronise = (lambda: None) if engine.device.type == "cpu" else torch.accelerator.synchronize
    watch = Stopwatch(clock, synchronise)
    run_step = watch.wrap(HOST, engine.step)
    booked: list[dict[str, float]] = []
    contexts: list[float] = []
    tokens = slots = 0
    with timed_parts(engine, watch):
        turn = 0
        while len(booked) < steps:
            chosen = [prompts[(turn + row) % len(prompts)] for row in range(rows)]
            turn += rows
            params = SamplingParams(max_new_tokens=room, ignore_eos=True, seed=0)
            requests = [engine.submit(list(prompt), params) for prompt in chosen]
            while not all(request.metrics.steps for request in requests):  # prompts, and each row's first step
                engine.step()
            for _ in range(warmup):
                engine.step()
            for _ in range(steps_per_round):
                watch.take()
                had, verified = sum(len(r.token_ids) for r in requests), engine.slots_verified
                contexts += [len(r.prompt) + len(r.token_ids) for r in requests]
                run_step()
                booked.append(watch.take())
                tokens += sum(len(r.token_ids) for r in requests) - had
                slots += engine.slots_verified - verified
            for request in requests:
                engine.cancel(request)
            while engine.has_work:
                engine.step()
    packed = max(1, round(rows + slots / len(booked)))
    linear = linear_seconds(engine.target.model, packed, clock=clock, synchronise=synchronise)
    return _shares(booked, rows, statistics.fmean(contexts), tokens / len(booked), slots / len(booked), linear)


def _shares(
    booked: list[dict[str, float]], rows: int, context: float, tokens: float, slots: float, linear: float
) -> StepShares:
    totals = [sum(step.values()) for step in booked]

    def median_share(parts: Sequence[str]) -> float:
        return statistics.median(
            sum(step.get(part, 0.0) for part in parts) / total for step, total in zip(booked, totals, strict=True)
        )

    used = [part for part in PARTS if any(part in step for step in booked)]
    return StepShares(
        steps=len(booked),
        batch_size=rows,
        context=context,
        seconds=statistics.median(totals),
        tokens=tokens,
        slots=slots,
        linear_seconds=linear,
        parts=[
            Share(part, statistics.median(step.get(part, 0.0) for step in booked), median_share([part]))
            for part in used
        ],
        hybrid_share=median_share([part for part in used if part not in MODELS]),
    )
