"""Rows of a published data set: from a file or a folder in its layout, or from the hub by name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hspark.lab.outputs import read_lines

# A row and where it is from, for messages.
Row = tuple[str, Mapping[str, Any]]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
# What the `datasets` package writes beside its data.
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}


def read_rows(path: str | Path, config: str | None = None, split: str | None = None) -> Iterator[Row]:
    """The rows of a data file (.jsonl, .jsonl.gz, .json, .parquet, .arrow), or of a folder of such files, in order.

    In a folder, as downloaded from the hub: of the files below a folder named `config`, if there is one, those whose
    name begins with `split`, if there are any, else all. Parquet and Arrow need the `pyarrow` package. Reading is lazy,
    file by file. ValueError for a missing file, for one that cannot be read, and for a folder of mixed formats.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"path={str(path)!r} does not exist; give a file ({', '.join(SUFFIXES)}) or a folder of them")
    for file in _data_files(path, config, split) if path.is_dir() else [path]:
        yield from _read_file(file)


def hub_rows(name: str, config: str | None, split: str) -> Iterator[Row]:
    """The rows of a data set of the hub, through the `datasets` package; ValueError if either is not at hand."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"path=None reads {name!r} from the hub, which needs the datasets package (pip install datasets); "
            "install it, or give path= a local file or folder in the published layout"
        ) from error
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:
        raise ValueError(
            f"the hub's {name!r} (configuration {config or 'default'}, split {split!r}) could not be loaded: {error}; "
            "give path= a local file or folder in the published layout"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{name}, row {number}", row


def _data_files(folder: Path, config: str | None, split: str | None) -> list[Path]:
    files = [f for f in sorted(folder.rglob("*")) if f.name.endswith(SUFFIXES) and f.name not in _NOT_DATA]
    if config is not None:
        files = [f for f in files if config in f.relative_to(folder).parts[:-1]] or files
    if split is not None:
        files = [f for f in files if f.name.split(".")[0].split("-")[0] == split] or files
    if not files:
        raise ValueError(f"folder {str(folder)!r} holds no data file; it needs one of {', '.join(SUFFIXES)}")
    kinds = sorted({_kind(file) for file in files})
    if len(kinds) > 1:
        raise ValueError(f"folder {str(folder)!r} holds data in several formats ({', '.join(kinds)}); give one file")
    return files


def _kind(file: Path) -> str:
    for suffix in SUFFIXES:
        if file.name.endswith(suffix):
            return suffix
    raise ValueError(f"{file} is not a data file that can be read; use {', '.join(SUFFIXES)}")


def _read_file(file: Path) -> Iterator[Row]:
    kind = _kind(file)
    try:
        if kind in (".parquet", ".arrow"):
            yield from _read_columns(file, kind)
        elif kind == ".json":
            yield from _read_json(file)
        else:
            yield from _read_lines(file)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _read_lines(file: Path) -> Iterator[Row]:
    for number, line in read_lines(file):
        where = f"{file}, line {number}"
        try:
            yield where, _object(json.loads(line), where)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not valid JSON: {error}") from error


def _read_json(file: Path) -> Iterator[Row]:
    """A list of objects, or an object whose only list is that list, as in {"data": [...]}."""
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise ValueError(f"{file} holds {type(value).__name__} instead of a list of objects")
    for number, row in enumerate(value, 1):
        yield f"{file}, item {number}", _object(row, f"{file}, item {number}")


def _read_columns(file: Path, kind: str) -> Iterator[Row]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(
            f"{file} needs the pyarrow package (pip install pyarrow); install it, or give the rows as JSON lines"
        ) from error
    try:
        batches = parquet.ParquetFile(file).iter_batches() if kind == ".parquet" else _arrow_batches(pyarrow, file)
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not a {kind[1:]} file: {error}") from error


def _arrow_batches(pyarrow: Any, file: Path) -> Iterator[Any]:
    """The `datasets` package writes Arrow's stream format; other tools its file format."""
    with pyarrow.memory_map(str(file)) as source:
        try:
            yield from pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))


def _object(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {type(row).__name__} instead of an object of fields")
    return row
