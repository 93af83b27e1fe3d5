"""Is a model file whole? Answered from headers alone, before anything is loaded.

Loaders notice a truncated file late, in words about their own insides, or not at all. Both formats here say in their
headers where their last tensor ends, so a file that is too short (or is something else) is found in milliseconds.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hspark.models.fetch import ModelFileError, is_gguf

# GGUF metadata value types: struct codes of the fixed-size ones, and the two with a length in front.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# The most that is read: dimensions of a tensor, as the format allows, and arrays in arrays, which no writer nests.
_MAX_DIMENSIONS, _MAX_NESTING = 4, 8
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


@dataclass(frozen=True)
class GgufSummary:
    """What a GGUF header says.

    parameters: their number. required_size: bytes up to the end of the last tensor. end_token_ids: the tokens that end
    a sequence, a turn or a message.
    """

    architecture: str
    name: str
    parameters: int
    required_size: int
    end_token_ids: tuple[int, ...]


class _Reader:
    """A cursor over the little-endian header of a GGUF file; struct.error past its end."""

    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self.data, self.at = data, at

    def scalar(self, code: str) -> int | float | bool:
        layout = struct.Struct(f"<{code}")
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def skip(self, size: int) -> None:
        if self.at + size > len(self.data):
            raise struct.error("past the end of the file")
        self.at += size

    def string(self) -> str:
        size = self.integer("Q")
        start = self.at
        self.skip(size)
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int, nesting: int = 0) -> object:
        """One metadata value; arrays are stepped over and give None."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise struct.error(f"unknown metadata type {kind}")
        if nesting == _MAX_NESTING:
            raise struct.error(f"arrays are nested more than {_MAX_NESTING} deep")
        item, count = self.integer("I"), self.integer("Q")
        if item in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[item]}"))
        else:
            for _ in range(count):
                if item == _STRING:
                    self.skip(self.integer("Q"))
                else:
                    self.value(item, nesting + 1)
        return None


@dataclass(frozen=True)
class _Metadata:
    """The metadata of one file, with errors that name it."""

    path: Path
    values: dict[str, object]

    def integer(self, key: str, default: int, least: int = 0) -> int:
        """An integer of at least `least`; `default` where the key is missing."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            shown = "an array" if value is None else repr(value)[:60]
            raise ModelFileError(f"{self.path} is corrupt: {key} is {shown}; it has to be an integer from {least} up")
        return value

    def text(self, key: str, default: str) -> str:
        """A string that is not empty; `default` where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) and value else default


def check_gguf(path: Path) -> GgufSummary:
    """Reads the header of a .gguf file. ModelFileError if it is not one, is truncated, or is part of a split model."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelFileError(f"{path} is not a GGUF file: it does not begin with the letters GGUF ({size} bytes)")
        if size < 24:
            raise ModelFileError(f"{path} is truncated: {size} bytes, shorter than a GGUF header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                summary = _read_gguf(_Reader(data, at=4), path)
            except struct.error as error:
                raise ModelFileError(f"{path} is truncated or corrupt: its header cannot be read ({error})") from error
    if size < summary.required_size:
        raise ModelFileError(f"{path} is truncated: {size} bytes, but its tensors end at byte {summary.required_size}")
    return summary


def _read_gguf(reader: _Reader, path: Path) -> GgufSummary:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    version = reader.integer("I")
    if version not in (2, 3):
        raise ModelFileError(f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read")
    tensors, entries = reader.integer("Q"), reader.integer("Q")
    values = {}
    for _ in range(entries):
        key = reader.string()
        values[key] = reader.value(reader.integer("I"))
    metadata = _Metadata(path, values)
    if metadata.integer("split.count", 0) > 1:
        raise ModelFileError(f"{path} is one part of a model split over several files; merge them into one .gguf first")
    end = parameters = 0
    for _ in range(tensors):
        name = reader.string()
        dimensions = reader.integer("I")
        if dimensions > _MAX_DIMENSIONS:
            raise struct.error(f"tensor {name[:60]!r} has {dimensions} dimensions")
        size = prod(reader.integer("Q") for _ in range(dimensions))
        kind, offset = reader.integer("I"), reader.integer("Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError) as error:
            raise ModelFileError(
                f"{path}: tensor {name!r} has type {kind}, which the installed gguf package does not know"
            ) from error
        parameters += size
        end = max(end, offset + size // block * block_bytes)
    alignment = metadata.integer("general.alignment", 32, least=1)
    start = -(-reader.at // alignment) * alignment
    return GgufSummary(
        architecture=metadata.text("general.architecture", "unknown"),
        name=metadata.text("general.name", path.stem),
        parameters=parameters,
        required_size=start + end if tensors else reader.at,
        end_token_ids=tuple(sorted({metadata.integer(key, -1, least=-1) for key in _END_KEYS if key in values})),
    )


def check_safetensors(path: Path) -> None:
    """ModelFileError unless the file's size is what its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_size = int.from_bytes(prefix, "little")
        if header_size > size - 8:
            raise ModelFileError(
                f"{path} is truncated or corrupt: {size} bytes, but its header alone takes {header_size + 8}"
            )
        content = file.read(header_size)
    try:
        ends = [_end_of(entry) for name, entry in _parse_json(content).items() if name != "__metadata__"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{path} is truncated or corrupt: its safetensors header cannot be read") from error
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        raise ModelFileError(f"{path} is truncated or corrupt: {size} bytes, but its header asks for {expected}")


def _end_of(entry: Any) -> int:
    """Where a safetensors entry's data ends; TypeError or ValueError if it does not say so in two integers."""
    first, last = entry["data_offsets"]
    if type(first) is not int or type(last) is not int:
        raise TypeError("data_offsets are not integers")
    return last


class _NotJsonError(ValueError):
    """Bytes that are no JSON text."""


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also of what is nested too deep, or has too long a number
        raise _NotJsonError(str(error)) from error


def _check_json(path: Path) -> None:
    try:
        if isinstance(_parse_json(path.read_bytes()), dict):
            return
    except _NotJsonError as error:
        raise ModelFileError(f"{path} is truncated or corrupt: it is not valid JSON ({error})") from error
    raise ModelFileError(f"{path} does not hold a JSON object")


def check_directory(path: Path) -> None:
    """ModelFileError unless a model directory has a config.json, weights, every shard that its index names, whole."""
    if not (path / "config.json").is_file():
        inside = sorted(file.name for file in path.glob("*") if is_gguf(file))
        hint = f"; it holds {', '.join(inside)}: pass that file's path" if inside else ""
        raise ModelFileError(f"{path} is not a model directory: it has no config.json{hint}")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            _check_json(path / name)
    for index in path.glob("*.safetensors.index.json"):
        shards = _shards(index)
        if missing := [shard for shard in shards if not (path / shard).is_file()]:
            raise ModelFileError(f"{path} is incomplete: {index.name} names {', '.join(missing)}, which is not there")
    weights = sorted(path.glob("*.safetensors"))
    for file in weights:
        check_safetensors(file)
    if not weights and not list(path.glob("*.bin")):
        raise ModelFileError(f"{path} has a config.json but no weights: no *.safetensors and no *.bin file")


def _shards(index: Path) -> list[str]:
    """The names of the files that a *.safetensors.index.json lists."""
    try:
        shards = set(_parse_json(index.read_bytes())["weight_map"].values())
    except (_NotJsonError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{index} is corrupt: it has no readable weight_map") from error
    if not all(isinstance(shard, str) for shard in shards):
        raise ModelFileError(f"{index} is corrupt: its weight_map names files by something other than text")
    return sorted(shards)
