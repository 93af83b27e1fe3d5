"""Damaged DSpark checkpoints: every missing or wrong file, tensor and map is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark.drafters.checkpoint import CheckpointError, open_checkpoint
from hspark.drafters.dspark import DSparkDrafter
from tests.drafters.checkpoint_files import MODEL, REDUCED, drafts, edit_tensors, shard
from tests.drafters.dspark_cases import save_model


def damaged(path: Path, what: str) -> None:
    """One kind of damage to a good checkpoint."""
    weights = path / "model.safetensors"

    def with_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[], None]:
        return lambda: edit_tensors(path, edit)

    damages: dict[str, Callable[[], object]] = {
        "shape": with_tensors(lambda t: t.update({"fc.weight": torch.zeros(16, 31)})),
        "missing": with_tensors(lambda t: t.pop("layers.1.mlp.up_proj.weight")),
        "unexpected": with_tensors(lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(1)})),
        "integer": with_tensors(lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int8)})),
        "truncated": lambda: weights.write_bytes(weights.read_bytes()[:-100]),
        "empty": lambda: weights.write_bytes(b""),
        "no weights": weights.unlink,
        "no config": (path / "config.json").unlink,
        "not json": lambda: (path / "config.json").write_text('{"hidden_size": 16,'),
        "json list": lambda: (path / "config.json").write_text("[]"),
    }
    damages[what]()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"model\.safetensors: fc\.weight has shape \[16, 31\]; expected \[16, 32\]"),
        ("missing", r"missing tensors: layers\.1\.mlp\.up_proj\.weight \[24, 16\]"),
        ("unexpected", r"does not account for: layers\.2\.mlp\.up_proj\.weight"),
        ("integer", r"model\.safetensors: norm\.weight is stored as I8; expected F64, F32, F16, BF16"),
        ("truncated", r"model\.safetensors: not a complete safetensors file"),
        ("empty", r"model\.safetensors: not a complete safetensors file"),
        ("no weights", r"model\.safetensors does not exist.*the directory holds config\.json"),
        ("no config", r"config\.json does not exist"),
        ("not json", r"config\.json: not valid JSON"),
        ("json list", r"config\.json: holds list; expected an object"),
    ],
)
def test_damage_is_named(what: str, message: str, tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path)
    damaged(path, what)
    with pytest.raises(ValueError, match=message) as error:
        DSparkDrafter.from_pretrained(path)
    assert str(tmp_path) in str(error.value)


def test_a_lost_shard_and_a_wrong_index_are_named(tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path)
    shard(path)
    index = path / "model.safetensors.index.json"
    placed = json.loads(index.read_text())
    moved = dict(placed, weight_map=placed["weight_map"] | {"fc.weight": "model-00003-of-00003.safetensors"})
    if placed["weight_map"]["fc.weight"] == "model-00003-of-00003.safetensors":
        moved["weight_map"]["fc.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(moved))
    with pytest.raises(CheckpointError, match=r"names tensors that are not there: fc\.weight in model-0000"):
        open_checkpoint(path)
    index.write_text(json.dumps(placed))
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors does not exist"):
        open_checkpoint(path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json: holds list; expected an object"):
        open_checkpoint(path)
    for weight_map in ("null", "[]", '{"fc.weight": 3}'):
        index.write_text(f'{{"weight_map": {weight_map}}}')
        with pytest.raises(CheckpointError, match=r"index\.json: weight_map is .*; expected an object of file names"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", ["config.json", "confidence.json", "drafting.json", "model.safetensors.index.json"])
def test_a_directory_in_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path)
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read \(Is a directory\)"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 9999, "num_hidden_layers is 9999, and there are 31 tensors in all"),
        ("head_dim", 2**30, "head_dim is 1073741824; expected an integer of at least 1, at most 65536"),
        ("intermediate_size", 2**31 - 1, r"has shape \[16, 24\]; expected \[16, 2147483647\]"),
        ("hidden_size", 2**31 - 1, "sizes that no tensor can have"),
    ],
)
def test_sizes_beyond_the_tensors_are_refused_before_anything_is_built(
    key: str, value: int, message: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {key: value}
    path = save_model(MODEL, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({"d2t": t["d2t"][:-1]}), r"d2t has shape \[24\]; expected \[25\]"),
        (
            lambda t: t.update({"d2t": t["d2t"] + 20}),
            r"d2t maps draft tokens to ids \d+\.\.\d+; expected ids in 0\.\.39",
        ),
        (lambda t: t.update({"d2t": t["d2t"] - 40}), r"d2t maps draft tokens to ids -\d+"),
        (lambda t: t.update({"d2t": -torch.arange(25)}), r"several draft tokens to one id"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), r"t2d and d2t disagree"),
        (lambda t: (t.pop("d2t"), t["t2d"].fill_(True)), r"t2d marks 40 tokens; expected 25"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), r"missing tensors: d2t \[25\]"),
    ],
)
def test_vocabulary_maps_are_checked(edit: Callable[..., Any], message: str, tmp_path: Path) -> None:
    path = save_model(REDUCED, tmp_path, "speculators")
    edit_tensors(path, edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("drop", ["d2t", "t2d"])
def test_one_of_the_two_maps_is_enough(drop: str, tmp_path: Path) -> None:
    path = save_model(REDUCED, tmp_path, "speculators", drop=(drop,))
    assert drafts(path) == drafts(REDUCED)


def test_a_map_beside_a_whole_vocabulary_must_be_the_identity(tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path)
    identity = {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": torch.ones(40, dtype=torch.bool)}
    edit_tensors(path, lambda tensors: tensors.update(identity))
    assert drafts(path) == drafts(MODEL)
    edit_tensors(path, lambda tensors: tensors["d2t"].fill_(1))
    with pytest.raises(CheckpointError, match="d2t is not zero"):
        open_checkpoint(path)
