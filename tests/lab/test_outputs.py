"""Reading recorded outputs, and splitting them by prompt."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hspark.lab.outputs import RecordedOutput, check_ids, read_outputs, split_by_prompt


def test_reads_ids_and_text_plain_and_compressed(tmp_path: Path) -> None:
    lines = [
        json.dumps({"prompt_token_ids": [1, 2], "output_token_ids": [3], "temperature": 1, "task_id": "a/1"}),
        "",
        json.dumps({"prompt": "abc", "output_token_ids": [], "other": None}),
    ]
    expected = [RecordedOutput((1, 2), (3,), 1.0, "a/1"), RecordedOutput((97, 98, 99), (), None, "")]
    plain = tmp_path / "outputs.jsonl"
    plain.write_text("\n".join(lines), encoding="utf-8")
    packed = tmp_path / "outputs.jsonl.gz"
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    for path in (plain, packed):
        assert read_outputs(path, tokenize=lambda text: [ord(c) for c in text]) == expected


def test_byte_order_marks_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text('{"prompt_token_ids": [1], "output_token_ids": [2]}', encoding="utf-8-sig")
    assert read_outputs(path) == [RecordedOutput((1,), (2,))]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    line = b'{"prompt_token_ids": [1], "output_token_ids": [1]}\n' * 50
    packed = gzip.compress(line)
    for name, data in (("cut.gz", packed[:-12]), ("other.gz", line), ("latin.jsonl", line + b"\xe9\n")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name} cannot be read as JSON lines"):
            read_outputs(tmp_path / name)


def test_ids_that_the_target_does_not_have_are_named() -> None:
    outputs = [RecordedOutput((1, 2), ()), RecordedOutput((3,), (9, 4), task_id="b")]
    check_ids(outputs, 10)
    with pytest.raises(ValueError, match=r"recorded output 2 \(task 'b'\) has the token id 9, and the target knows 9"):
        check_ids(outputs, 9)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: list instead of an object"),
        ('{"output_token_ids": [1]}', "line 2: no prompt"),
        ('{"prompt": "a", "output_token_ids": [1]}', "line 2: prompt is text"),
        ('{"prompt_token_ids": [], "output_token_ids": [1]}', "line 2: the prompt is empty"),
        ('{"prompt_token_ids": [1]}', "line 2: output_token_ids is None"),
        ('{"prompt_token_ids": [1], "output_token_ids": [1, -1]}', "line 2: output_token_ids is"),
        ('{"prompt_token_ids": [1], "output_token_ids": [2147483648]}', "line 2: output_token_ids is"),
        ('{"prompt_token_ids": [1.5], "output_token_ids": [1]}', "line 2: prompt_token_ids is"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text('{"prompt_token_ids": [1], "output_token_ids": [1]}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        read_outputs(path)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a file"):
        read_outputs(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no recorded output"):
        read_outputs(empty)


def test_split_keeps_prompts_together_and_ignores_order() -> None:
    outputs = [RecordedOutput((prompt,), (sample,)) for prompt in range(50) for sample in range(3)]
    kept, held = split_by_prompt(outputs, holdout=0.2, seed=3)
    assert (len(kept), len(held)) == (120, 30)
    assert not {o.prompt_token_ids for o in kept} & {o.prompt_token_ids for o in held}
    again_kept, again_held = split_by_prompt(outputs[::-1], holdout=0.2, seed=3)
    assert (set(again_kept), set(again_held)) == (set(kept), set(held))
    assert set(split_by_prompt(outputs, holdout=0.2, seed=4)[1]) != set(held)
    assert split_by_prompt(outputs, holdout=0.0) == (outputs, [])


@pytest.mark.parametrize("holdout", [-0.1, 1.0])
def test_bad_holdout_is_named(holdout: float) -> None:
    with pytest.raises(ValueError, match="holdout="):
        split_by_prompt([], holdout=holdout)
