"""Short digests that tell models apart by what they hold, wherever their files lie."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

_DIGITS = 16
_VALUES = 16  # of each parameter
_BYTES = 1 << 16  # of each end of a file


@torch.inference_mode()
def weights_digest(model: torch.nn.Module) -> str:
    """16 hex digits of a model's parameters: their names, shapes and first values, as float32."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.reshape(-1)[:_VALUES].to("cpu", torch.float32)
        found.update(f"{name} {tuple(parameter.shape)}".encode() + values.numpy().tobytes())
    return found.hexdigest()[:_DIGITS]


def checkpoint_digest(directory: Path) -> str:
    """16 hex digits of a checkpoint directory: its config.json, and size and both ends of its .safetensors files."""
    found = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        size = path.stat().st_size
        with path.open("rb") as file:
            found.update(f"{path.name} {size}".encode() + file.read(_BYTES))
            file.seek(max(0, size - _BYTES))
            found.update(file.read())
    return found.hexdigest()[:_DIGITS]


def target_facts(model: Any) -> dict[str, str]:
    """What a target's outputs and hidden states depend on beside its name: dtype, and `weights_digest`."""
    return {
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "target_digest": weights_digest(model),
    }


def checkpoint_facts(path: str | Path | None) -> dict[str, str]:
    """Name and digest of a drafter's checkpoint; one in memory (None) has no name."""
    return {"name": ""} if path is None else {"name": checkpoint_name(path), "digest": checkpoint_digest(Path(path))}


def checkpoint_name(path: str | Path) -> str:
    """What a checkpoint is called wherever it lies: its hub id in the hub's cache, else its directory's own name."""
    path = Path(path)
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name
