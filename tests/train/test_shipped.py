"""The drafter that comes with the package: whole, small enough, calibrated, and what its card says."""

import json

import torch

from hspark.drafters.checkpoint import open_checkpoint
from hspark.drafters.known import PACKAGED

FOLDER = PACKAGED["smollm2-135m"]


def test_it_is_whole_and_small_enough():
    checkpoint = open_checkpoint(FOLDER)
    assert checkpoint.layout == "deepspec"
    assert checkpoint.config.num_target_layers == 30
    calibration = checkpoint.calibration
    assert len(calibration.temperatures) == len(calibration.biases) == checkpoint.config.width == 7
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 25_000_000
    model = checkpoint.load()
    assert model.embed_tokens is None
    assert model.lm_head is None
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


def test_the_card_agrees_with_the_files():
    card = (FOLDER / "README.md").read_text()
    config = json.loads((FOLDER / "config.json").read_text())
    parameters = sum(weight.numel() for weight in open_checkpoint(FOLDER).load().parameters())
    assert f"{parameters:,} parameters" in card
    assert "taps " + ", ".join(map(str, config["target_layer_ids"])) in card
    assert "Apache-2.0" in card
