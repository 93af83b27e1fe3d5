"""Workload files are read or refused by line and field; the built-in workload is reproducible and well-formed."""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.lab.builtin_workload import EDITS, QUESTIONS, builtin_workload, standard_functions
from hspark.lab.workloads import Sample, edit_messages, load_workload

EDIT = {"task_id": "e/1", "instruction": "Make it faster. ", "input": "def f():\n    pass\n", "output": "unused"}
CHAT = {"task_id": "c/1", "turns": ["Hello?", "And then?"]}
QUESTION = {"prompt": "Why?"}


def _write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def test_the_three_kinds_of_lines(tmp_path: Path) -> None:
    samples = load_workload(_write(tmp_path / "w.jsonl", EDIT, "", CHAT, QUESTION))
    prompt = (
        "Make it faster.\n\n```python\ndef f():\n    pass\n```\n\n"
        "Apply this change to the program above. Return the full edited program in a ```python code block."
    )
    assert samples == [
        Sample("e/1", [{"role": "user", "content": prompt}], EDIT["input"]),
        Sample("c/1", [{"role": "user", "content": "Hello?"}]),
        Sample("w/4", [{"role": "user", "content": "Why?"}]),
    ]


def test_limit_stops_early_and_compressed_files_work(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"Question {i}"}) + "\n" for i in range(5)) + "not JSON\n"
    path = tmp_path / "w.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    assert [s.task_id for s in load_workload(str(path), limit=3)] == ["w/1", "w/2", "w/3"]
    with pytest.raises(ValueError, match="line 6 is not valid JSON"):
        load_workload(path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "Edit."}, "line 2: field 'input' is missing"),
        ({"input": "x = 1"}, "line 2: field 'instruction' is missing"),
        ({"instruction": "", "input": "x = 1"}, "line 2: field 'instruction' is ''"),
        ({"instruction": "Edit.", "input": 3}, "line 2: field 'input' is 3"),
        ({"turns": []}, "line 2: field 'turns' is \\[\\]"),
        ({"turns": "Hello"}, "line 2: field 'turns' is 'Hello'"),
        ({"turns": [None]}, "line 2: field 'turns' is None"),
        ({"prompt": " "}, "line 2: field 'prompt' is ' '"),
        ({"prompt": "a", "task_id": 7}, "line 2: field 'task_id' is 7"),
        ({"question": "Why?"}, "line 2: none of the fields that make a request; it needs 'instruction' and 'input'"),
        ([1], "line 2 is not a JSON object"),
        (CHAT, "line 2: task_id 'c/1' occurs twice"),
        ("{", "line 2 is not valid JSON"),
    ],
)
def test_a_mistake_is_named_by_line_and_field(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_workload(_write(tmp_path / "w.jsonl", CHAT, record))


def test_missing_empty_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*none\.jsonl' does not exist"):
        load_workload(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no requests"):
        load_workload(_write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    for name in ("bad.jsonl", "bad.jsonl.gz"):
        with pytest.raises(ValueError, match="cannot be read as JSON lines"):
            load_workload(tmp_path / name)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3"])
def test_a_wrong_limit_is_refused(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="limit="):
        load_workload(_write(tmp_path / "w.jsonl", CHAT), limit=limit)


@given(program=st.text(alphabet="`a\n ", min_size=1))
def test_the_program_stays_inside_its_fence(program: str) -> None:
    """The closing fence is the first line after the opening one that begins with as many backticks."""
    (message,) = edit_messages("Edit.", program)
    body = message["content"].removeprefix("Edit.\n\n")
    fence = body[: len(body) - len(body.lstrip("`"))]
    inside = body.removeprefix(f"{fence}python\n").split(f"\n{fence}\n")[0]
    assert inside == program.strip("\n")


def test_the_builtin_workload_depends_on_the_seed_alone() -> None:
    assert builtin_workload(30, seed=1) == builtin_workload(30, seed=1)
    assert builtin_workload(30, seed=1)[:10] == builtin_workload(10, seed=1)
    assert builtin_workload(30, seed=1) != builtin_workload(30, seed=2)


def test_the_builtin_workload_is_the_same_in_another_process() -> None:
    """Sets are ordered by string hashes, which differ between processes; nothing may depend on that."""
    code = "from hspark.lab.builtin_workload import builtin_workload as b; print([s.messages for s in b(40, 5)])"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([s.messages for s in builtin_workload(40, 5)])


def test_the_mix() -> None:
    samples = builtin_workload(60, seed=3)
    assert len({s.task_id for s in samples}) == 60
    chats = [s for s in samples if s.reference_input is None]
    assert [samples.index(s) for s in chats] == list(range(3, 48, 4))
    assert sorted(s.messages[0]["content"] for s in chats) == sorted(QUESTIONS)
    assert all(s.reference_input is not None for s in builtin_workload(8, kind="edit"))
    assert all(s.reference_input is None for s in builtin_workload(8, kind="chat"))


def test_every_edit_is_of_a_parsable_function_of_5_to_40_lines_and_every_kind_occurs() -> None:
    samples = builtin_workload(200, kind="edit")
    for sample in samples:
        assert sample.reference_input is not None
        assert isinstance(ast.parse(sample.reference_input).body[0], ast.FunctionDef)
        assert 5 <= sample.reference_input.count("\n") <= 40
        assert sample.reference_input.strip("\n") in sample.messages[0]["content"]
    assert {s.task_id.split("-")[1] for s in samples} == {edit.__name__ for edit in EDITS}


def test_more_edits_than_functions_start_over() -> None:
    n = len(standard_functions()) + 5
    samples = builtin_workload(n, kind="edit")
    assert len({s.task_id for s in samples}) == n


@pytest.mark.parametrize(
    "arguments",
    [{"n": 0}, {"n": True}, {"n": 2.0}, {"seed": "x"}, {"kind": "poems"}, {"n": 13, "kind": "chat"}],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(arguments))}="):
        builtin_workload(**arguments)
