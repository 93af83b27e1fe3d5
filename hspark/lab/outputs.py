"""Recorded outputs of a target: what replay, fitting and training read, one JSON object a line."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Token ids of a prompt text, chat template included.
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class RecordedOutput:
    """One prompt and what the target answered, as token ids; the end-of-sequence token, if reached, is the last.

    temperature: the one it was generated at, None if not recorded. task_id: a name for it, may be empty.
    """

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    temperature: float | None = None
    task_id: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids=() is empty; a recorded output needs a prompt of at least one token")


def read_outputs(path: str | Path, tokenize: Tokenize | None = None) -> list[RecordedOutput]:
    """Reads JSON lines (plain or .gz) with `output_token_ids` and either `prompt_token_ids` or `prompt`.

    A `prompt` is text and goes through `tokenize`. `temperature` and `task_id` are read where present, further fields
    are passed over. ValueError, with the line's number, for a line that lacks a field or is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path={str(path)!r} is not a file; use a JSON-lines file of recorded outputs, plain or .gz")
    outputs = [_parse(line, f"{path}, line {number}", tokenize) for number, line in read_lines(path)]
    if not outputs:
        raise ValueError(f"{path} holds no recorded output; use one JSON object a line")
    return outputs


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers from 1; a name that ends in .gz is unpacked.

    ValueError names a file that is damaged, cut short or not UTF-8; a byte-order mark at its beginning is passed over.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON lines: {error}") from error


def _parse(line: str, place: str, tokenize: Tokenize | None) -> RecordedOutput:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); use one JSON object a line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {type(record).__name__} instead of an object; use one JSON object a line")
    if "prompt_token_ids" in record:
        prompt = _ids(record, "prompt_token_ids", place)
    elif not isinstance(record.get("prompt"), str):
        raise ValueError(f"{place}: no prompt; use the field prompt_token_ids (a list) or prompt (a string)")
    elif tokenize is None:
        raise ValueError(f"{place}: prompt is text and there is no tokenizer; name one or give prompt_token_ids")
    else:
        prompt = tuple(tokenize(record["prompt"]))
    if not prompt:
        raise ValueError(f"{place}: the prompt is empty; use a prompt of at least one token")
    temperature = record.get("temperature")
    return RecordedOutput(
        prompt_token_ids=prompt,
        output_token_ids=_ids(record, "output_token_ids", place),
        temperature=None if temperature is None else float(temperature),
        task_id=str(record.get("task_id", "")),
    )


def _ids(record: dict[str, Any], name: str, place: str) -> tuple[int, ...]:
    ids = record.get(name)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError(f"{place}: {name} is {str(ids)[:40]}; use a list of token ids")
    return tuple(ids)


def check_ids(outputs: Sequence[RecordedOutput], vocabulary: int) -> None:
    """ValueError that names the first output with a token id of `vocabulary` or more."""
    for number, output in enumerate(outputs, start=1):
        highest = max(*output.prompt_token_ids, *output.output_token_ids, 0)
        if highest >= vocabulary:
            task = f" (task {output.task_id!r})" if output.task_id else ""
            raise ValueError(
                f"recorded output {number}{task} has the token id {highest}, and the target knows {vocabulary} tokens; "
                "use outputs of this target"
            )


def load_tokenize(name: str) -> Tokenize:
    """User message → prompt ids by the tokenizer of `name`: a short name, directory, .gguf file or hub id.

    The tokenizer's chat template is applied, with the generation prompt. ValueError where there is no tokenizer.
    """
    from hspark.models.fetch import KNOWN_MODELS, fetch
    from hspark.models.pretrained import load_tokenizer

    path = Path(name).expanduser()
    source: Path | str = path if path.exists() else name
    if name in KNOWN_MODELS:
        source = fetch(KNOWN_MODELS[name])
    tokenizer, problem = load_tokenizer(source)
    if tokenizer is None:
        raise ValueError(f"tokenizer={name!r}: {problem}; use a short name, a directory, a .gguf file or a hub id")
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer={name!r} has no chat template; give prompt_token_ids in the outputs file instead")

    def tokenize(prompt: str) -> list[int]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return tokenize


def split_by_prompt(
    outputs: Sequence[RecordedOutput], holdout: float = 0.2, seed: int = 0
) -> tuple[list[RecordedOutput], list[RecordedOutput]]:
    """(kept, held out): a `holdout` share of the distinct prompts, with every output of theirs, is held out.

    Which ones depends on the prompts and the seed alone, not on the order of `outputs`.
    """
    if not 0.0 <= holdout < 1.0:
        raise ValueError(f"holdout={holdout!r} is out of range; use a share from 0 up to, but not including, 1")

    def mark(output: RecordedOutput) -> bytes:
        return hashlib.sha256(f"{seed}:{output.prompt_token_ids}".encode()).digest()

    marks = [mark(output) for output in outputs]
    distinct = sorted(set(marks))
    out = set(distinct[: round(holdout * len(distinct))])
    return (
        [output for output, m in zip(outputs, marks, strict=True) if m not in out],
        [output for output, m in zip(outputs, marks, strict=True) if m in out],
    )
