"""Prompts to measure on: files of prompts, and a built-in set that needs no file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspark.lab.outputs import read_lines

Messages = list[dict[str, str]]

# The fixed wording of an edit request; `{fence}` is a run of backticks longer than any in the program.
EDIT_PROMPT = (
    "{instruction}\n\n{fence}{language}\n{program}\n{fence}\n\n"
    "Apply this change to the program above. Return the full edited program in a {fence}{language} code block."
)
_ACCEPTED = "'instruction' and 'input' (an edit), 'turns' (a conversation) or 'prompt' (a question)"


@dataclass(frozen=True)
class Sample:
    """One request of a workload.

    task_id: unique within the workload.
    messages: chat messages ({"role", "content"}) for the target's chat template.
    reference_input: the program that the request edits; None for other requests.
    reference_output: the answer that the workload's authors give; None if there is none.
    group: the part of the workload that it is counted under, e.g. an edit-distance bucket; None for no parts.
    """

    task_id: str
    messages: Messages
    reference_input: str | None = None
    reference_output: str | None = None
    group: str | None = None


def edit_messages(instruction: str, program: str, language: str = "python") -> Messages:
    """One user message: the instruction, the program in a fenced block, and the request for all of it, edited.

    language: the fence's info string.
    """
    fence = "```"
    while fence in program:
        fence += "`"
    parts = {"instruction": instruction.strip(), "program": program.strip("\n"), "fence": fence, "language": language}
    text = EDIT_PROMPT.format(**parts)
    return [{"role": "user", "content": text}]


def load_workload(path: str | Path, limit: int | None = None) -> list[Sample]:
    """Reads a workload file: one JSON object a line (.jsonl, or .jsonl.gz), in file order, at most `limit` of them.

    Each line is one of these; further fields are ignored, and lines of different kinds may be mixed:
    - {"instruction": str, "input": str}: an edit of the program `input` (`edit_messages`);
    - {"turns": [str, ...]}: a conversation, of which the first turn is asked, since later ones need earlier answers;
    - {"prompt": str}: a question.
    "task_id" (str) names the request; a line without one is named after the file and its line number.
    ValueError names a missing file, the line and field of a mistake, and a task_id that occurs twice.
    """
    path = Path(path)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit={limit!r} is out of range; use an integer of at least 1, or None for all")
    samples: dict[str, Sample] = {}
    if not path.is_file():
        raise ValueError(f"workload file {str(path)!r} does not exist; give a JSON-lines file (.jsonl or .jsonl.gz)")
    for number, line in read_lines(path):
        if limit is not None and len(samples) == limit:
            break
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not valid JSON: {error}") from error
        sample = _sample(record, where, default_id=f"{path.name.split('.')[0]}/{number}")
        if sample.task_id in samples:
            raise ValueError(f"{where}: task_id {sample.task_id!r} occurs twice; each needs its own")
        samples[sample.task_id] = sample
    if not samples:
        raise ValueError(f"{path} holds no requests; each line needs {_ACCEPTED}")
    return list(samples.values())


def _sample(record: Any, where: str, default_id: str) -> Sample:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object; it needs {_ACCEPTED}")
    task_id = _text(record, "task_id", where) if "task_id" in record else default_id
    if "instruction" in record or "input" in record:
        program = _text(record, "input", where)
        return Sample(task_id, edit_messages(_text(record, "instruction", where), program), program)
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{where}: field 'turns' is {turns!r}; it must be a list of at least one string")
        return Sample(task_id, [{"role": "user", "content": _text({"turns": turns[0]}, "turns", where)}])
    if "prompt" in record:
        return Sample(task_id, [{"role": "user", "content": _text(record, "prompt", where)}])
    raise ValueError(f"{where}: none of the fields that make a request; it needs {_ACCEPTED}")


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise ValueError(f"{where}: field {field!r} is missing")
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: field {field!r} is {value!r}; it must be a non-empty string")
    return value
