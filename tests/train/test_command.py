"""`hspark train`: from prompts or recorded outputs to a checkpoint, and its mistakes in one line."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hspark.drafters.checkpoint import open_checkpoint
from hspark.drafters.limits import DraftLimits
from hspark.train import command
from hspark.train.command import main
from hspark.train.data import FeatureStore
from hspark.train.invent import invent_prompts
from tests.toy_tokenizer import TOY_VOCAB, toy_tokenizer
from tests.train.runs import OPTIONS, write_outputs


def test_from_outputs_to_a_drafter_and_on(tmp_path, target, capsys):
    outputs = write_outputs(tmp_path / "outputs.jsonl")
    folder = str(tmp_path / "run")
    assert main(["--folder", folder, "--outputs", outputs, "--json", *OPTIONS]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3
    assert summary["anchors"] == 3 * 2 * 4
    assert not summary["resumed"]
    checkpoint = open_checkpoint(summary["drafter"])
    assert checkpoint.config.block_size == 3
    assert checkpoint.config.hidden_size == 32
    assert DraftLimits.load_beside(summary["drafter"], 3, TOY_VOCAB) == DraftLimits()
    limits = ["--draft-length", "2", "--draft-vocabulary", "12"]
    assert main(["--folder", folder, "--steps", "5", "--device", "cpu", *limits]) == 0
    limited = DraftLimits.load_beside(summary["drafter"], 3, TOY_VOCAB)
    counts = torch.bincount(FeatureStore(tmp_path / "run" / "features").tokens.long(), minlength=TOY_VOCAB)
    assert limited.length == 2
    assert limited.vocabulary is not None
    assert len(limited.vocabulary) == 12
    assert sorted(counts[list(limited.vocabulary)].tolist()) == sorted(counts.tolist())[-12:]
    text = capsys.readouterr().out
    assert "5 steps" in text
    assert "40 anchors" in text


def test_from_prompts_to_a_drafter(tmp_path, target, capsys):
    """Every step of the ten-minute recipe, on a target that answers nonsense."""
    options = [*OPTIONS, "--prompts", "40", "--max-new-tokens", "20", "--json"]
    assert main(["--folder", str(tmp_path / "run"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert len((tmp_path / "run" / "outputs.jsonl").read_text().splitlines()) <= 40


def test_prompts_that_the_target_makes_up(tmp_path, target, capsys):
    """They are messages only, distinct, the same for the same seed, and kept where the run goes on."""
    found = invent_prompts(target(), 5, seed=3, max_new_tokens=200, batch_size=8)
    assert len(found) == 5 == len(set(found)) == len({message for _, message in found})
    assert all(message.strip() == message != "" for _, message in found)
    assert not any("<user>" in message or "<eos>" in message for _, message in found)
    assert found == invent_prompts(target(), 5, seed=3, max_new_tokens=200, batch_size=8)
    folder = tmp_path / "run"
    options = [*OPTIONS, "--prompts", "20", "--invent", "5", "--max-new-tokens", "20", "--json"]
    assert main(["--folder", str(folder), *options]) == 0
    answered = {json.loads(line)["task_id"] for line in (folder / "outputs.jsonl").read_text().splitlines()}
    kept = [tuple(pair) for pair in json.loads((folder / "invented.json").read_text())]
    assert len(kept) == 5
    assert {task_id for task_id, _ in kept} <= answered
    again = argparse.Namespace(invent=5, seed=0)
    assert command._invented(again, folder, None) == kept  # type: ignore[arg-type]  # no target is asked again


def test_nothing_to_invent_with(target):
    with pytest.raises(ValueError, match="count=0"):
        invent_prompts(target(), 0)
    with pytest.raises(ValueError, match="no chat template"):
        invent_prompts(dataclasses.replace(target(), tokenizer=toy_tokenizer()), 3)


def test_help_has_a_recipe(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "ten-minute recipe" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_keep_equal_weights(tmp_path):
    """Data-parallel training under torchrun: gradients are shared, so both processes end with the same drafter."""
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    places = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, str(script), str(tmp_path)], check=True, timeout=300, env=os.environ | places)
    one, two = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert one["seen"].isdisjoint(two["seen"])
    assert all(torch.equal(one["model"][name], two["model"][name]) for name in one["model"])
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 1


_JOB = """
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from hspark.train.config import TrainConfig
from hspark.train.setup import drafter_config, new_drafter
from hspark.train.trainer import Trainer
from tests.tiny import VOCAB, tiny_llama
from tests.train.runs import TAPS, tiny_store

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
with accelerator.main_process_first():
    store = tiny_store(folder / "store", count=24)
target = tiny_llama()
config = drafter_config(target.config, mask_token_id=VOCAB - 1, layers=1, taps=TAPS, markov_rank=4, block_size=3)
recipe = TrainConfig(steps=4, sequences=2, micro_batch=1, anchors=5, vocabulary=0, held_out=0.3)
trainer = Trainer(new_drafter(config, target), [store], folder / "run", recipe, accelerator)
seen = set(trainer.items_of(0))
trainer.train()
torch.save({"model": trainer.model.state_dict(), "seen": seen}, folder / f"rank{accelerator.process_index}.pt")
"""
