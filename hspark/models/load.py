"""`load_target`: a causal language model by short name, hub id, directory or .gguf file."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hspark.models.checks import check_directory, check_gguf
from hspark.models.convert import converted_directory, tokenizer_problem
from hspark.models.fetch import (
    KNOWN_MODELS,
    KnownModel,
    ModelFileError,
    fetch,
    file_sha256,
    is_gguf,
)
from hspark.models.pretrained import load_causal_lm, load_tokenizer
from hspark.parallel import own_device, world_size

logger = logging.getLogger("hspark")

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class UnknownModelError(ValueError):
    """A model name that is no short name, existing path or hub id."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready for the engine.

    name: the short name, hub id, or the file's or directory's own name.
    model: a transformers causal language model in eval mode, without gradients, plain float linear layers.
    tokenizer: a transformers tokenizer, or None; then `tokenizer_problem` says why.
    eos_token_ids: every token id that ends a sequence, ascending: those of the generation config, the config, and the
    tokenizer or, for .gguf files, the header (end of sequence, turn and message).
    path: the directory or file that was loaded; None for a hub id.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    path: Path | None
    tokenizer_problem: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_target(
    name_or_path: str | os.PathLike[str],
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    progress: bool = True,
    tensor_parallel: bool = False,
) -> LoadedTarget:
    """Loads a target.

    name_or_path: a short name ("smollm2-135m"; `KNOWN_MODELS` lists them, and they win over a path of the same name),
    a .gguf file, a transformers model directory, or a Hugging Face hub id ("owner/name").
    dtype: "auto" (bfloat16 where the device computes in it natively, else float32), "float32", "bfloat16", "float16",
    "float64", or the torch dtype.
    device: "auto" (the CUDA GPU if there is one, else the CPU), or a torch device or its name.
    progress: show downloads and one-time conversions on standard error.
    tensor_parallel: spread the model over the processes that torchrun started, one device each.
    A target without a usable tokenizer is loaded all the same; a warning of the logger "hspark" says why it has none.

    Raises UnknownModelError for a name that is none of these, ModelFileError for files that are incomplete, truncated
    or corrupt (found from headers, before anything is loaded), ModelUnavailableError when files have to be fetched and
    cannot be, and ValueError for an unknown dtype or device. All of them are ValueErrors.
    """
    target = _load(name_or_path, dtype, device, progress, tensor_parallel)
    if target.tokenizer_problem is not None:
        logger.warning("%s is loaded without a tokenizer: %s", target.name, target.tokenizer_problem)
    return target


def _load(
    name_or_path: str | os.PathLike[str],
    dtype: str | torch.dtype,
    device: str | torch.device,
    progress: bool,
    tensor_parallel: bool,
) -> LoadedTarget:
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    source = _locate(name_or_path)
    if tensor_parallel:
        world_size()
        device = own_device(device)
        if isinstance(source, KnownModel) or (isinstance(source, Path) and source.is_file()):
            raise ValueError(
                f"tensor_parallel=True cannot read target={str(name_or_path)!r}, a .gguf file; use a model directory "
                "or a hub id"
            )
    if isinstance(source, KnownModel):
        return _load_gguf(fetch(source, progress), source.name, source.sha256, dtype, device, progress)
    if isinstance(source, Path) and source.is_file():
        return _load_gguf(source, source.stem, None, dtype, device, progress)
    if isinstance(source, Path):
        check_directory(source)
    name = source.resolve().name if isinstance(source, Path) else source
    model = load_causal_lm(source, dtype, device, progress, tensor_parallel)
    tokenizer, problem = load_tokenizer(source)
    path = source if isinstance(source, Path) else None
    return LoadedTarget(name, model, tokenizer, end_token_ids(model, tokenizer), path, problem)


def _load_gguf(
    path: Path, name: str, digest: str | None, dtype: torch.dtype, device: torch.device, progress: bool
) -> LoadedTarget:
    """Loads a .gguf file, by way of its converted form where one can be kept. digest: its SHA-256, if known."""
    summary = check_gguf(path)
    directory = converted_directory(path, summary, digest or file_sha256(path), dtype, progress)
    model = load_causal_lm(directory or path, dtype, device, progress)
    if directory is not None and (problem := tokenizer_problem(directory)) is not None:
        tokenizer = None
    else:
        tokenizer, problem = load_tokenizer(directory or path)
    # The header decides: some versions of transformers take another token for the tokenizer's end of sequence.
    ends = end_token_ids(model, None if summary.end_token_ids else tokenizer, summary.end_token_ids)
    return LoadedTarget(name, model, tokenizer, ends, path, problem)


def _locate(name_or_path: str | os.PathLike[str]) -> KnownModel | Path | str:
    """A known model, an existing .gguf file or directory, or (str) a hub id."""
    if not isinstance(name_or_path, str | os.PathLike) or not str(name_or_path).strip():
        raise UnknownModelError(f"model={name_or_path!r} is not a name or path; {_accepted()}")
    if isinstance(name_or_path, str) and name_or_path in KNOWN_MODELS:
        return KNOWN_MODELS[name_or_path]
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if not is_gguf(path):
            raise ModelFileError(f"{path} is neither a .gguf file nor a directory; {_accepted()}")
        return path
    text = str(name_or_path)
    if is_gguf(path) or not isinstance(name_or_path, str) or not _HUB_ID.fullmatch(text):
        close = difflib.get_close_matches(text.lower(), KNOWN_MODELS, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownModelError(
            f"model={text!r} is unknown, and no file or directory of that name exists;{hint} {_accepted()}"
        )
    return text


def _accepted() -> str:
    return (
        f"use one of the names {', '.join(map(repr, KNOWN_MODELS))}, a .gguf file, a transformers model directory, "
        "or a Hugging Face hub id of the form 'owner/name'"
    )


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device that `device` stands for; ValueError if it is not a device or not on this machine."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    accepted = ", ".join(["'auto'", "'cpu'"] + ([f"'{accelerator.type}'"] if accelerator else []))
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device; use one of {accepted}") from error
    if resolved.type == "cpu":
        return resolved
    if accelerator is None or resolved.type != accelerator.type:
        raise ValueError(f"device={str(resolved)!r} is not available on this machine; use one of {accepted}")
    count = torch.accelerator.device_count()
    if resolved.index is not None and resolved.index >= count:
        raise ValueError(f"device={str(resolved)!r} does not exist: this machine has {count} {resolved.type} device(s)")
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype that `dtype` stands for on `device`; ValueError with the accepted names otherwise."""
    if isinstance(dtype, str) and dtype == "auto":
        return torch.bfloat16 if computes_bfloat16(device) else torch.float32
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise ValueError(
        f"dtype={dtype!r} is not supported; use 'auto', {', '.join(map(repr, DTYPES))}, or the torch dtype"
    )


def computes_bfloat16(device: torch.device) -> bool:
    """Whether `device` has bfloat16 arithmetic of its own: emulation is slower than float32."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    # Private in torch, so a version without one of these counts as "no".
    probes = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    if any(probe() for probe in probes if probe is not None):
        return True
    # "bf16" is the ARM name.
    capabilities: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return bool(capabilities().get("bf16"))


def end_token_ids(model: Any, tokenizer: Any = None, more: Iterable[int] = ()) -> tuple[int, ...]:
    """Every token id of the model's vocabulary that ends a sequence, ascending.

    Those of the model's generation config, its config, its text config and its tokenizer (None: no tokenizer), and
    `more`, as from a file's header. ValueError, naming the holder, for what is neither an integer nor a list of them.
    """
    text = model.config.get_text_config()
    found = set(more)
    for holder in (getattr(model, "generation_config", None), model.config, text, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
            raise ValueError(
                f"eos_token_id={value!r} of {type(holder).__name__} is not a token id; use an integer or a list of them"
            )
        found.update(int(token) for token in ids)
    return tuple(sorted(token for token in found if 0 <= token < text.vocab_size))
