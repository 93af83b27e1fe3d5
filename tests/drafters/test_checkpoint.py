"""Reading DSpark checkpoints from disk: files, tensors, tables, and where they are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hspark.drafters.checkpoint import CheckpointError, open_checkpoint
from hspark.drafters.dspark_model import DSparkModel
from hspark.drafters.known import PUBLISHED, known_drafter
from tests.drafters.checkpoint_files import MODEL, REDUCED, drafts, edit_tensors, shard
from tests.drafters.dspark_cases import random_model, save_model, target_info, tiny_config

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
