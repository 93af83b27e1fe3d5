"""Rows from files of every format, from folders and from the hub; what cannot be read is named."""

from __future__ import annotations

import gzip
import importlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hspark.lab import workload_rows
from hspark.lab.paper_workloads import load_paper_workload
from tests.lab.paper_rows import LONG, Record, canitedit, changed, turns, write


def test_json_gzip_and_folders(tmp_path: Path) -> None:
    rows = [turns(number, f"Question {number}") for number in range(4)]

    def ids(path: Path, name: str = "mt-bench") -> list[str]:
        return [sample.task_id.split("/")[1] for sample in load_paper_workload(name, path).samples]

    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "data.json").write_text(json.dumps({"version": 1, "data": rows}))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    for file in ("list.json", "data.json", "rows.jsonl.gz"):
        assert ids(tmp_path / file) == ["0", "1", "2", "3"]

    folder = tmp_path / "hub"
    for config, split, row in (
        ("throughput_8k", "test-00000-of-00002", rows[0]),
        ("throughput_8k", "test-00001-of-00002", rows[1]),
        ("throughput_8k", "train-00000-of-00001", rows[2]),
        ("throughput_1k", "test-00000-of-00001", rows[3]),
    ):
        (folder / config).mkdir(parents=True, exist_ok=True)
        write(folder / config / f"{split}.jsonl", [row])
    (folder / "dataset_info.json").write_text("{}")
    assert ids(folder, "speed-bench-8k") == ["0", "1"]
    assert ids(folder, "speed-bench-1k") == ["3"]
    assert ids(folder / "throughput_8k", "mt-bench") == ["2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "a,b", "rows.csv is not a data file that can be read; use .jsonl, .jsonl.gz, .json"),
        ("rows.json", "{", "rows.json is not valid JSON"),
        ("rows.json", '{"a": 1}', "rows.json holds dict instead of a list of objects"),
        ("rows.json", "[1]", "item 1 is int instead of an object of fields"),
        ("rows.jsonl", "[]", "line 1 is list instead of an object of fields"),
        ("rows.jsonl.gz", "plain", "rows.jsonl.gz cannot be read"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_paper_workload("mt-bench", tmp_path / name)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no data file"):
        load_paper_workload("mt-bench", tmp_path)
    write(tmp_path / "rows.jsonl", [turns(1, "Hi.")])
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(ValueError, match=r"several formats \(\.json, \.jsonl\)"):
        load_paper_workload("mt-bench", tmp_path)


def _without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def import_module(name: str) -> Any:
        if name.split(".")[0] in names:
            raise ImportError(f"No module named {name!r}")
        return importlib.import_module(name)

    monkeypatch.setattr(workload_rows, "importlib", types.SimpleNamespace(import_module=import_module))


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "pyarrow", "datasets")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"rows\.parquet needs the pyarrow package"):
        load_paper_workload("mt-bench", tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"reads 'philschmid/mt-bench' from the hub, which needs the datasets package"):
        load_paper_workload("mt-bench")


def test_the_hub_is_asked_by_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> Iterator[Record]:
        asked.append((name, config, split))
        if name == "vdaita/edit_5k_char":
            raise ConnectionError("no route")
        return iter([turns("a", "Sort.", "low_entropy")])

    fake = types.SimpleNamespace(import_module=lambda name: types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(workload_rows, "importlib", fake)
    assert [sample.task_id for sample in load_paper_workload("speed-bench-2k").samples] == ["speed-bench-2k/a"]
    assert asked == [("nvidia/SPEED-Bench", "throughput_2k", "test")]
    with pytest.raises(ValueError, match=r"'vdaita/edit_5k_char' \(configuration default, split 'train'\).*no route"):
        load_paper_workload("blazedit-5k")


def test_parquet_and_arrow_where_pyarrow_is_at_hand(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([canitedit(1, changed(LONG, 0.1)), canitedit(2, changed(LONG, 0.2))])
    parquet.write_table(table, tmp_path / "test-00000-of-00001.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    for file in ("test-00000-of-00001.parquet", "stream.arrow", "file.arrow"):
        samples = load_paper_workload("canitedit", tmp_path / file).samples
        assert [sample.task_id for sample in samples] == ["canitedit/1", "canitedit/2"]
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet is not a parquet file"):
        load_paper_workload("canitedit", tmp_path / "bad.parquet")
