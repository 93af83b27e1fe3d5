"""Reading DSpark checkpoints from disk: files, tensors, tables, maps, and whether they fit the target."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hspark.drafters.checkpoint import CheckpointError, TargetMismatchError, open_checkpoint
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_model import DSparkModel
from hspark.drafters.known import PUBLISHED, known_drafter
from hspark.drafters.layouts import ConfigError
from tests.drafters.dspark_cases import (
    GREEDY,
    bound,
    feed,
    random_model,
    rows_of,
    save_model,
    target_info,
    tiny_config,
)

MODEL = random_model(tiny_config())
REDUCED = random_model(tiny_config(draft_vocab_size=25, anchor_first=False))
TEXT = [1, 5, 9, 13, 2, 7, 7, 30]


def drafts(source: Any, **options: Any) -> list[int]:
    drafter = bound(source, **options)
    feed(drafter, 0, TEXT[:-1])
    return drafter.propose(rows_of([TEXT]), GREEDY).tokens[0].tolist()


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")


def edit_config(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((path / "config.json").read_text())
    edit(values)
    (path / "config.json").write_text(json.dumps(values))


def shard(path: Path) -> None:
    """Splits model.safetensors in three, with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % 3 == number}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ---- what loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MODEL, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_saved_drafter_comes_back(model: DSparkModel, sharded: bool, tmp_path: Path) -> None:
    path = save_model(model, tmp_path, "speculators" if model is REDUCED else "deepspec")
    if sharded:
        shard(path)
    loaded = open_checkpoint(path).load()
    assert loaded.config == model.config.replace(num_target_layers=loaded.config.num_target_layers)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert drafts(path) == drafts(model)


def test_vendor_extras_and_training_leftovers_are_skipped(tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path)
    extras = {"mask_embedding": torch.zeros(16), "verifier_norm.weight": torch.ones(16)}
    edit_tensors(path, lambda tensors: tensors.update(extras))
    (path / "train_config.py").write_text("raise SystemExit")
    (path / "training_state.rank0.pt").write_bytes(b"junk")
    assert drafts(path) == drafts(MODEL)


@pytest.mark.parametrize(
    "missing", [("embed_tokens.weight",), ("lm_head.weight",), ("embed_tokens.weight", "lm_head.weight")]
)
@pytest.mark.parametrize("model", [MODEL, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("blank", [False, True])
def test_missing_tables_are_the_targets(
    model: DSparkModel, missing: tuple[str, ...], blank: bool, tmp_path: Path
) -> None:
    """Left out, or full of NaN: then the target's table serves, its rows picked by the map if there is one."""
    target = target_info(model.config, tables=True, vocab_size=model.config.vocab_size + 8)
    layout = "speculators" if model is REDUCED else "deepspec"
    path = save_model(model, tmp_path, layout, drop=() if blank else missing)
    if blank:
        edit_tensors(path, lambda tensors: [tensors[name].fill_(float("nan")) for name in missing])
    loaded = open_checkpoint(path).load(target)
    for name, module in (("embed_tokens", target.embed_tokens), ("lm_head", target.lm_head)):
        assert module is not None
        own = cast(Tensor, module.weight)
        table = getattr(loaded, name).weight
        if f"{name}.weight" not in missing:
            assert torch.equal(table, model.state_dict()[f"{name}.weight"])
            continue
        whole = name == "embed_tokens" or not model.config.reduced
        rows = torch.arange(model.config.vocab_size) if whole else model.target_ids()
        assert torch.equal(table, own[rows])
        assert (table.data_ptr() == own.data_ptr()) == whole, "whole tables are shared, not copied"


def test_equal_tables_are_shared_and_different_ones_kept(tmp_path: Path) -> None:
    target = target_info(MODEL.config, tables=True)
    assert isinstance(target.embed_tokens, nn.Embedding)
    path = save_model(MODEL, tmp_path)
    same = target.embed_tokens.weight.detach().clone()
    edit_tensors(path, lambda tensors: tensors.update({"embed_tokens.weight": same}))
    loaded = open_checkpoint(path).load(target)
    assert loaded.embed_tokens is not None
    assert loaded.lm_head is not None
    assert loaded.embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert torch.equal(loaded.lm_head.weight, MODEL.state_dict()["lm_head.weight"])


def test_casting_a_drafter_leaves_the_target_alone(tmp_path: Path) -> None:
    target = target_info(MODEL.config, tables=True)
    loaded = open_checkpoint(save_model(MODEL, tmp_path, drop=("embed_tokens.weight",))).load(target)
    loaded.to(torch.float64)
    assert target.embed_tokens is not None
    assert target.embed_tokens.weight.dtype == torch.float32


def test_weights_arrive_in_the_targets_type(tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path)
    edit_tensors(path, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    assert open_checkpoint(path).dtype == torch.bfloat16
    assert {p.dtype for p in open_checkpoint(path).load().parameters()} == {torch.bfloat16}
    loaded = open_checkpoint(path).load(target_info(MODEL.config))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.rotary.inv_freq.dtype == torch.float32


def test_rope_frequencies_survive_a_cast() -> None:
    model = random_model(tiny_config())
    exact = model.rotary.inv_freq.clone()
    assert torch.equal(model.to(torch.bfloat16).rotary.inv_freq, exact)


# ---- what does not ---------------------------------------------------------------------------------------------------


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
    with pytest.raises(CheckpointError, match=r"index\.json: not an index of shards"):
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


# ---- whether it fits the target --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, r"hidden_size=16, target 'tiny' has 32"),
        ({"num_layers": 6}, r"num_target_layers=4, target 'tiny' has 6"),
        ({"vocab_size": 5000}, r"vocab_size=40, target 'tiny' has 5000; they may differ by padding"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = MODEL.config
    with pytest.raises(TargetMismatchError, match=message) as error:
        bound(save_model(MODEL, tmp_path), target=target_info(config, **changes))
    assert str(tmp_path) in str(error.value)
    with pytest.raises(TargetMismatchError, match=message):
        bound(MODEL, target=target_info(config, **changes))


def test_taps_beyond_the_target_are_refused(tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path, num_target_layers=None)
    with pytest.raises(TargetMismatchError, match=r"taps=\[0, 2\], target 'tiny' has layers 0\.\.1"):
        bound(path, target=target_info(MODEL.config, num_layers=2))


def test_taps_on_the_final_layer_are_refused(tmp_path: Path) -> None:
    """By the file's own word when it knows the depth, else when it meets the target."""
    path = save_model(MODEL, tmp_path, num_target_layers=3)
    message = r"target_layer_ids is \[0, 2\]; expected layers below the final one \(2\)"
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(path)
    edit_config(path, lambda values: values.pop("num_target_layers"))
    with pytest.raises(ConfigError, match=message):
        bound(path, target=target_info(MODEL.config, num_layers=3))


def test_missing_tables_need_a_target_that_has_them(tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path, drop=("lm_head.weight",))
    with pytest.raises(
        TargetMismatchError, match=r"lm_head\.weight is not stored, and target 'tiny' has no plain table"
    ):
        bound(path)
    small = target_info(MODEL.config, tables=True, vocab_size=36)
    with pytest.raises(
        TargetMismatchError, match=r"lm_head\.weight is not stored.*has 36 rows; expected at least vocab_size=40"
    ):
        bound(path, target=small)
    bare = open_checkpoint(path).load()
    with pytest.raises(ValueError, match="lm_head is missing"):
        bare.base_logits(torch.zeros(1, 16))


def test_a_drafter_made_for_another_name_draws_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = {"verifier": {"name_or_path": "maker/Model-8B"}, "proposal_methods": [{"speculative_tokens": 5}]}
    path = save_model(MODEL, tmp_path, "speculators", speculators_config=about)
    with caplog.at_level(logging.WARNING):
        bound(path, target=target_info(MODEL.config, name="elsewhere/model-8b"))
        assert not caplog.records
        bound(path, target=target_info(MODEL.config, name="other"))
    assert "made for maker/Model-8B and drafts for other" in caplog.text


# ---- where it is looked for ------------------------------------------------------------------------------------------


def test_local_paths_never_ask_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def hub(repo: str, **options: Any) -> str:
        asked.append(repo)
        return str(tmp_path / "owner" / "drafter")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    save_model(MODEL, tmp_path / "owner" / "drafter")
    monkeypatch.chdir(tmp_path)
    for path in ("owner/drafter", tmp_path / "owner" / "drafter", "./owner/drafter"):
        open_checkpoint(path)
    for wrong in ("drafter", "./owner/other", str(tmp_path / "nowhere"), "a/b/c"):
        with pytest.raises(CheckpointError, match="does not exist; expected a checkpoint directory or a hub id"):
            open_checkpoint(wrong)
    with pytest.raises(CheckpointError, match="is a file; expected the directory"):
        open_checkpoint(tmp_path / "owner" / "drafter" / "config.json")
    assert asked == []
    open_checkpoint("someone/else")
    assert asked == ["someone/else"]


def test_a_failed_download_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def hub(repo: str, **options: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(CheckpointError, match=r"owner/name is no directory here.*no route"):
        open_checkpoint("owner/name")


def test_known_pairs() -> None:
    assert len(PUBLISHED) == 5
    assert known_drafter("Qwen/Qwen3-4B") == "deepseek-ai/dspark_qwen3_4b_block7"
    assert known_drafter("qwen/qwen3-8b") == "deepseek-ai/dspark_qwen3_8b_block7"
    assert known_drafter("CohereLabs/North-Mini-Code-1.0") == "sdougbrown/North-Mini-Code-1.0-dspark"
    assert known_drafter("someone/else") is None
    packaged = known_drafter("smollm2-135m")
    assert packaged is None or Path(packaged, "config.json").exists()
    assert known_drafter("HuggingFaceTB/SmolLM2-135M-Instruct") == packaged
