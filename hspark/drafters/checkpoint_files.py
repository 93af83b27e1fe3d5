"""The files of a checkpoint: found locally or on the hub, single or sharded, read tensor by tensor."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class CheckpointError(ValueError):
    """Files or tensors of a checkpoint that are missing, damaged or of the wrong shape."""


class Stored(NamedTuple):
    """Where a tensor lies: its file, shape and stored type (in safetensors' words, such as BF16)."""

    file: Path
    shape: list[int]
    dtype: str


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. CheckpointError if the file cannot be read or holds anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; expected a JSON file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds {type(values).__name__}; expected an object")
    return values


def locate(path: str | PathLike[Any]) -> Path:
    """The checkpoint's directory. A name that is no directory here and reads `owner/name` is fetched from the hub."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise CheckpointError(f"{directory} is a file; expected the directory that holds config.json and the weights")
    if not HUB_ID.fullmatch(str(path)) or str(path).startswith("."):
        raise CheckpointError(f"{directory} does not exist; expected a checkpoint directory or a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub client raises many unrelated types; all mean "not available"
        raise CheckpointError(f"{path} is no directory here, and the hub did not provide it: {error}") from error


def read_headers(directory: Path) -> dict[str, Stored]:
    """Every tensor of a single or sharded checkpoint, from the files' headers."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        placed = read_object(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
            raise CheckpointError(f"{index}: weight_map is {reprlib.repr(placed)}; expected an object of file names")
        files = {name: directory / file for name, file in placed.items()}
    elif single.exists():
        files = {}
    else:
        others = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise CheckpointError(f"{single} does not exist, nor {index.name}; the directory holds {others}")
    tensors: dict[str, Stored] = {}
    for file in sorted(set(files.values())) if index.exists() else [single]:
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    piece = handle.get_slice(name)
                    tensors[name] = Stored(file, piece.get_shape(), piece.get_dtype())
        except FileNotFoundError:
            raise CheckpointError(f"{file} does not exist; {index.name} names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a complete safetensors file ({error})") from error
    lost = [
        f"{name} in {file.name}" for name, file in files.items() if name not in tensors or tensors[name].file != file
    ]
    if lost:
        raise CheckpointError(f"{index}: names tensors that are not there: {some(lost)}")
    return tensors


def read_tensors(tensors: Mapping[str, Stored], wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor on the CPU) of those with wanted(name), file by file; the files are mapped, not copied."""
    names = [name for name in tensors if wanted(name)]
    for file in sorted({tensors[name].file for name in names}):
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name in names:
                    if tensors[name].file == file:
                        yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); is the file complete?") from error


def some(names: list[str], most: int = 8) -> str:
    """The first names of a list, for error messages."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
