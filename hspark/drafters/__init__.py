"""Drafters: what proposes the tokens that the target verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hspark.drafters.dspark import DSparkDrafter
    from hspark.drafters.ngram import NgramDrafter

__all__ = ["DSparkDrafter", "NgramDrafter"]

_MODULES = {"DSparkDrafter": "hspark.drafters.dspark", "NgramDrafter": "hspark.drafters.ngram"}


def __getattr__(name: str) -> Any:
    """Imports a drafter on first use: neither needs what the other imports."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
