"""Settings: refused before any work, kept by a run that goes on, changed only where nothing depends on them."""

import json

import pytest

from hspark.drafters.checkpoint import open_checkpoint
from hspark.train import command
from hspark.train.command import main
from hspark.train.prompts import training_prompts
from hspark.train.recipe import train_config
from hspark.train.settings import read_settings, save_settings
from tests.train.runs import OPTIONS, write_outputs

# Every option, away from its default.
CHANGED = "--model m --dtype float32 --device cpu --threads 1 --prompts 40 --invent 3 --max-new-tokens 20"
CHANGED += " --layers 1 --taps 2 --kv-heads 2 --markov-rank 4 --block-size 5 --steps 500 --hours 12 --optimizer adamw"
CHANGED += " --lr 0.1 --matrix-lr 0.2 --early-slots 2 --early-steps 9 --schedule cosine --cooldown 50 --on-prompts"
CHANGED += " --warmup 3 --sequences 2 --micro-batch 2 --anchors 4 --vocabulary 99 --common 9 --ce 1 --l1 2 --soft 3"
CHANGED += " --confidence 4 --gamma 5 --ema 0.5 --seed 6 --fuse --export out --draft-length 4 --draft-vocabulary 9000"
CHANGED += " --with-tables --minutes 7"


def test_a_run_that_goes_on_keeps_every_setting(tmp_path):
    (tmp_path / "answers.jsonl").touch()
    files = [f"--{name}={tmp_path / 'answers.jsonl'}" for name in ("outputs", "outputs", "prompt-file")]
    first = vars(read_settings(["--folder", str(tmp_path / "run"), *files, *CHANGED.split()]))
    default = vars(read_settings(["--folder", str(tmp_path / "other"), "--prompts", "1"]))
    assert {name for name in first if first[name] == default[name]} == {"json"}
    save_settings(read_settings(["--folder", str(tmp_path / "run"), *files, *CHANGED.split(), "--json"]))
    again = read_settings(["--folder", str(tmp_path / "run")])
    assert vars(again) == first
    assert train_config(again).seconds == 12 * 3600 + 7 * 60
    repeated = read_settings(["--folder", str(tmp_path / "run"), *files, *CHANGED.split()])
    assert vars(repeated) == first


def test_what_is_given_wins(tmp_path):
    folder = ["--folder", str(tmp_path)]
    save_settings(read_settings([*folder, *CHANGED.split()]))
    (tmp_path / "checkpoint.pt").touch()
    changes = "--steps 900 --minutes 30 --cooldown 0 --device auto --no-fuse --no-with-tables --draft-length all"
    options = read_settings([*folder, *changes.split(), "--export", "there", "--draft-vocabulary", "7"])
    assert (options.steps, options.cooldown, options.device) == (900, 0, "auto")
    assert train_config(options).seconds == 30 * 60  # the 12 hours were the same setting
    assert not options.fuse
    assert not options.with_tables
    assert (options.draft_length, options.draft_vocabulary, options.export) == ("all", 7, "there")
    assert options.lr == 0.1
    save_settings(options)
    assert vars(read_settings(folder)) == vars(options)


def test_a_setting_is_fixed_once_something_depends_on_it(tmp_path):
    folder = ["--folder", str(tmp_path)]
    save_settings(read_settings([*folder, "--prompts", "40"]))
    assert read_settings([*folder, "--prompts", "50", "--lr", "0.5"]).prompts == 50
    (tmp_path / "outputs.jsonl").touch()
    assert read_settings([*folder, "--lr", "0.5", "--prompts", "40"]).lr == 0.5
    with pytest.raises(ValueError, match="other settings: prompts=50 instead of 40, taps=2 instead of 4; leave"):
        read_settings([*folder, "--prompts", "50", "--taps", "2", "--lr", "0.5"])
    (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(ValueError, match=r"lr=0\.5 instead of 0\.0015; leave"):
        read_settings([*folder, "--lr", "0.5"])
    with pytest.raises(ValueError, match="on_prompts=True instead of False"):
        read_settings([*folder, "--on-prompts"])


def test_a_run_interrupted_while_answering_goes_on_with_its_settings(tmp_path, target, monkeypatch):
    folder = tmp_path / "run"
    generate = command.generate_outputs

    def interrupted(*arguments, progress, **options):
        def stop(done, total):
            if done >= 8:
                raise KeyboardInterrupt

        return generate(*arguments, progress=stop, batch_size=4, **options)

    monkeypatch.setattr(command, "generate_outputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["--folder", str(folder), "--prompts", "40", "--max-new-tokens", "20", *OPTIONS])
    kept = (folder / "outputs.jsonl").read_text()
    assert kept
    assert json.loads((folder / "settings.json").read_text())["steps"] == 3
    monkeypatch.setattr(command, "generate_outputs", generate)
    assert main(["--folder", str(folder)]) == 0
    answers = (folder / "outputs.jsonl").read_text()
    assert answers.startswith(kept)
    assert len(answers) > len(kept)
    whole = generate(target(), training_prompts(40), tmp_path / "whole.jsonl", max_new_tokens=20)
    assert sorted(answers.splitlines()) == sorted(whole.read_text().splitlines())
    config = open_checkpoint(folder / "drafter").config
    assert (config.num_layers, config.block_size, config.markov_rank) == (1, 3, 4)
    assert json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["step"] == 3


REFUSED = [
    *("--layers 0", "--taps 0", "--block-size 0", "--markov-rank -1", "--kv-heads 0", "--prompts -5", "--invent -1"),
    *("--max-new-tokens 13", "--steps 0", "--lr -1", "--lr nan", "--hours -1", "--minutes inf", "--vocabulary -3"),
    *("--common -1", "--gamma nan", "--ce -1", "--seed -1", "--device nowhere", "--device cpu:0", "--threads 0"),
    *("--draft-length 4", "--draft-length 0", "--draft-vocabulary 0", "--optimizer sgd", "--early-slots 2"),
    *("--early-steps -5", "--outputs missing.jsonl", "--prompt-file missing.jsonl"),
]


@pytest.mark.parametrize("option", REFUSED)
def test_mistakes_are_refused_before_any_work(option, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_target", lambda *args, **options: pytest.fail("the target was loaded"))
    name, value = option.split()
    with pytest.raises(ValueError, match=rf"{name[2:].replace('-', '_')}='?{value}\b.*use|cpu:0.*leave"):
        main(["--folder", str(tmp_path / "run"), "--prompts", "40", *OPTIONS, name, value])
    assert not (tmp_path / "run").exists()


def test_an_early_block_that_does_not_fit(tmp_path, target):
    with pytest.raises(ValueError, match="early_slots=9 with early_steps=5"):
        main(["--folder", str(tmp_path / "run"), "--prompts", "1", "--early-slots", "9", "--early-steps", "5"])


def test_nothing_to_train_on(tmp_path, target):
    with pytest.raises(ValueError, match="--outputs, --prompt-file, --prompts or --invent"):
        main(["--folder", str(tmp_path / "run")])


def test_what_does_not_fit_the_target_leaves_nothing_behind(tmp_path, target):
    outputs = write_outputs(tmp_path / "outputs.jsonl")
    with pytest.raises(ValueError, match="kv_heads=3 does not divide the target's 4 query heads"):
        main(["--folder", str(tmp_path / "run"), "--outputs", outputs, "--kv-heads", "3", *OPTIONS])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_settings_are_refused(text, tmp_path):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ValueError, match=r"settings\.json: not the settings of a run"):
        read_settings(["--folder", str(tmp_path), "--prompts", "1"])
