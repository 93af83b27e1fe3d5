"""A recording goes on with the same models only, wherever they lie; and tables of earlier versions go on too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark.drafters.dspark_config import DSparkConfig
from hspark.lab.digests import checkpoint_digest, checkpoint_name, weights_digest
from hspark.lab.lab_record import RecordSettings, record_file
from hspark.lab.table import RecordTable
from hspark.policy import LinearCost
from tests.drafters.dspark_cases import random_model, save_model
from tests.drafters.test_dspark_end_to_end import COMMON
from tests.saved_target import save_tiny_target
from tests.tiny import tiny_llama
from tests.toy_tokenizer import TOY_VOCAB


def save_drafter(path: Path, seed: int) -> Path:
    config = {**COMMON, "vocab_size": TOY_VOCAB, "mask_token_id": TOY_VOCAB - 1, "num_target_layers": 3}
    save_model(random_model(DSparkConfig(**config), seed=seed), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resuming")
    save_tiny_target(path / "target")
    save_drafter(path / "drafter", seed=3)
    LinearCost(1.0, 0.05).save(path / "cost.json")
    (path / "work.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "the the")))
    return path


@pytest.fixture(scope="module")
def table(folder: Path) -> Path:
    record_file(folder / "work.jsonl", folder / "table", settings(folder))
    return folder / "table"


def settings(folder: Path, **changes: Any) -> RecordSettings:
    common = {"target": str(folder / "target"), "drafter": str(folder / "drafter"), "dtype": "float32", "device": "cpu"}
    return RecordSettings(**{**common, "max_new_tokens": 6, "cost": str(folder / "cost.json"), **changes})


def test_models_may_move_and_paths_are_not_kept(folder: Path, table: Path, tmp_path: Path) -> None:
    for part in ("target", "drafter"):
        shutil.copytree(folder / part, tmp_path / part)
    shutil.copytree(table, tmp_path / "table")
    moved = settings(folder, target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))
    assert record_file(folder / "work.jsonl", tmp_path / "table", moved).outputs == 2
    drafter = RecordTable.load(table).info["drafter"]
    assert (drafter["name"], drafter["digest"]) == ("drafter", checkpoint_digest(folder / "drafter"))
    assert str(folder) not in json.dumps(drafter)


@pytest.mark.parametrize("finished", [True, False])
def test_another_dtype_or_target_is_refused(finished: bool, folder: Path, table: Path, tmp_path: Path) -> None:
    """Whether all answers are there, or a killed run left the first one."""
    shutil.copytree(table, tmp_path / "table")
    kept = tmp_path / "table" / "outputs.jsonl"
    if not finished:
        kept.write_text(kept.read_text().splitlines(keepends=True)[0])
    for changes in ({"dtype": "bfloat16"}, {"target": str(save_tiny_target(tmp_path / "another"))}):
        with pytest.raises(ValueError, match=r"out: .* holds outputs of other requests \(line 1, made with .*float32"):
            record_file(folder / "work.jsonl", tmp_path / "table", settings(folder, **changes))
    kept.unlink()
    with pytest.raises(ValueError, match="holds a table made with dtype='float32', and now dtype='bfloat16'"):
        record_file(folder / "work.jsonl", tmp_path / "table", settings(folder, dtype="bfloat16"))


def test_a_drafter_of_the_same_name_with_other_weights_is_refused(folder: Path, table: Path, tmp_path: Path) -> None:
    other = save_drafter(tmp_path / "drafter", seed=4)
    with pytest.raises(ValueError, match=r"holds a table made with drafter\.digest="):
        record_file(folder / "work.jsonl", table, settings(folder, drafter=str(other)))


def test_earlier_tables_are_read_and_go_on(folder: Path, table: Path, tmp_path: Path) -> None:
    """They have the drafter's path, and say nothing of dtype and weights."""
    shutil.copytree(table, tmp_path / "table")
    path = tmp_path / "table" / "info.json"
    info = json.loads(path.read_text())
    del info["dtype"], info["target_digest"], info["drafter"]["digest"]
    del info["drafter"]["name"]
    info["drafter"]["path"] = "/elsewhere/drafter"
    path.write_text(json.dumps(info))
    kept = tmp_path / "table" / "outputs.jsonl"
    names = {"dtype", "target_digest", "target"}
    lines = [{k: v for k, v in json.loads(line).items() if k not in names} for line in kept.read_text().splitlines()]
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = record_file(folder / "work.jsonl", tmp_path / "table", settings(folder))
    assert again.outputs == 2
    assert again.info["drafter"]["name"] == "drafter"
    assert "path" not in again.info["drafter"]


def test_digests_and_names() -> None:
    model, other = tiny_llama(), tiny_llama()
    assert weights_digest(model) == weights_digest(other)
    with torch.no_grad():
        next(iter(other.parameters())).view(-1)[3] += 1
    assert weights_digest(model) != weights_digest(other)
    assert checkpoint_name("/hub/models--owner--drafter-7b/snapshots/0a1b2c") == "owner/drafter-7b"
    assert checkpoint_name("/some/where/drafter") == "drafter"
