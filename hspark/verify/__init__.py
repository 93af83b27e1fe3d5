"""Verification: which draft tokens the target accepts, and the token after them. Usable without the rest of the engine.

verifier("coupled" | "rejection")    the two verifiers; `Verifier` is their interface
pack(...) -> Layout                  where each verified slot lies in the packed target forward
exact_distribution(world, policy)    the exact law of the output in a small world, decisions included
check(verifier, policy)              the lossless suite, for these verifiers or your own

What a verifier is called with is here too: `Chain` with its SOURCE_* codes, `Layout`, `Seeds`, and `target_log_probs`
with `SamplingState` and `SamplingMode`, which make the target's law from its logits.
"""

from typing import Any

from hspark.core import SOURCE_FREE, SOURCE_MODEL, SOURCE_TARGET, Chain
from hspark.sampling import SamplingMode, SamplingState, target_log_probs
from hspark.verify.base import Seeds, Verdict, Verifier, register, verifier, verifier_names
from hspark.verify.coupled import CoupledVerifier
from hspark.verify.layout import Layout, pack
from hspark.verify.rejection import RejectionVerifier

register(CoupledVerifier())
register(RejectionVerifier())

# What studies verification needs hspark.policy; what verifies does not, and is imported without it.
_STUDY = {
    "Report": "report",
    "Rule": "rule",
    "Sizing": "exact",
    "World": "world",
    "check": "lossless",
    "exact_distribution": "exact",
    "target_distribution": "world",
    "total_variation": "world",
}

__all__ = [
    "SOURCE_FREE",
    "SOURCE_MODEL",
    "SOURCE_TARGET",
    "Chain",
    "CoupledVerifier",
    "Layout",
    "RejectionVerifier",
    "SamplingMode",
    "SamplingState",
    "Seeds",
    "Verdict",
    "Verifier",
    "pack",
    "register",
    "target_log_probs",
    "verifier",
    "verifier_names",
    *_STUDY,
]


def __getattr__(name: str) -> Any:
    if name not in _STUDY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_STUDY[name]}"), name)
