"""Verification: which draft tokens the target accepts, and the token after them. Usable without the rest of the engine.

verifier("coupled" | "rejection")   the two verifiers; `Verifier` is their interface
pack(...) -> Layout                 where each verified slot lies in the packed target forward
"""

from hspark.verify.base import Seeds, Verdict, Verifier, register, verifier, verifier_names
from hspark.verify.coupled import CoupledVerifier
from hspark.verify.layout import Layout, pack
from hspark.verify.rejection import RejectionVerifier

register(CoupledVerifier())
register(RejectionVerifier())

__all__ = [
    "CoupledVerifier",
    "Layout",
    "RejectionVerifier",
    "Seeds",
    "Verdict",
    "Verifier",
    "pack",
    "register",
    "verifier",
    "verifier_names",
]
