"""How a record table lies on disk: its columns, the shards that are written whole, and going on after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hspark.lab.digests import checkpoint_name
from hspark.lab.outputs import RecordedOutput

Array = NDArray[Any]

_KIND, _VERSION = "record-table", 1
# Settings that not every table states: earlier ones do not, nor those that were made without a target.
_MAY_LACK = ("dtype", "target_digest", "drafter.digest")

# name -> (type, columns: 1, "K" or "L"); per output, then per position.
PER_OUTPUT: dict[str, Any] = {
    "prompt_length": np.int32,
    "output_length": np.int32,
    "limit": np.int32,
    "temperature": np.float32,
    "seed": np.int64,
}
PER_POSITION: dict[str, tuple[Any, str]] = {
    "token": (np.int32, ""),
    "model_tokens": (np.int32, "model_width"),
    "model_acceptance": (np.float32, "model_width"),
    "model_length": (np.uint8, ""),
    "model_accepted": (np.uint8, ""),
    "free_tokens": (np.int32, "free_width"),
    "free_length": (np.int16, ""),
    "free_accepted": (np.int16, ""),
    "match_length": (np.int16, ""),
    "agreement": (np.uint8, ""),
    "copy_length": (np.int32, ""),
}


class TableWriter:
    """Appends outputs to the table in a directory, a shard at a time.

    info: as in `RecordTable`; a table that is there already has to have the same, but for the places of target and
    drafter, else ValueError names what differs.
    shard_positions: positions after which a shard is written. `outputs` counts those on disk, `fingerprints` says
    which they are (`fingerprint`).
    """

    def __init__(
        self, directory: str | os.PathLike[str], info: Mapping[str, Any], *, shard_positions: int = 20_000
    ) -> None:
        if isinstance(shard_positions, bool) or not isinstance(shard_positions, int) or shard_positions < 1:
            raise ValueError(f"shard_positions={shard_positions!r} is not usable; use an integer of at least 1")
        self.directory, self.shard_positions = Path(directory), shard_positions
        self.info = json.loads(json.dumps({**info, "kind": _KIND, "version": _VERSION}))
        for name in ("model_width", "free_width"):
            if not isinstance(self.info.get(name), int):
                raise ValueError(f"info[{name!r}]={self.info.get(name)!r}; use the width of the chains, an integer")
        self.fingerprints: list[str] = []
        self._waiting: list[dict[str, Array]] = []
        if (self.directory / "info.json").exists():
            self._resume()
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write_whole(self.directory / "info.json", (json.dumps(self.info, indent=1) + "\n").encode())

    def _resume(self) -> None:
        info, shards = read_directory(self.directory)
        known, own = _compared(info), _compared(self.info)
        for key in sorted({*known, *own}):
            stated = key in known and key in own
            if known.get(key) != own.get(key) and (stated or key not in _MAY_LACK):
                raise ValueError(
                    f"directory={str(self.directory)!r} holds a table made with {key}={known.get(key)!r}, and now "
                    f"{key}={own.get(key)!r}; use the same settings, or another directory"
                )
        for path in shards:
            self.fingerprints += read_shard(path)["fingerprints"].tolist()

    @property
    def outputs(self) -> int:
        return len(self.fingerprints)

    def add(self, columns: Mapping[str, Array], task_ids: Sequence[str], fingerprints: Sequence[str]) -> None:
        """Takes the columns of some outputs; writes a shard when enough have come together."""
        shard = {name: np.asarray(columns[name], dtype=kind) for name, kind in PER_OUTPUT.items()}
        shard |= {name: np.asarray(columns[name], dtype=kind) for name, (kind, _) in PER_POSITION.items()}
        shard["prompt_tokens"] = np.asarray(columns["prompt_tokens"], dtype=np.int32)
        shard["task_ids"] = np.asarray(list(task_ids), dtype=np.str_)
        shard["fingerprints"] = np.asarray(list(fingerprints), dtype=np.str_)
        self._waiting.append(shard)
        if sum(len(part["token"]) for part in self._waiting) >= self.shard_positions:
            self.flush()

    def flush(self) -> None:
        """Writes what has been added since the last shard."""
        if not self._waiting:
            return
        shard: dict[str, Any] = {
            name: np.concatenate([part[name] for part in self._waiting]) for name in self._waiting[0]
        }
        end = self.outputs + len(shard["task_ids"])
        path = self.directory / f"outputs-{self.outputs:08d}-{end:08d}.npz"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, **shard)
        os.replace(partial, path)
        self.fingerprints += shard["fingerprints"].tolist()
        self._waiting = []


def _compared(info: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same for a table to go on. Models go by name and digest: their places on disk may change."""
    drafter = info.get("drafter") or {}
    compared = {**info, "target": Path(str(info.get("target", ""))).name, "drafter": drafter.get("name")}
    return compared | {f"drafter.{key}": value for key, value in drafter.items() if key != "name"}


def fingerprint(output: RecordedOutput, seed: int | None, limit: int) -> str:
    """16 hex digits that tell recorded outputs apart, with how they were sampled and cut."""
    text = f"{output.prompt_token_ids}|{output.output_token_ids}|{output.temperature}|{seed}|{limit}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def empty_columns(info: Mapping[str, Any]) -> dict[str, Array]:
    """Columns of a table without outputs."""
    columns = {name: np.zeros(0, dtype=kind) for name, kind in PER_OUTPUT.items()}
    for name, (kind, width) in PER_POSITION.items():
        columns[name] = np.zeros((0, info[width]) if width else 0, dtype=kind)
    return columns | {"prompt_tokens": np.zeros(0, dtype=np.int32)}


def read_directory(directory: Path) -> tuple[dict[str, Any], list[Path]]:
    """info and the shards in order; ValueError if this is no table or a shard is missing."""
    path = directory / "info.json"
    if not path.is_file():
        raise ValueError(
            f"directory={str(directory)!r} holds no record table (no info.json); use one written by record"
        )
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); use a table written by record") from error
    if not isinstance(info, dict) or (info.get("kind"), info.get("version")) != (_KIND, _VERSION):
        raise ValueError(f"{str(path)!r} is not of kind {_KIND!r}, version {_VERSION}; use a table written by record")
    if "path" in (drafter := info.get("drafter") or {}):  # as earlier tables have it
        info["drafter"] = {"name": checkpoint_name(drafter.pop("path")), **drafter}
    shards, at = sorted(directory.glob("outputs-*.npz")), 0
    for shard in shards:
        first, end = (int(part) for part in shard.stem.split("-")[1:])
        if first != at:
            raise ValueError(f"directory={str(directory)!r} lacks outputs {at} to {first - 1}; record them anew")
        at = end
    return info, shards


def read_shard(path: Path) -> dict[str, Array]:
    names = {*PER_OUTPUT, *PER_POSITION, "prompt_tokens", "task_ids", "fingerprints"}
    try:
        with np.load(path, allow_pickle=False) as shard:
            missing = sorted(names - set(shard.files))
            if missing:
                raise ValueError(f"it lacks {missing}")
            return {name: shard[name] for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"shard {str(path)!r} cannot be read ({error}); delete it and record again") from error


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
