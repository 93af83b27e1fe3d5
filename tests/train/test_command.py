"""`hspark train`: from prompts or recorded outputs to a checkpoint, and its mistakes in one line."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark.drafters.checkpoint import open_checkpoint
from hspark.drafters.limits import DraftLimits
from hspark.models import LoadedTarget
from hspark.train import command
from hspark.train.command import main
from hspark.train.data import FeatureStore
from hspark.train.generate import generate_outputs
from hspark.train.invent import invent_prompts
from tests.tiny import tiny_llama
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, toy_tokenizer
from tests.train.runs import tiny_outputs

OPTIONS = ["--device", "cpu", "--sequences", "2", "--micro-batch", "2", "--anchors", "4", "--vocabulary", "0"]
OPTIONS += ["--layers", "1", "--markov-rank", "4", "--block-size", "3", "--taps", "2", "--steps", "3"]


@pytest.fixture
def target(monkeypatch):
    """A random target with a byte-level tokenizer, in place of a download."""

    def load(*args, **options):
        return LoadedTarget("tiny", tiny_llama(vocab_size=TOY_VOCAB), toy_tokenizer(chat=True), (TOY_EOS,), None)

    monkeypatch.setattr(command, "load_target", load)
    return load


def write_outputs(path, count=30):
    records = [
        {
            "task_id": output.task_id,
            "temperature": output.temperature,
            "prompt": f"Prompt {number}",
            "output_token_ids": list(output.output_token_ids),
        }
        for number, output in enumerate(tiny_outputs(count))
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


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


def test_other_settings_do_not_continue_a_run(tmp_path, target):
    outputs = write_outputs(tmp_path / "outputs.jsonl")
    main(["--folder", str(tmp_path / "run"), "--outputs", outputs, *OPTIONS])
    with pytest.raises(ValueError, match="other settings of lr"):
        main(["--folder", str(tmp_path / "run"), "--lr", "0.5"])


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


@pytest.mark.parametrize(("option", "value"), [("draft-length", "4"), ("draft-length", "0"), ("draft-vocabulary", "0")])
def test_limits_that_do_not_fit(option, value, tmp_path, target):
    with pytest.raises(ValueError, match=f"{option.replace('-', '_')}={value}; use a number"):
        main(["--folder", str(tmp_path / "run"), f"--{option}", value, *OPTIONS])


def test_an_early_block_that_does_not_fit(tmp_path, target):
    with pytest.raises(ValueError, match="early_slots=9 with early_steps=5"):
        main(["--folder", str(tmp_path / "run"), "--early-slots", "9", "--early-steps", "5"])


def test_nothing_to_train_on(tmp_path, target):
    with pytest.raises(ValueError, match="--outputs, --prompt-file, --prompts or --invent"):
        main(["--folder", str(tmp_path / "run")])


def test_help_has_a_recipe(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "ten-minute recipe" in capsys.readouterr().out


def test_answers_are_the_targets_own_and_are_not_repeated(tmp_path, target):
    prompts = [(f"q/{i}", "abc" * (i + 1)) for i in range(5)]
    path = tmp_path / "answers.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 6, "sampled_share": 0.0, "batch_size": 2, "max_length": 128}
    generate_outputs(target(), prompts[:3], path, **options)
    generate_outputs(target(), prompts, path, **options)
    model = target().model
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["task_id"] for record in records) == [task for task, _ in prompts]
    for record in records:
        tokens = list(record["prompt_token_ids"])
        for token in record["output_token_ids"]:
            with torch.inference_mode():
                assert int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()) == token
            tokens.append(token)
        assert len(record["output_token_ids"]) == 6 or record["output_token_ids"][-1] == TOY_EOS


def test_an_interrupted_run_keeps_the_answers_that_were_done(tmp_path, target):
    prompts = [(f"q/{i}", "abc" * (i + 1)) for i in range(5)]
    path = tmp_path / "answers.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 6, "sampled_share": 0.5, "batch_size": 2, "max_length": 128}

    def interrupt(done: int, total: int) -> None:
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_outputs(target(), prompts, path, progress=interrupt, **options)
    kept = path.read_text()
    assert 2 <= len(kept.splitlines()) < 5
    generate_outputs(target(), prompts, path, **options)
    assert path.read_text().startswith(kept)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["task_id"] for record in records) == [task for task, _ in prompts]
    fresh = tmp_path / "fresh.jsonl"  # what is sampled does not depend on when it is answered
    generate_outputs(target(), prompts, fresh, **options)
    assert sorted(path.read_text().splitlines()) == sorted(fresh.read_text().splitlines())


def test_answers_that_fail_are_left_out_and_the_others_go_on(tmp_path, target):
    """A NaN in the embedding of "z": the logits of prompts that hold it are broken."""
    prompts = [("q/0", "abc"), ("q/1", "az"), ("q/2", "abcabc"), ("q/3", "zzz"), ("q/4", "ab")]
    records = []
    for broken in (False, True):
        loaded = target()
        [z] = loaded.tokenizer("z", add_special_tokens=False)["input_ids"]
        if broken:
            loaded.model.get_input_embeddings().weight.data[z] = float("nan")
        path = tmp_path / f"{broken}.jsonl"
        generate_outputs(loaded, prompts, path, max_new_tokens=4, sampled_share=0.0, batch_size=2, max_length=128)
        records.append({line["task_id"]: line for line in map(json.loads, path.read_text().splitlines())})
    whole, rest = records
    assert set(rest) == {"q/0", "q/2", "q/4"}
    assert not any(z in whole[task]["output_token_ids"] for task in rest)  # or these would have failed as well
    assert all(rest[task] == whole[task] for task in rest)


def test_sampled_share_is_checked(tmp_path, target):
    with pytest.raises(ValueError, match=r"sampled_share=1\.5"):
        generate_outputs(target(), [], tmp_path / "x", sampled_share=1.5)


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
