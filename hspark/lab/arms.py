"""The arms of a benchmark: ways of decoding the same prompts on one set of weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hspark.config import EngineConfig, SamplingParams
from hspark.lab.runs import GroupRun
from hspark.policy import policy, policy_names
from hspark.request import Request
from hspark.speculator import HybridSpeculator

# transformers' own generate; with a number, prompt lookup with as many draft tokens.
PEERS: dict[str, int | None] = {"transformers": None, "transformers-lookup": 10}

Watch = Callable[[list[Request]], None]


@dataclass(frozen=True)
class ArmSpec:
    """One arm. policy is None for a peer; budget as in EngineConfig; lookup_tokens for the prompt-lookup peer."""

    name: str
    policy: str | None
    budget: str | int = "adaptive"
    lookup_tokens: int | None = None

    @property
    def is_peer(self) -> bool:
        return self.policy is None

    def drafter_names(self, model: str | None) -> tuple[str, ...]:
        """Which drafters run in this arm, given the model drafter's name; arms that agree have the same step cost."""
        if self.policy is None:
            return ()
        chosen = policy(self.policy)
        models = () if model is None or not chosen.needs_model else (model,)
        return models + (("ngram",) if chosen.needs_free else ())

    @property
    def needs_model(self) -> bool:
        return self.policy is not None and policy(self.policy).needs_model


def parse_arm(text: str) -> ArmSpec:
    """An arm from its name: a policy ("ngram_only"), one with a budget ("proposed:all", "ngram_only:8"), or a peer."""
    name = text.strip()
    if name in PEERS:
        return ArmSpec(name, None, lookup_tokens=PEERS[name])
    chosen, colon, suffix = name.partition(":")
    if chosen not in policy_names() or (colon and not suffix):
        accepted = ", ".join(map(repr, (*policy_names(), *PEERS)))
        raise ValueError(
            f"arm={text!r} is unknown; use one of {accepted}, a policy with a budget ('ngram_only:all', 'proposed:8')"
        )
    if colon and chosen == "vanilla":
        raise ValueError(f"arm={text!r}: vanilla verifies no drafts, so it takes no budget; use 'vanilla'")
    budget = int(suffix) if suffix.isdecimal() else suffix or "adaptive"
    EngineConfig(policy=chosen, budget=budget)
    return ArmSpec(name, chosen, budget)


class SpeculatorArm:
    """An arm that is a HybridSpeculator. Requests beyond its rows queue."""

    def __init__(self, spec: ArmSpec, speculator: HybridSpeculator) -> None:
        self.spec, self.speculator = spec, speculator
        self._synchronise = _synchroniser(speculator.engine.device)
        if speculator.engine.device.type != "cpu":
            self._time_prefill()

    def _time_prefill(self) -> None:
        """Waits for the device around every prompt chunk: otherwise only the time of enqueueing it is booked."""
        engine = self.speculator.engine
        inner = engine._prefill_chunk

        def timed(row: int, request: Request, count: int) -> None:
            self._synchronise()
            before, begun = request.metrics.prefill_seconds, time.perf_counter()
            inner(row, request, count)
            self._synchronise()
            request.metrics.prefill_seconds = before + time.perf_counter() - begun

        engine._prefill_chunk = timed  # type: ignore[method-assign]

    def run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], watch: Watch | None = None
    ) -> GroupRun:
        """Decodes the prompts (token ids), as many at once as there are rows. watch: called after every step."""
        engine = self.speculator.engine
        run = GroupRun([], 0.0, 0.0, 0)
        slots, step = engine.slots_verified, engine.step_number
        self._synchronise()
        begun = time.perf_counter()
        requests = [engine.submit(list(prompt), own) for prompt, own in zip(prompts, params, strict=True)]
        try:
            while not all(request.done for request in requests):
                engine.step()
                if engine.step_number > step:
                    run.steps += engine.step_number - step
                    run.budget += engine.decision.budget
                    run.price += engine.decision.price
                    step = engine.step_number
                if watch is not None:
                    watch(requests)
            run.seconds = time.perf_counter() - begun
            run.slots = engine.slots_verified - slots
        finally:
            for request in requests:
                engine.cancel(request)
        while engine.has_work:  # a step that was enqueued before the end was seen
            engine.step()
        run.token_ids = [request.token_ids for request in requests]
        run.metrics = [request.metrics for request in requests]
        run.errors = [request.error for request in requests if request.error is not None]
        run.prefill_seconds = sum(metrics.prefill_seconds for metrics in run.metrics)
        run.decode_tokens, run.forwards = run.tokens, run.steps
        return run


class PeerArm:
    """An arm that is transformers' own generate, one prompt after the other.

    assistant: a causal LM with the same token ids, for assisted generation; None without.
    """

    def __init__(self, spec: ArmSpec, model: Any, eos_token_ids: tuple[int, ...], assistant: Any | None = None) -> None:
        self.spec, self.model, self.eos_token_ids, self.assistant = spec, model, eos_token_ids, assistant

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], watch: Watch | None = None
    ) -> GroupRun:
        """As SpeculatorArm.run; there are no steps to watch. Only the length, temperature and seed of params apply."""
        run = GroupRun([], 0.0, 0.0, 0)
        synchronise = _synchroniser(self.model.device)
        assisted = {} if self.assistant is None else {"assistant_model": self.assistant}
        for prompt, own in zip(prompts, params, strict=True):
            clock = _Clock()
            ids = torch.tensor([prompt], device=self.model.device)
            if not own.greedy:
                torch.manual_seed(own.seed or 0)
            synchronise()
            begun = time.perf_counter()
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._config(own),
                streamer=clock,
                **assisted,
            )
            synchronise()
            run.seconds += time.perf_counter() - begun
            run.forwards += len(clock.times) - 2  # neither the prompt nor what its forward gave
            run.prefill_seconds += clock.times[1] - begun
            tokens = output[0, len(prompt) :].tolist()
            run.token_ids.append(tokens)
            run.decode_tokens += len(tokens) - clock.counts[1]
        return run

    def _config(self, params: SamplingParams) -> GenerationConfig:
        eos = None if params.ignore_eos else list(self.eos_token_ids) or None
        pad = self.eos_token_ids[0] if self.eos_token_ids else 0
        config = GenerationConfig(max_new_tokens=params.max_new_tokens, eos_token_id=eos, pad_token_id=pad)
        config.prompt_lookup_num_tokens = self.spec.lookup_tokens
        config.do_sample = not params.greedy
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = params.temperature, 0, 1.0
        return config


class _Clock(BaseStreamer):
    """When tokens arrived, and how many: first the prompt, then what each forward gave."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Arm(Protocol):
    """A way of decoding prompts (lists of token ids), each with its own parameters."""

    def run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], watch: Watch | None = None
    ) -> GroupRun: ...


def plain_copy(model: nn.Module) -> Any:
    """The model as transformers made it, sharing its weights: for the peers, and to look at logits.

    To be made before hspark takes over `model`, whose attention it replaces and whose linear layers it lays out anew.
    Defaults of its generation config are dropped, because the other arms know none.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    plain: Any = copy.deepcopy(model, shared)
    plain.generation_config = GenerationConfig()
    return plain


def _synchroniser(device: torch.device) -> Callable[[], None]:
    return (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
