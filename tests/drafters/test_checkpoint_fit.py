"""Whether a DSpark checkpoint fits the target: sizes, depth, tables and names."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark.drafters.checkpoint import TargetMismatchError, open_checkpoint
from hspark.drafters.layouts import ConfigError
from tests.drafters.checkpoint_files import MODEL
from tests.drafters.dspark_cases import bound, save_model, target_info


def edit_config(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((path / "config.json").read_text())
    edit(values)
    (path / "config.json").write_text(json.dumps(values))


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
