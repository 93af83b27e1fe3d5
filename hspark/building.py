"""From a user's arguments to the parts of a speculator; every function refuses what cannot work, by name."""

from __future__ import annotations

import functools
import operator
import os
from dataclasses import replace
from typing import Any, NamedTuple

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
    LossyCombinationError,
    Policy,
    load_cost,
    lossy_reason,
    policy,
    policy_names,
)
from hspark.profiling import profile_step
from hspark.step import DecodeStep, StepFunctions
from hspark.supported import changing_ropes
from hspark.verify import Verifier, verifier
from hspark.verify.base import check_verifier


def make_config(settings: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    for key in settings:
        if key not in known:
            raise ValueError(f"{key}={settings[key]!r} is not a setting; use {', '.join(known)}")
    return EngineConfig(**settings)


class Rules(NamedTuple):
    """What chooses and verifies drafts, and whether the two together change the output distribution."""

    policy: Policy
    verifier: Verifier
    lossy: bool


def settle(config: EngineConfig, device: torch.device, has_model: bool) -> EngineConfig:
    """The configuration with `run_ahead` and `budget_delay` decided. Where the host is the device, sizing can wait for
    the step's own survivals at no cost, so it does, unless sampled drafts would then decide which slots are verified.
    """
    ahead = int(device.type != "cpu") if config.run_ahead is None else config.run_ahead
    delay = config.budget_delay
    if delay is None:
        fresh = device.type == "cpu" and not ahead
        if fresh and has_model:
            chosen, checker = _parts(config)
            fresh = lossy_reason(chosen, config.drafting, checker, 0, budget=config.budget) is None
        delay = 0 if fresh else PAPER_DELAY
    return replace(config, run_ahead=ahead, budget_delay=delay)


def _parts(config: EngineConfig) -> tuple[Policy, Verifier]:
    """Policy and verifier, by name or as they are."""
    chosen = policy(config.policy) if isinstance(config.policy, str) else config.policy
    if isinstance(chosen, type) or not isinstance(chosen, Policy):
        raise ValueError(f"policy={chosen!r} is no policy; use one of {', '.join(policy_names())}, or a Policy object")
    by_name = isinstance(config.verify, str)
    return chosen, verifier(config.verify) if by_name else check_verifier("verify", config.verify)


def make_rules(config: EngineConfig, drafter: Drafter | None, lookup: Any) -> Rules:
    """Policy and verifier for these drafters; ValueError for parts that do not go together, and for a combination that
    changes the output distribution unless that was allowed."""
    chosen, checker = _parts(config)
    if chosen.name == "model_only" and drafter is None:
        raise ValueError("policy='model_only' needs a model drafter; give drafter=, or use 'ngram_only' or 'vanilla'")
    if chosen.name == "ngram_only" and lookup is None:
        raise ValueError("policy='ngram_only' needs lookup='ngram'; give it, or use 'model_only' or 'vanilla'")
    if getattr(lookup, "drafting", "greedy") != "greedy":
        raise ValueError(
            f"lookup={lookup!r} has drafting={lookup.drafting!r}, and chains of a model-free drafter are verified as "
            "point masses; use drafting='greedy' there, or give it as drafter="
        )
    if drafter is None:
        return Rules(chosen, checker, False)
    check_drafting(drafter, config.drafting)
    delay = PAPER_DELAY if config.budget_delay is None else config.budget_delay
    reason = lossy_reason(chosen, config.drafting, checker, delay, budget=config.budget)
    reason = reason or returning_noise(drafter, config.drafting, checker)
    if reason is not None and not config.allow_lossy:
        raise LossyCombinationError(reason)
    return Rules(chosen, checker, reason is not None)


def check_drafting(drafter: Drafter, drafting: str) -> None:
    """ValueError if a drafter that was made elsewhere drafts in another way than the settings say: what is exact is
    judged by the settings."""
    own = getattr(drafter, "drafting", drafting)
    if own != drafting:
        raise ValueError(f"drafting={drafting!r}, but the drafter was made with drafting={own!r}; give both the same")


def returning_noise(drafter: Drafter, drafting: str, checker: Verifier) -> str | None:
    """Why this drafter's noise would lose exactness under this verifier; None if it would not."""
    coupled = drafting == "probabilistic" and getattr(drafter, "noise", None) == "coupled"
    if not coupled or not reads_drafts(checker):
        return None
    return (
        f"the drafter's noise='coupled' with verify={checker.name!r} changes the output distribution above temperature "
        "0: noise that belongs to a position returns after it has steered an earlier step. Ways out: "
        "noise='independent', or verify='coupled'; allow_lossy=True runs it for study and marks the outputs."
    )


def reads_drafts(checker: Verifier) -> bool:
    """Whether what a verifier emits can depend on the drafts; so it is assumed of one that does not say."""
    return getattr(checker, "depends_on_drafts", True)


def make_drafter(drafter: Any, target: str, config: EngineConfig, dtype: Any, device: Any) -> Drafter | None:
    """The model drafter that is meant, opened and checked; a DSpark drafter's weights are read later, by `bind`."""
    if drafter == "auto":
        drafter = known_drafter(target)
    if drafter is None or not isinstance(drafter, str | os.PathLike):
        return as_drafter("drafter", drafter, "'auto', None, a directory, a hub id, or a Drafter")
    noise = "independent" if reads_drafts(_parts(config)[1]) else "coupled"
    return open_drafter(drafter, dtype, device, drafting=config.drafting, noise=noise)


def as_drafter(name: str, value: Any, accepted: str) -> Drafter | None:
    """`value` if it is a Drafter or None; a ValueError that names it otherwise."""
    if value is not None and (isinstance(value, type) or not isinstance(value, Drafter)):
        raise ValueError(f"{name}={value!r} is no drafter; use {accepted}")
    return value


def make_lookup(lookup: Any, estimator: Any, target: str) -> tuple[Drafter | None, str]:
    if not isinstance(lookup, str):
        return as_drafter("lookup", lookup, "'ngram', None, or a Drafter"), ""
    if lookup != "ngram":
        raise ValueError(f"lookup={lookup!r} is unknown; use 'ngram' or None")
    if isinstance(estimator, AcceptanceEstimator):
        return NgramDrafter(estimator), ""
    if not isinstance(estimator, str | os.PathLike):
        raise ValueError(
            f"estimator={estimator!r} is no estimator; use 'auto', a preset's name, a file, or an AcceptanceEstimator"
        )
    resolved, note = AcceptanceEstimator.resolve(estimator, target)
    return NgramDrafter(resolved), note


def make_cost(cost: Any, step: DecodeStep, functions: StepFunctions, rows: RowState) -> CostModel:
    """The cost model that is meant; without drafters there is nothing to price, so nothing is measured.

    functions, rows: what the engine will run, so that costs are measured on it."""
    if not isinstance(cost, str | os.PathLike):
        return check_cost(cost)
    if cost != "auto":
        return load_cost(cost)
    return profile_step(step, functions=functions, rows=rows) if step.drafters else LinearCost(1.0, 0.0)


def check_cost(cost: Any) -> Any:
    """`cost` if it is "auto", a path or a cost model; a ValueError otherwise."""
    if isinstance(cost, type) or not isinstance(cost, str | os.PathLike | CostModel):
        raise ValueError(f"cost={cost!r} is no cost model; use 'auto', a saved file, or a CostModel")
    return cost


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


def default_length(model: Any) -> int:
    """`max_length` where none is given: the default of EngineConfig, or what the model has if that is less."""
    config = model.config.get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    limits = [limit for _, limit in changing_ropes(config) if limit >= 2]
    return min(EngineConfig.max_length, known or EngineConfig.max_length, *limits)


def check_length(max_length: int, model: Any) -> None:
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if known is not None and max_length > known:
        raise ValueError(f"max_length={max_length} is more than this model's {known} positions; use at most {known}")


def check_ends(eos_token_ids: Any, model: Any) -> tuple[int, ...]:
    """End-of-sequence ids that a user gave, as a tuple; ValueError for anything but ids of the vocabulary."""
    vocab = int(model.config.get_text_config().vocab_size)
    try:
        ends = tuple(operator.index(i) for i in eos_token_ids)
    except TypeError:
        ends = (-1,)
    if not all(0 <= i < vocab for i in ends):
        raise ValueError(
            f"eos_token_ids={eos_token_ids!r} is not usable; use a tuple of token ids from 0 to {vocab - 1}"
        )
    return ends
