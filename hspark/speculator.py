"""HybridSpeculator: the user's face of the package."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from tqdm import tqdm

from hspark.building import (
    as_drafter,
    check_cost,
    check_ends,
    check_length,
    default_length,
    make_compiler,
    make_config,
    make_cost,
    make_drafter,
    make_lookup,
    make_rules,
    settle,
)
from hspark.compiled_layers import compile_layers
from hspark.config import SamplingParams
from hspark.core import RequestOutput
from hspark.drafters.base import Drafter
from hspark.engine import Engine
from hspark.graphs import hold_addresses
from hspark.huge_pages import use_huge_pages
from hspark.models import end_token_ids, load_target, resolve_device, resolve_dtype
from hspark.parallel import from_first_rank, is_sharded
from hspark.policy import AcceptanceEstimator, CostModel, load_cost
from hspark.prompts import Prompt, as_batch, for_each, items_of
from hspark.request import Request
from hspark.rows import new_rows
from hspark.step import DecodeStep, StepFunctions
from hspark.target import CausalTarget

logger = logging.getLogger("hspark")

# Models from so many bytes on are moved onto huge pages; small ones sit in the caches.
HUGE_PAGES_FROM = 32 << 20


@dataclass(frozen=True)
class StreamChunk:
    """A piece of output: text that became certain (may be empty), and the tokens committed since the last chunk.

    The last chunk carries the finish_reason and the whole output.
    """

    text: str
    token_ids: list[int]
    sources: list[str]
    finish_reason: str | None = None
    output: RequestOutput | None = None


class HybridSpeculator:
    """Decodes with a causal LM, a model drafter and an n-gram drafter under one verification budget.

    Most users call `from_pretrained`. The constructor takes objects: `model`, a transformers causal LM; `tokenizer`, or
    None (prompts are then token ids, and outputs have no text); `drafter`, a model Drafter, or None; `lookup`, "ngram",
    None, or a Drafter; `estimator` for the n-gram drafter, one or what `AcceptanceEstimator.resolve` takes; `cost`,
    "auto" (measured at start-up), a file, or a CostModel; and the settings of `EngineConfig`. Calls from several
    threads take turns; compiled for CUDA, a speculator is called from the thread that made it.
    """

    tokenizer_problem: str | None = None  # why a target that should have a tokenizer has none

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        *,
        name: str = "",
        eos_token_ids: tuple[int, ...] | None = None,
        drafter: Drafter | None = None,
        lookup: str | Drafter | None = "ngram",
        estimator: str | os.PathLike[str] | AcceptanceEstimator = "auto",
        cost: str | os.PathLike[str] | CostModel = "auto",
        **settings: Any,
    ) -> None:
        device = next(model.parameters()).device
        settings.setdefault("max_length", default_length(model))
        self.config = settle(make_config(settings), device, drafter is not None)
        as_drafter("drafter", drafter, "None or a Drafter; from_pretrained takes names and paths")
        self.policy, self.verifier, lossy = make_rules(self.config, drafter, lookup)
        check_cost(cost)
        self.name = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        free, self.estimator_note = make_lookup(lookup, estimator, self.name)
        self.tokenizer = tokenizer
        check_length(self.config.max_length, model)
        ends = end_token_ids(model, tokenizer) if eos_token_ids is None else check_ends(eos_token_ids, model)
        weight_bytes = sum(weight.nbytes for weight in model.parameters())
        compiler = make_compiler(self.config.compile, device)
        target = CausalTarget(model, self.config.max_batch_size, self.config.max_length, lay_out=compiler is None)
        if self.config.compile is True and compiler is None:
            compile_layers(target)
        step = DecodeStep(target, self.policy, self.verifier, drafter, free)
        for part in step.drafters:
            part.bind(target.info(self.name), self.config.max_batch_size, self.config.max_length)
        target.set_taps(tuple(tap for part in step.drafters for tap in part.taps))
        if target.device.type == "cpu" and weight_bytes >= HUGE_PAGES_FROM:
            use_huge_pages()
        sharded = is_sharded(model)
        functions, rows = StepFunctions.of(step, compiler), new_rows(target.rows, target.max_length, target.device)
        if functions.compiled and target.device.type == "cuda":
            hold_addresses(rows, step)
        self.cost = from_first_rank(make_cost(cost, step, functions, rows), sharded)
        self.engine = Engine(
            step,
            self.cost,
            budget=self.config.budget,
            budget_delay=self.config.budget_delay or 0,  # both are settled above
            run_ahead=self.config.run_ahead or 0,
            prefill_tokens=self.config.prefill_tokens,
            eos_token_ids=ends,
            tokenizer=tokenizer,
            lossy=lossy,
            functions=functions,
            rows=rows,
            sharded=sharded,
        )

    @classmethod
    def from_pretrained(
        cls,
        target: str | os.PathLike[str],
        *,
        drafter: str | os.PathLike[str] | Drafter | None = "auto",
        lookup: str | Drafter | None = "ngram",
        policy: Any = "proposed",
        budget: str | int = "adaptive",
        drafting: str = "greedy",
        verify: Any = "coupled",
        estimator: str | os.PathLike[str] | AcceptanceEstimator = "auto",
        cost: str | os.PathLike[str] | CostModel = "auto",
        budget_delay: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_batch_size: int = 4,
        max_length: int | None = None,
        compile: str | bool = "auto",
        allow_lossy: bool = False,
        progress: bool = True,
        tensor_parallel: bool = False,
        **settings: Any,
    ) -> HybridSpeculator:
        """Loads a target and its drafters.

        target: "smollm2-135m", a Hugging Face id, a model directory, or a .gguf file.
        drafter: "auto" (the one known for this target, else none), None, a checkpoint directory or hub id, a Drafter.
        lookup: "ngram", None, or a Drafter. estimator: "auto", a preset's name, a file, or an AcceptanceEstimator.
        cost: "auto", a file, or a CostModel. dtype: "auto", "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda". max_length: None for 2048, or as many positions as the target has if they are
        fewer. The rest as in EngineConfig.
        tensor_parallel: spread the target over the processes that torchrun started; all of them make the same calls
        and get the same outputs.
        Every argument is checked before the target is loaded; errors are ValueErrors that name it.
        """
        settings.update(policy=policy, budget=budget, drafting=drafting, verify=verify, budget_delay=budget_delay)
        settings.update(max_batch_size=max_batch_size, compile=compile, allow_lossy=allow_lossy)
        if max_length is not None:
            settings["max_length"] = max_length
        config = make_config(settings)
        resolve_dtype(dtype, resolve_device(device))
        model_drafter = make_drafter(drafter, str(target), config, dtype, device)
        make_rules(settle(config, resolve_device(device), model_drafter is not None), model_drafter, lookup)
        make_lookup(lookup, estimator, str(target))
        loaded_cost = load_cost(cost) if isinstance(cost, str | os.PathLike) and cost != "auto" else check_cost(cost)
        loaded = load_target(target, dtype, device, progress=progress, tensor_parallel=tensor_parallel)
        speculator = cls(
            loaded.model,
            loaded.tokenizer,
            name=loaded.name,
            eos_token_ids=loaded.eos_token_ids,
            drafter=model_drafter,
            lookup=lookup,
            estimator=estimator,
            cost=loaded_cost,
            **settings,
        )
        speculator.tokenizer_problem = loaded.tokenizer_problem
        if speculator.estimator_note:
            logger.info(speculator.estimator_note)
        return speculator

    # -- prompts -------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string, token ids, or chat messages (rendered with the target's chat template)."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                why = f" ({self.tokenizer_problem})" if self.tokenizer_problem else ""
                raise ValueError(f"prompt is a string, but this target has no tokenizer{why}; use a list of token ids")
            return self._tokenize(prompt)
        items = items_of("prompt", prompt)
        if items and all(isinstance(item, dict) for item in items):
            return self._encode_messages(items)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, Integral):
                raise ValueError(f"prompt holds {item!r}; use a string, token ids, or a list of chat messages")
        return [int(item) for item in items]

    def _encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "prompt is a list of chat messages, but this target has no chat template; use a string or token ids"
            )
        for message in messages:
            if "role" not in message:
                raise ValueError(
                    f"prompt holds the message {message!r}; use messages with the keys 'role' and 'content'"
                )
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may refuse with any exception
            raise ValueError(f"prompt={messages!r} does not fit this target's chat template: {error}") from error
        return self._tokenize(text, add_special_tokens=False)

    def _tokenize(self, text: str, **options: Any) -> list[int]:
        assert self.tokenizer is not None
        try:
            return list(self.tokenizer(text, **options)["input_ids"])
        except Exception as error:  # lone surrogates, for example, are no text to any tokenizer
            raise ValueError(f"prompt={text!r} cannot be tokenized: {error}; use valid Unicode text") from error

    # -- decoding ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Decodes one prompt or a list of them, up to max_batch_size at once; returns a list in the same order.

        params: one SamplingParams for all, or one for each. All prompts are checked before any work starts; an empty
        list is refused, as it might be meant as a prompt. A request that fails on the way has finish_reason "error";
        the others go on.
        """
        batch = as_batch(prompts)
        each = for_each(params, len(batch))
        encoded = [self.encode(prompt) for prompt in batch]
        for ids, own in zip(encoded, each, strict=True):
            self.engine.check(ids, own)
        requests = [self.engine.submit(ids, own) for ids, own in zip(encoded, each, strict=True)]
        try:
            self._run(requests, progress)
        finally:
            for request in requests:
                self.engine.cancel(request)
        return [request.output() for request in requests]

    def _run(self, requests: list[Request], progress: bool) -> None:
        with tqdm(total=len(requests), unit="request", disable=not progress, leave=False) as bar:
            while not all(request.done for request in requests):
                self.engine.step()
                bar.update(sum(request.done for request in requests) - bar.n)
                tokens = sum(len(request.token_ids) for request in requests)
                bar.set_postfix(tokens=tokens, refresh=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Decodes one prompt, yielding what became certain after every step. Closing the iterator cancels the request.

        The prompt is checked at once, the request starts with the first chunk asked for. Several streams may be open at
        once; each advances all of them.
        """
        ids, (own,) = self.encode(prompt), for_each(params, 1)
        self.engine.check(ids, own)
        return self._stream(ids, own)

    def _stream(self, prompt: list[int], params: SamplingParams) -> Iterator[StreamChunk]:
        request = self.engine.submit(prompt, params)
        shown = tokens = 0
        try:
            while True:
                done = request.done
                text = request.text or ""
                fresh, sources = request.token_ids[tokens:], request.sources[tokens:]
                if done or fresh:
                    output = request.output() if done else None
                    yield StreamChunk(text[shown:], fresh, sources, request.finish_reason, output)
                    shown, tokens = len(text), tokens + len(fresh)
                if done:
                    return
                if not request.done:
                    self.engine.step()
        finally:
            self.engine.cancel(request)
