"""Targets: short names, where their files come from, checks that they are whole, and loading.

`load_target` is the one function that the rest of the package calls.
"""

from hspark.models.fetch import KNOWN_MODELS, KnownModel, ModelFileError, ModelUnavailableError, cache_dir
from hspark.models.load import (
    LoadedTarget,
    UnknownModelError,
    end_token_ids,
    load_target,
    resolve_device,
    resolve_dtype,
)

__all__ = [
    "KNOWN_MODELS",
    "KnownModel",
    "LoadedTarget",
    "ModelFileError",
    "ModelUnavailableError",
    "UnknownModelError",
    "cache_dir",
    "end_token_ids",
    "load_target",
    "resolve_device",
    "resolve_dtype",
]
