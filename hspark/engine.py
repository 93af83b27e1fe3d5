"""The host side: rows, admission, prefill, the loop, finishing and cancelling.

The loop enqueues steps and collects their outcomes `run_ahead` steps later (0: at once). A row whose end the host has
not seen yet runs on; what it emits then is dropped, because outcomes belong to the request that held the row when the
step was enqueued, not to the row.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hspark.config import SamplingParams
from hspark.core import Chain, RowState
from hspark.drafters.base import PromptReader
from hspark.parallel import from_first_rank
from hspark.policy import BudgetDecision, CostModel
from hspark.readback import Readback
from hspark.repair import resume, scrub
from hspark.request import Request, check_request
from hspark.rows import check_row, new_rows, write_request
from hspark.sampling import SamplingMode
from hspark.sizing import Sizing
from hspark.step import DecodeStep, Outcome, StepFunctions


class InFlight(NamedTuple):
    """A step that was enqueued: its number, its outcome on its way here, and who held the rows."""

    step: int
    outcome: Readback
    owners: tuple[Request | None, ...]


class Engine:
    """Runs many requests through one DecodeStep on `rows` static rows.

    budget: "adaptive", "all", or a number of slots per step. budget_delay: steps between survivals and the step that
    they size. functions: the step's own, compiled or not; sizes are padded for compiled ones. rows: the device's record
    of free rows, or None for a new one. run_ahead: steps enqueued before the oldest outcome is read.
    prefill_tokens: prompt tokens processed between two decode steps while other requests are running. sharded: the
    target is spread over processes that all run this engine on the same requests. Threads take turns, step by step; one
    that runs CUDA graphs stays with the thread that made it.
    """

    def __init__(
        self,
        step: DecodeStep,
        cost: CostModel,
        *,
        budget: str | int = "adaptive",
        budget_delay: int = 2,
        run_ahead: int = 0,
        prefill_tokens: int = 1024,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Any | None = None,
        lossy: bool = False,
        functions: StepFunctions | None = None,
        rows: RowState | None = None,
        sharded: bool = False,
    ) -> None:
        self.device_step = step
        functions = StepFunctions.of(step) if functions is None else functions
        self._run_propose, self._run_allocate, self._run_verify = functions[:3]
        step.on_failure = self._draft_failed
        padded = functions.compiled or step.target.device.type != "cpu"
        self.sizing = Sizing(step, cost, budget, budget_delay, padded)
        self.run_ahead, self.prefill_tokens, self.sharded = run_ahead, prefill_tokens, sharded
        self.eos_token_ids, self.tokenizer, self.lossy = eos_token_ids, tokenizer, lossy
        target = step.target
        self.target, self.device, self.capacity = target, target.device, target.max_length
        self.names = [
            "target",
            step.model_drafter.name if step.model_drafter else "model",
            step.free_drafter.name if step.free_drafter else "ngram",
        ]
        self.rows = new_rows(target.rows, target.max_length, self.device) if rows is None else rows
        self.speculate = torch.ones(target.rows, dtype=torch.bool, device=self.device)
        self.owners: list[Request | None] = [None] * target.rows
        self.waiting: deque[Request] = deque()
        self.in_flight: deque[InFlight] = deque()
        self.void_before = [0] * target.rows  # outcomes of earlier steps do not count for that row
        self.suspended: set[int] = set()  # rows that take one step without drafts, see `hspark.repair.scrub`
        self.step_number = 0
        self.slots_verified = 0
        self.draft_failures = 0
        self._numbers = 0
        self._turn = threading.RLock()
        # torch keeps CUDA graphs by thread: in another one it fails (2.11), or records all of them anew, in memory of
        # their own (2.13).
        self.only_thread = threading.get_ident() if functions.compiled and self.device.type == "cuda" else None

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, prompt: list[int], params: SamplingParams) -> Request:
        """Queues a request; it gets a row as soon as one is free. ValueError for a prompt that cannot run."""
        self.check(prompt, params)
        seed = params.seed if params.seed is not None else from_first_rank(secrets.randbits(63), self.sharded)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(self.eos_token_ids))
        lossy = self.lossy and not params.greedy
        with self._turn:
            request = Request(self._numbers, list(prompt), params, seed, stop_ids, self.tokenizer, lossy)
            self._numbers += 1
            self.waiting.append(request)
        return request

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """ValueError for a prompt or parameters that cannot run here."""
        check_request(prompt, params, self.capacity, self.target.vocab_size, self.tokenizer)

    def cancel(self, request: Request) -> None:
        """Ends a request now, with what it has. Cancelling one that has ended does nothing."""
        with self._turn:
            if request in self.waiting:
                self.waiting.remove(request)
            request.finish("cancelled")
            for row, owner in enumerate(self.owners):
                if owner is request:
                    self.release_row(row)
                    if not request.metrics.steps:  # nobody has seen logits of it: its prompt may have left NaNs
                        scrub(self, row)

    @property
    def decision(self) -> BudgetDecision:
        """Budget and price of the newest step."""
        return self.sizing.decision

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.in_flight or any(self.owners))

    # -- the loop ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> None:
        """Admits, prefills a bounded number of prompt tokens, enqueues one decode step, collects an old one.

        Whatever interrupts it, a signal for example, the engine goes on afterwards from what requests have been told.
        RuntimeError in another thread than the one that made the engine, where it runs CUDA graphs.
        """
        if self.only_thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "compile=True: torch keeps CUDA graphs for the thread that made the engine; call it from there, or "
                "use compile=False to call it from any thread"
            )
        with self._turn:
            try:
                self._admit()
                self._prefill()
                if any(owner is not None and self.ready(owner) for owner in self.owners):
                    self._launch()
                elif self.in_flight:
                    self._collect(self.in_flight.popleft())
                while len(self.in_flight) > self.run_ahead:
                    self._collect(self.in_flight.popleft())
            except BaseException:
                resume(self)
                raise

    def ready(self, request: Request) -> bool:
        """Whether its prompt is processed, but for the last token, which is the first anchor."""
        return request.prefilled >= len(request.prompt) - 1

    def _admit(self) -> None:
        for row, owner in enumerate(self.owners):
            if owner is None and self.waiting:
                self._claim(row, self.waiting[0])
                self.waiting.popleft()

    def _claim(self, row: int, request: Request) -> None:
        """Gives a free row to a request."""
        self.owners[row] = request
        request.admitted = time.perf_counter()
        self.write_row(row, request)
        self.suspended.discard(row)
        if self.ready(request):
            self.start_row(row)

    def write_row(self, row: int, request: Request) -> None:
        """Writes what the device has to know of a request, which does not run yet."""
        params, vocab = request.params, self.target.vocab_size
        self.rows = write_request(self.rows, row, request.prompt, params, request.seed, vocab)
        self.speculate[row] = params.speculate

    def start_row(self, row: int) -> None:
        """From the next step on the row decodes."""
        self.rows.running[row] = True
        self.sizing.history.claim(row, self.step_number)

    def release_row(self, row: int) -> None:
        """Frees a row, whoever holds it."""
        self.owners[row] = None
        self.rows.running[row] = False
        self.rows.length[row] = 1
        self.sizing.history.release(row)

    def _prefill(self) -> None:
        """Processes prompts, oldest request first; all but the last token, which is the first anchor. While others are
        decoding, at most `prefill_tokens` of them."""
        busy = any(owner is not None and self.ready(owner) for owner in self.owners)
        room = self.prefill_tokens
        unready = [(o.number, row, o) for row, o in enumerate(self.owners) if o is not None and not self.ready(o)]
        for _, row, request in sorted(unready, key=lambda entry: entry[0]):
            while not self.ready(request) and (room > 0 or not busy):
                most = room if busy else self.prefill_tokens
                count = min(len(request.prompt) - 1 - request.prefilled, most)
                self._prefill_chunk(row, request, count)
                room -= count

    def _prefill_chunk(self, row: int, request: Request, count: int) -> None:
        start, begun = request.prefilled, time.perf_counter()
        features = self.target.prefill(self.rows.tokens[row, start : start + count], row, start)
        if features is not None:
            position = torch.arange(start, start + count, device=self.device)
            self.device_step.observe(features, torch.full_like(position, row), position)
        for drafter in self.device_step.drafters:
            if isinstance(drafter, PromptReader):
                try:
                    drafter.prefill(self.rows.tokens[row, start : start + count], row, start)
                except Exception as error:
                    self._draft_failed(error)
        request.prefilled += count
        request.metrics.prefill_seconds += time.perf_counter() - begun
        if self.ready(request):
            self.start_row(row)

    def _launch(self) -> None:
        """Enqueues one decode step for all ready rows."""
        if self.device.type == "cuda":  # what the last step's graphs put out has been copied and may be overwritten
            torch.compiler.cudagraph_mark_step_begin()
        owners = tuple(o if o is not None and self.ready(o) else None for o in self.owners)
        running = [owner for owner in owners if owner is not None]
        mode = SamplingMode()
        for owner in running:
            mode = mode.merge(owner.params.mode)
        context = self.sizing.context(running, len(self.in_flight))
        for drafter in self.device_step.drafters:
            if hasattr(drafter, "context_limit"):
                drafter.context_limit = context
        if self.sizing.delay > 0:
            self.sizing.decide(self.step_number, running)
        chain = self._propose(mode)
        if self.sizing.delay == 0:  # fresh sizing: the host waits for this step's own survivals
            self.sizing.history.push(self.step_number, chain.survival)
            self.sizing.decide(self.step_number, running)
        kept = self._run_allocate(chain, self._scalar(self.decision.budget, torch.int64))
        owned = [row for row, owner in enumerate(owners) if owner is not None]
        shape = self.sizing.shape(kept, owned, context, settled=not self.in_flight)
        wants_logprobs = any(owner.params.logprobs for owner in running)
        outcome = self._run_verify(self.rows, chain, kept, mode, shape, wants_logprobs)
        self.in_flight.append(InFlight(self.step_number, Readback(outcome), owners))
        self.step_number += 1

    def _propose(self, mode: SamplingMode) -> Chain:
        """This step's chains; a drafter that raises costs its drafts, never a request."""
        price = self._scalar(self.decision.price, torch.float32)
        try:
            return self._run_propose(self.rows, self.speculate, price, mode)
        except Exception as error:
            self._draft_failed(error)
            return Chain.empty(self.target.rows, self.device_step.width, self.device)

    def _scalar(self, value: float, dtype: torch.dtype) -> Tensor:
        """0-dim, filled on the device: copying it there would wait for the device."""
        return torch.full((), value, dtype=dtype, device=self.device)

    def _draft_failed(self, error: Exception) -> None:
        if not self.draft_failures:
            warnings.warn(f"drafting failed and the step went on without drafts: {error!r}", stacklevel=2)
        self.draft_failures += 1

    def _collect(self, flight: InFlight) -> None:
        """Reads one outcome and hands its tokens to the requests that held the rows."""
        outcome = flight.outcome.wait()
        if self.sizing.delay > 0:
            self.sizing.history.push(flight.step, outcome.survival)
        names = [name for name in Outcome._fields if name not in ("survival", "logprobs")]
        lists = {name: getattr(outcome, name).tolist() for name in names}
        logprobs = None if outcome.logprobs is None else outcome.logprobs.tolist()
        for row, request in enumerate(flight.owners):
            if request is None or flight.step < self.void_before[row]:
                continue
            if lists["failed"][row] and (request.done or lists["kept"][row]):
                scrub(self, row)
            elif lists["failed"][row]:
                self._fail(row, request)
            elif not request.done:
                seen = {name: values[row] for name, values in lists.items()}
                self._deliver(row, request, seen, None if logprobs is None else logprobs[row])

    def _fail(self, row: int, request: Request) -> None:
        at = len(request.prompt) + len(request.token_ids)
        request.finish("error", f"the target's logits for position {at} hold NaN or infinity; the request was ended")
        self.release_row(row)
        scrub(self, row)

    def _deliver(self, row: int, request: Request, seen: dict[str, Any], logprobs: list[float] | None) -> None:
        limit = min(request.params.max_new_tokens, self.capacity - len(request.prompt))
        request.deliver(seen, self.names, logprobs, limit)
        self.slots_verified += seen["kept"]
        if row in self.suspended:
            self.suspended.discard(row)
            self.speculate[row] = request.params.speculate
        if request.done and self.owners[row] is request:
            self.release_row(row)

    def check_integrity(self) -> None:
        """Compares host and device state; RuntimeError that says what differs. Meaningful with nothing in flight."""
        for row, owner in enumerate(self.owners):
            ready, settled = owner is not None and self.ready(owner), not self.in_flight
            check_row(self.rows, row, owner, ready, settled, self.capacity)
