"""The target's answers: its own, whole, each once, whatever happens on the way."""

import json
from typing import Any

import pytest
import torch

from hspark.train.generate import generate_outputs
from tests.toy_tokenizer import TOY_EOS


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


def test_a_last_line_cut_short_is_answered_again(tmp_path, target, caplog):
    prompts = [(f"q/{i}", "abc" * (i + 1)) for i in range(4)]
    path = tmp_path / "answers.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 2, "max_length": 128}
    generate_outputs(target(), prompts, path, **options)
    whole = path.read_text()
    path.write_text(whole[:-40])
    generate_outputs(target(), prompts, path, **options)
    assert path.read_text() == whole
    assert "last line is incomplete" in caplog.text
    assert str(path) in caplog.text
    caplog.clear()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]).removesuffix("\n"))  # only its end is missing
    generate_outputs(target(), prompts, path, **options)
    assert path.read_text() == whole
    assert not caplog.text
    path.write_text(whole[:30])  # nothing is left
    generate_outputs(target(), prompts, path, **options)
    assert path.read_text() == whole


def test_other_broken_lines_are_refused(tmp_path, target):
    path = tmp_path / "answers.jsonl"
    generate_outputs(target(), [(f"q/{i}", "abc") for i in range(3)], path, max_new_tokens=6, max_length=128)
    lines = path.read_text().splitlines(keepends=True)
    broken = "".join([lines[0], lines[1][:-40] + "\n", lines[2]])
    path.write_text(broken)
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 2: not JSON"):
        generate_outputs(target(), [], path)
    assert path.read_text() == broken


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampled_share": 1.5}, r"sampled_share=1\.5; use a share"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not usable; use an integer"),
        ({"max_new_tokens": 128}, "max_new_tokens=128 leaves no room for a prompt; use less than max_length=128"),
    ],
)
def test_settings_are_checked(values, message, tmp_path, target):
    with pytest.raises(ValueError, match=message):
        generate_outputs(target(), [], tmp_path / "x", **{"max_length": 128, **values})
