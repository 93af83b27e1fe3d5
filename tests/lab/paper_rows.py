"""Rows in the published layouts of the paper's workloads, and files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]
LONG = "x = 1\n" * 200


def write(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def changed(program: str, share: float) -> str:
    """The program with this share of its characters replaced by one that it does not hold."""
    count = round(share * len(program))
    return "#" * count + program[count:]


def blazedit(distance: float, code: str = LONG) -> Record:
    return {"code": code, "change_request": "Rename x.", "char_count": len(code), "norm_distance": distance}


def canitedit(number: int, after: str, before: str = LONG) -> Record:
    taxonomy = {"change_kind": "perfective", "libraries": [], "topic": "Math"}
    return {
        "id": number, "name": "n", "full_name": f"{number}_n", "before": before, "after": after, "tests": "",
        "instruction_descriptive": "Change it so.", "instruction_lazy": "change", "taxonomy": taxonomy,
    }  # fmt: skip


def editbench(number: int, code: str = LONG, selection: str | None = "x = 1", language: str = "python") -> Record:
    return {
        "problem_id": number, "pair_id": "p", "programming_language": language, "original_code": code,
        "highlighted_code": selection, "instruction": "Use y.", "python_version": "3.12", "test_code": "",
        "requirements": "", "cursor_position": None, "test_harness": {},
    }  # fmt: skip


def turns(number: int | str, text: str, category: str = "mixed") -> Record:
    return {"question_id": number, "category": category, "turns": [text, "And then?"]}
