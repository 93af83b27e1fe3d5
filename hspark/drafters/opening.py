"""From what a user names to a model drafter: a DSpark checkpoint, or a small causal LM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hspark.drafters.base import Drafter
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.drafters.checkpoint_files import CheckpointError, read_object
from hspark.drafters.dspark import DSparkDrafter


def open_drafter(source: str | os.PathLike[str], dtype: Any, device: Any, **options: Any) -> Drafter:
    """The drafter behind a directory, .gguf file, short model name or hub id; `options` as in its constructor.

    A directory whose config.json names a transformers causal LM (".. ForCausalLM"), a .gguf file and the short name of
    a target become a `CausalLMDrafter`; everything else is read as a DSpark checkpoint. A hub id is always taken for a
    DSpark checkpoint: for a draft model from the hub pass `CausalLMDrafter.from_pretrained(id)`.
    """
    from hspark.models import KNOWN_MODELS

    path = Path(source).expanduser()
    if str(source) in KNOWN_MODELS or path.suffix.lower() == ".gguf" or _is_causal_lm(path):
        return CausalLMDrafter.from_pretrained(source, dtype=dtype, device=device, **options)
    return DSparkDrafter.from_pretrained(path if path.exists() else str(source), **options)


def _is_causal_lm(path: Path) -> bool:
    try:
        names = read_object(path / "config.json").get("architectures")
    except CheckpointError:
        return False  # the DSpark reader says what is wrong with it
    if not isinstance(names, list) or not names:
        return False
    return all(isinstance(name, str) and name.endswith("ForCausalLM") for name in names)
