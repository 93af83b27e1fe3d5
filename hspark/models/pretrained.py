"""Loading through transformers, quietly, with errors that name what was asked for."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from hspark.models.fetch import ModelFileError, ModelUnavailableError, is_gguf
from hspark.parallel import check_divisible, world_size

# Without one of these a directory has no tokenizer, though transformers may construct an empty one from its config.
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
_LOUD_BYTES = 1 << 30


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Only errors from transformers inside the block, and no progress bars unless `bars`."""
    from transformers.utils import logging

    verbosity, enabled = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """Silences the GGUF reader's own bar, which does not heed the switch that `quiet` turns."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = getattr(reader, "tqdm", None)
    reader.tqdm = lambda items, **_: items  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        reader.tqdm = bar  # type: ignore[misc, assignment]


def _arguments(source: Path | str) -> tuple[str, dict[str, Any]]:
    """What from_pretrained takes for a .gguf file, a directory or a hub id."""
    if isinstance(source, str):
        return source, {"local_files_only": hub_is_offline()}
    if is_gguf(source):
        return str(source.parent), {"gguf_file": source.name}
    return str(source), {"local_files_only": True}


def hub_is_offline() -> bool:
    """True when the Hugging Face hub is switched off or its name does not resolve, so that nobody waits for retries."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def brief(error: BaseException, limit: int = 300) -> str:
    """The first line of an error's text, with its type, cut to `limit` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0][:limit]}"


def load_causal_lm(
    source: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = False,
    tensor_parallel: bool = False,
) -> nn.Module:
    """A causal language model with plain float linear layers, in eval mode, without gradients, on `device`.

    source: a .gguf file or a model directory (Path), or a hub id (str). ModelFileError if it cannot be loaded or any of
    its weights are missing; ModelUnavailableError if a hub id cannot be found or reached. tensor_parallel: spread the
    weights over torchrun's processes by the model's own plan.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    name, arguments = _arguments(source)
    if "gguf_file" in arguments:
        # transformers otherwise keeps the weights packed and replaces the linear layers.
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    if tensor_parallel:
        from transformers.distributed import DistributedConfig

        check_divisible(AutoConfig.from_pretrained(name, trust_remote_code=False, **arguments), world_size())
        arguments["distributed_config"] = DistributedConfig(tp_plan="auto")
    elif device.type != "cpu":
        arguments["device_map"] = {"": device}
    large = isinstance(source, Path) and sum(file.stat().st_size for file in _weights(source)) > _LOUD_BYTES
    bars = progress and (large or isinstance(source, str))
    with quiet(bars), nullcontext() if bars or "gguf_file" not in arguments else _no_gguf_bar():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, trust_remote_code=False, output_loading_info=True, **arguments
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise _load_error(source, error, arguments) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ModelFileError(
            f"{source} lacks {len(missing)} of the weights that its config asks for ({', '.join(missing[:3])}, ...); "
            "they would be random"
        )
    return model.eval().requires_grad_(False)


def _weights(source: Path) -> list[Path]:
    return [source] if source.is_file() else [*source.glob("*.safetensors"), *source.glob("*.bin")]


def _load_error(source: Path | str, error: Exception, arguments: dict[str, Any]) -> ValueError:
    if isinstance(source, Path):
        return ModelFileError(f"{source} could not be loaded as a causal language model: {brief(error)}")
    if arguments["local_files_only"]:
        return ModelUnavailableError(
            f"{source} is not in the local Hugging Face cache, and the hub cannot be reached to fetch it; "
            "give the path of a model directory or .gguf file instead"
        )
    return ModelUnavailableError(f"{source} could not be loaded from the Hugging Face hub: {brief(error)}")


def load_tokenizer(source: Path | str) -> tuple[Any, str | None]:
    """The tokenizer and None, or None and why there is no tokenizer. `source` as in `load_causal_lm`."""
    from transformers import AutoTokenizer

    if isinstance(source, Path) and source.is_dir() and not any(list(source.glob(name)) for name in _TOKENIZER_FILES):
        return None, f"{source} holds no tokenizer files"
    name, arguments = _arguments(source)
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **arguments)
        except Exception as error:
            return None, f"the tokenizer of {source} could not be loaded: {brief(error)}"
    if len(tokenizer) == 0:
        return None, f"the tokenizer of {source} is empty"
    return tokenizer, None
