"""How the parts of a step grow: with the batch, the context, the drafts; the scan, the sizing, the memory.

Steps run on made-up rows, as the cost profile at start-up does. Every point is the median of some repeats after a
warm-up. Between successive sizes a growth exponent is fitted: time ~ x^e, where e = 0 is free and e = 1 proportional.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hspark.drafters import DSparkDrafter, NgramDrafter
from hspark.drafters.base import Drafter
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.drafters.dspark_context import buffer_bytes
from hspark.drafters.ngram import match
from hspark.kv_buffers import KVBuffers, LayerShape
from hspark.lab.scale_report import BYTES, FULL, SECONDS, ScaleSizes, Section, Series
from hspark.memory import free_memory
from hspark.policy import LinearCost, choose_budget, policy
from hspark.profiling import Runner
from hspark.rows import new_rows
from hspark.step import DecodeStep, StepFunctions
from hspark.target import CausalTarget
from hspark.verify import verifier

# Of the memory that is free, the share that a point may take.
_FREE_SHARE = 0.8


class StepSize(NamedTuple):
    """A step to measure: with drafters or without, rows, tokens of context and draft slots of each row."""

    hybrid: bool
    rows: int
    context: int
    slots: int


Progress = Callable[[str], None]


class Scale:
    """Measures the sections on one target.

    model: a transformers causal LM, which is taken over. drafter: a model drafter, or None. available: bytes that can
    be allocated (None: unknown, nothing is left out). clock, available: for tests. progress: told of every point.
    """

    def __init__(
        self,
        model: Any,
        drafter: Drafter | None,
        sizes: ScaleSizes = FULL,
        *,
        clock: Callable[[], float] = time.perf_counter,
        available: Callable[[torch.device], int | None] = free_memory,
        progress: Progress = lambda _: None,
    ) -> None:
        self.model, self.drafter, self.sizes = model, drafter, sizes
        self.clock, self.available, self.progress = clock, available, progress
        probe = CausalTarget(model, 1, 2)
        self.shapes, self.dtype, self.device = probe.buffers.shapes, probe.dtype, probe.device
        self.vocab = probe.vocab_size
        self.limit = getattr(probe.config, "max_position_embeddings", None)

    def sections(self) -> list[Section]:
        return [self.by_batch(), self.by_context(), self.by_slots(), self.scan(), self.sizing(), self.memory()]

    # -- steps -----------------------------------------------------------------------------------------------------

    def by_batch(self) -> Section:
        context = self.sizes.step_context
        return Section(
            f"step time by batch, {context} tokens of context",
            "rows",
            SECONDS,
            "flat while reading the weights is the cost; towards x^1 as arithmetic, and each row's keys, take over",
            [
                self._steps(name, {rows: StepSize(hybrid, rows, context, slots) for rows in self.sizes.batches})
                for name, hybrid, slots in self._variants()
            ],
        )

    def by_context(self) -> Section:
        rows = self.sizes.step_batch
        return Section(
            f"step time by context, {rows} rows",
            "tokens of context a row",
            SECONDS,
            "flat while the weights outweigh the keys and values; towards x^1 once attention reads more than they are",
            [
                self._steps(name, {context: StepSize(hybrid, rows, context, slots) for context in self.sizes.contexts})
                for name, hybrid, slots in self._variants()
            ],
        )

    def _variants(self) -> list[tuple[str, bool, int]]:
        slots = self.sizes.step_slots
        return [("plain step", False, 0), (f"hybrid step, {slots} slots a row", True, slots)]

    def by_slots(self) -> Section:
        context = self.sizes.step_context
        return Section(
            f"step time by draft slots, {context} tokens of context",
            "draft slots a row",
            SECONDS,
            "the price of a slot: free up to where the linear layers turn from reading to arithmetic; x is 1 + slots",
            [
                self._steps(
                    f"hybrid step, {rows} rows",
                    {slots: StepSize(True, rows, context, slots) for slots in self.sizes.slots},
                    shift=1,
                )
                for rows in dict.fromkeys((1, self.sizes.step_batch))
            ],
        )

    def _steps(self, name: str, settings: dict[int, StepSize], shift: int = 0) -> Series:
        """One curve of whole steps over the sizes that are the keys."""
        measured: dict[int, float] = {}
        left_out: dict[int, str] = {}
        for x, size in settings.items():
            self.progress(f"{name}, {x}")
            problem = self._unfit(size)
            if problem is not None:
                left_out[x] = problem
            else:
                measured[x] = self._step_seconds(size)
        return Series(name, list(measured), list(measured.values()), left_out, shift)

    def _unfit(self, size: StepSize) -> str | None:
        """Why a step cannot be measured here, or None."""
        hybrid, rows, context, slots = size
        length = self._length(context)
        if self.limit is not None and length > self.limit:
            return f"the model has {self.limit} positions"
        width = 15 if not hybrid or self.drafter is None else max(15, self.drafter.width)
        if slots > width:
            return f"chains have {width} slots"
        needed = self.kv_bytes(rows, length) + rows * (1 + slots) * self.vocab * 12  # logits, and float32 of them
        if hybrid:
            needed += self.drafter_bytes(rows, length)
        free = self.available(self.device)
        if free is not None and needed > _FREE_SHARE * free:
            return f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        return None

    def _length(self, context: int) -> int:
        """Positions of a row's buffers: the context and room for a step; at the model's limit the context gives way."""
        if self.limit is not None and context <= self.limit < context + 32:
            return self.limit
        return context + 32

    @torch.inference_mode()
    def _step_seconds(self, size: StepSize) -> float:
        hybrid, rows, context, slots = size
        length = self._length(context)
        target = CausalTarget(self.model, rows, length)
        model_drafter = copy.copy(self.drafter) if hybrid and self.drafter is not None else None
        rule = "vanilla" if not hybrid else "proposed" if model_drafter is not None else "ngram_only"
        step = DecodeStep(target, policy(rule), verifier("coupled"), model_drafter, NgramDrafter() if hybrid else None)
        for part in step.drafters:
            part.bind(target.info("target"), rows, length)
        target.set_taps(tuple(tap for part in step.drafters for tap in part.taps))
        state = new_rows(rows, length, self.device)
        state.tokens.copy_(torch.randint(0, self.vocab, state.tokens.shape, device=self.device))
        filled = min(context, length - step.width - 2)
        run = Runner(step, StepFunctions.of(step), state, filled, padded=self.device.type != "cpu")
        try:
            return self._median(partial(run, rows * (1 + slots)))
        finally:
            target.set_taps(())  # takes its hooks off the model, which the next point uses again

    def _median(self, run: Callable[[], Any]) -> float:
        synchronise = (lambda: None) if self.device.type == "cpu" else torch.accelerator.synchronize
        times = []
        for _ in range(self.sizes.repeats + 1):
            synchronise()
            begun = self.clock()
            run()
            synchronise()
            times.append(self.clock() - begun)
        return statistics.median(times[1:])

    # -- the hybrid's own parts ------------------------------------------------------------------------------------

    def scan(self) -> Section:
        series = []
        for rows in self.sizes.scan_rows:
            values = []
            for context in self.sizes.scan_contexts:
                self.progress(f"scan, {rows} x {context}")
                tokens = torch.randint(0, self.vocab, (rows, context), device=self.device)
                length = torch.full((rows,), context, device=self.device)
                values.append(self._median(partial(match, tokens, length)))
            series.append(Series(f"{rows} rows", list(self.sizes.scan_contexts), values))
        return Section(
            "n-gram scan",
            "tokens of context a row",
            SECONDS,
            "flat while starting its operators is the cost, then x^1: every position is held against the newest ones",
            series,
        )

    def sizing(self) -> Section:
        cost = LinearCost(0.02, 0.0005)
        values = []
        for rows in self.sizes.budget_rows:
            self.progress(f"sizing, {rows} rows")
            survival = torch.rand(rows, 15).cumprod(dim=1)
            values.append(self._median(partial(choose_budget, survival, rows, cost)))
        return Section(
            "budget sizing on the host, 15 slots a row",
            "rows",
            SECONDS,
            "flat up to some hundred rows, then a little above x^1: one sort of all survivals, and C(b) for every b",
            [Series("choose_budget", list(self.sizes.budget_rows), values)],
        )

    # -- memory ----------------------------------------------------------------------------------------------------

    def kv_bytes(self, rows: int, length: int) -> int:
        """Bytes of the target's keys and values for `rows` rows of up to `length` tokens."""
        return _kv_bytes(self.shapes, rows, length, self.dtype)

    def drafter_bytes(self, rows: int, length: int) -> int:
        """Bytes that the model drafter keeps per row; the n-gram drafter keeps nothing."""
        drafter = self.drafter
        if isinstance(drafter, DSparkDrafter):
            return buffer_bytes(drafter.config, rows, length, self.dtype)
        if isinstance(drafter, CausalLMDrafter):
            lm = CausalTarget(drafter.model, 1, 2)
            return _kv_bytes(lm.buffers.shapes, rows, length, lm.dtype)
        return 0

    def memory(self) -> Section:
        series = []
        kinds = [("target KV", self.kv_bytes)]
        if self.drafter is not None:
            kinds.append((self.drafter.name, self.drafter_bytes))
        for name, count in kinds:
            for rows in self.sizes.memory_rows:
                lengths = list(self.sizes.memory_lengths)
                values = [float(count(rows, length)) for length in lengths]
                series.append(Series(f"{name}, {rows} rows", lengths, values))
        return Section(
            "memory by formula, allocated once at start",
            "tokens a row holds",
            BYTES,
            "x^1 in rows and in length, as the buffers are static; KV: keys and values. The n-gram drafter has none",
            series,
        )


def _kv_bytes(shapes: list[LayerShape], rows: int, length: int, dtype: torch.dtype) -> int:
    """What KVBuffers would allocate, asked of buffers without storage."""
    return KVBuffers(shapes, rows, length, dtype, torch.device("meta")).num_bytes()
