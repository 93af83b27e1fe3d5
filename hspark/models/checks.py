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

from hspark.models.fetch import ModelFileError

# GGUF metadata value types: struct codes of the fixed-size ones, and the two with a length in front.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
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

    def value(self, kind: int) -> object:
        """One metadata value; arrays are stepped over and give None."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise struct.error(f"unknown metadata type {kind}")
        item, count = self.integer("I"), self.integer("Q")
        if item in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[item]}"))
        else:
            for _ in range(count):
                if item == _STRING:
                    self.skip(self.integer("Q"))
                else:
                    self.value(item)
        return None


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
    metadata = {}
    for _ in range(entries):
        key = reader.string()
        metadata[key] = reader.value(reader.integer("I"))
    if int(str(metadata.get("split.count", 0))) > 1:
        raise ModelFileError(f"{path} is one part of a model split over several files; merge them into one .gguf first")
    end = parameters = 0
    for _ in range(tensors):
        name = reader.string()
        shape = [reader.integer("Q") for _ in range(reader.integer("I"))]
        kind, offset = reader.integer("I"), reader.integer("Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError) as error:
            raise ModelFileError(
                f"{path}: tensor {name!r} has type {kind}, which the installed gguf package does not know"
            ) from error
        parameters += prod(shape)
        end = max(end, offset + prod(shape) // block * block_bytes)
    alignment = int(str(metadata.get("general.alignment", 32)))
    start = -(-reader.at // max(alignment, 1)) * alignment
    return GgufSummary(
        architecture=str(metadata.get("general.architecture", "unknown")),
        name=str(metadata.get("general.name") or path.stem),
        parameters=parameters,
        required_size=start + end if tensors else reader.at,
        end_token_ids=tuple(sorted({int(str(metadata[key])) for key in _END_KEYS if key in metadata})),
    )


def check_safetensors(path: Path) -> None:
    """ModelFileError unless the file's size is what its header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            if header_size > size - 8:
                raise ModelFileError(
                    f"{path} is truncated or corrupt: {size} bytes, but its header alone takes {header_size + 8}"
                )
            header = json.loads(file.read(header_size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path} is truncated or corrupt: its safetensors header cannot be read") from error
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        raise ModelFileError(f"{path} is truncated or corrupt: {size} bytes, but its header asks for {expected}")


def _check_json(path: Path) -> None:
    try:
        if isinstance(json.loads(path.read_bytes()), dict):
            return
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFileError(f"{path} is truncated or corrupt: it is not valid JSON ({error})") from error
    raise ModelFileError(f"{path} does not hold a JSON object")


def check_directory(path: Path) -> None:
    """ModelFileError unless a model directory has a config.json, weights, every shard that its index names, whole."""
    if not (path / "config.json").is_file():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(inside)}: pass that file's path" if inside else ""
        raise ModelFileError(f"{path} is not a model directory: it has no config.json{hint}")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            _check_json(path / name)
    for index in path.glob("*.safetensors.index.json"):
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{index} is corrupt: it has no readable weight_map") from error
        if missing := [shard for shard in shards if not (path / shard).is_file()]:
            raise ModelFileError(f"{path} is incomplete: {index.name} names {', '.join(missing)}, which is not there")
    weights = sorted(path.glob("*.safetensors"))
    for file in weights:
        check_safetensors(file)
    if not weights and not list(path.glob("*.bin")):
        raise ModelFileError(f"{path} has a config.json but no weights: no *.safetensors and no *.bin file")
