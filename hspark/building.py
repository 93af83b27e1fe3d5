"""From a user's arguments to the parts of a speculator; every function refuses what cannot work, by name."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import torch

from hspark.compiled_layers import many_variants
from hspark.config import PAPER_DELAY, EngineConfig
from hspark.core import RowState
from hspark.drafters import NgramDrafter
from hspark.drafters.base import Drafter
from hspark.drafters.known import known_drafter
from hspark.drafters.opening import open_drafter
from hspark.policy import (
    AcceptanceEstimator,
    CostModel,
    LinearCost,
    Policy,
    load_cost,
    lossy_reason,
    policy,
    refuse_if_lossy,
)
from hspark.profiling import profile_step
from hspark.step import DecodeStep, StepFunctions
from hspark.verify import Verifier, verifier


def make_config(settings: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    for key in settings:
        if key not in known:
            raise ValueError(f"{key}={settings[key]!r} is not a setting; use {', '.join(known)}")
    return EngineConfig(**settings)


def settle_delay(config: EngineConfig, device: torch.device, has_model: bool) -> EngineConfig:
    """The configuration with `budget_delay` decided. Where the host is the device, sizing can wait for the step's own
    survivals at no cost, so it does, unless sampled drafts would then decide which slots are verified."""
    if config.budget_delay is not None:
        return config
    fresh = device.type == "cpu" and not config.run_ahead
    if fresh and has_model:
        chosen = policy(config.policy) if isinstance(config.policy, str) else config.policy
        checker = verifier(config.verify) if isinstance(config.verify, str) else config.verify
        fresh = lossy_reason(chosen, config.drafting, checker.name, 0, budget=config.budget) is None
    return replace(config, budget_delay=0 if fresh else PAPER_DELAY)


def make_rules(config: EngineConfig, has_model: bool, has_free: bool) -> tuple[Policy, Verifier, bool]:
    """Policy, verifier, and whether they change the output distribution; ValueError unless that was allowed."""
    chosen = policy(config.policy) if isinstance(config.policy, str) else config.policy
    checker = verifier(config.verify) if isinstance(config.verify, str) else config.verify
    if chosen.name == "model_only" and not has_model:
        raise ValueError("policy='model_only' needs a model drafter; give drafter=, or use 'ngram_only' or 'vanilla'")
    if chosen.name == "ngram_only" and not has_free:
        raise ValueError("policy='ngram_only' needs lookup='ngram'; give it, or use 'model_only' or 'vanilla'")
    if not has_model:
        return chosen, checker, False
    delay = PAPER_DELAY if config.budget_delay is None else config.budget_delay
    if not config.allow_lossy:
        refuse_if_lossy(chosen, config.drafting, checker.name, delay, budget=config.budget)
    reason = lossy_reason(chosen, config.drafting, checker.name, delay, budget=config.budget)
    return chosen, checker, reason is not None


def make_drafter(drafter: Any, target: str, config: EngineConfig, dtype: Any, device: Any) -> Drafter | None:
    """The model drafter that is meant, opened and checked; a DSpark drafter's weights are read later, by `bind`."""
    if drafter == "auto":
        drafter = known_drafter(target)
    if drafter is None or not isinstance(drafter, str | os.PathLike):
        return drafter
    checker = verifier(config.verify) if isinstance(config.verify, str) else config.verify
    noise = "coupled" if checker.name == "coupled" else "independent"
    return open_drafter(drafter, dtype, device, drafting=config.drafting, noise=noise)


def make_lookup(lookup: Any, estimator: Any, target: str) -> tuple[Drafter | None, str]:
    if lookup is None or not isinstance(lookup, str):
        return lookup, ""
    if lookup != "ngram":
        raise ValueError(f"lookup={lookup!r} is unknown; use 'ngram' or None")
    resolved, note = AcceptanceEstimator.resolve(estimator, target)
    return NgramDrafter(resolved), note


def make_cost(cost: Any, step: DecodeStep, functions: StepFunctions, rows: RowState) -> CostModel:
    """The cost model that is meant; without drafters there is nothing to price, so nothing is measured.

    functions, rows: what the engine will run, so that costs are measured on it."""
    if not isinstance(cost, str | os.PathLike):
        return cost
    if cost != "auto":
        return load_cost(cost)
    return profile_step(step, functions=functions, rows=rows) if step.drafters else LinearCost(1.0, 0.0)


def make_compiler(compile: str | bool, device: torch.device) -> Any:
    """torch.compile as the whole step needs it, with CUDA graphs where there is CUDA; None to leave the step eager.

    Sizes that vary become symbols, so that a function is compiled a few times only, and a CUDA graph recorded, which is
    quick, for each padded size.
    """
    if compile != "step" and not (compile is True and device.type != "cpu"):
        return None
    many_variants()
    mode = "reduce-overhead" if device.type == "cuda" else None
    torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None  # that many graphs are meant
    return functools.partial(torch.compile, fullgraph=True, mode=mode)


def check_length(max_length: int, model: Any) -> None:
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if known is not None and max_length > known:
        raise ValueError(f"max_length={max_length} is more than this model's {known} positions; use at most {known}")


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of a model given as an object: those of its generation config, its config, its tokenizer."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))
