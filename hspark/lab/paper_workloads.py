"""The workloads of the paper (section 5.1, Table 4, section P) with its filters, from the published data sets.

    workload = load_paper_workload("canitedit", "CanItEdit/data/test-00000-of-00001.parquet")
    print(workload.report)

The layouts were checked against public sources (2026): the data cards of vdaita/edit_10k_char, nuprl/CanItEdit and
nvidia/SPEED-Bench, the EDIT-Bench evaluation harness, and benchmark clients that read likaixin/InstructCoder and
philschmid/mt-bench. NextCoder's columns ("prompt", "completion") are known from programs that use the set, not from a
card. Where a copy names its columns otherwise, say so with `fields`.

The paper gives the data and the filters, not the wording of its prompts. Edits are asked here with `edit_messages`;
NextCoder's prompts and the chat sets are sent as published. Nor does it say which of CanItEdit's two instructions it
uses (here the descriptive one; `fields={"instruction": "instruction_lazy"}` for the other), or which 4,000 and 3,200
rows of NextCoder and InstructCoder (here the first ones that pass).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hspark.lab.editing import (
    BUCKET_PERCENT,
    bucket,
    bucket_name,
    longest_code_block,
    normalised_distance,
    output_distance,
)
from hspark.lab.workload_rows import Row, hub_rows, read_rows
from hspark.lab.workload_specs import PAPER_WORKLOADS, WorkloadSpec
from hspark.lab.workloads import Messages, Sample, edit_messages

# How many tokens a text has, without special tokens.
TokenLength = Callable[[str], int]

_TEXTS = ("instruction", "input", "output", "prompt", "selection", "language")
# SPEED-Bench leaves out texts that it may not pass on; its own script puts them back.
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class FilterReport:
    """What a filter kept. read: rows looked at. kept: samples. dropped: how many for each reason.

    notes: filters of the paper that wait for the target's outputs or a token count, one sentence each.
    """

    read: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        reasons = [f"{count} dropped: {reason}" for reason, count in self.dropped.items()]
        return "; ".join([f"{self.kept} of {self.read} kept", *reasons, *self.notes])


@dataclass(frozen=True)
class PaperWorkload:
    """A workload of the paper, filtered. `by_group` tells its parts (buckets or categories) in order."""

    spec: WorkloadSpec
    samples: list[Sample]
    report: FilterReport

    def by_group(self) -> dict[str, list[Sample]]:
        """The samples of each bucket or category, in order of first appearance; {} for a workload without parts."""
        groups: dict[str, list[Sample]] = {}
        for sample in self.samples:
            if sample.group is not None:
                groups.setdefault(sample.group, []).append(sample)
        return groups

    def output_limits(self, token_length: TokenLength, margin: float = 1.5, least: int = 256) -> list[int]:
        """The most new tokens of each sample: the paper's, or `margin` times the reference if it is per prompt.

        Table 4 says "per prompt" for CanItEdit and gives no rule; margin and least (tokens) are this project's.
        """
        limit = self.spec.max_new_tokens
        if limit is not None:
            return [limit] * len(self.samples)
        return [max(least, round(margin * token_length(sample.reference_output or ""))) for sample in self.samples]


def load_paper_workload(
    name: str,
    path: str | Path | None = None,
    *,
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
    token_length: TokenLength | None = None,
) -> PaperWorkload:
    """Reads workload `name` of `PAPER_WORKLOADS` and applies the filters that need no model.

    path: a file in the published layout (.jsonl, .jsonl.gz, .json; .parquet and .arrow with pyarrow) or a folder of
    them; None for the hub, through the `datasets` package. fields: other column names by role, see the spec's `fields`.
    limit: at most so many samples, the first that pass; None for as many as the paper took. token_length: how many
    tokens a text has; with it, prompts that alone are over the context limit are dropped here.

    Edit-distance buckets and the limit on prompt plus output need the target's own outputs: `bucket_workload`.
    ValueError names an unknown workload or role, a missing file, a missing field with its row, and an empty result.
    """
    if name not in PAPER_WORKLOADS:
        raise ValueError(f"name={name!r} is not a workload of the paper; use one of {', '.join(PAPER_WORKLOADS)}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(
            f"limit={limit!r} is out of range; use an integer of at least 1, or None for the paper's number"
        )
    spec = _with_fields(PAPER_WORKLOADS[name], fields or {})
    rows = hub_rows(spec.hub, spec.config, spec.split) if path is None else read_rows(path, spec.config, spec.split)
    samples, read, dropped = _collect(spec, rows, limit or spec.take, token_length)
    report = FilterReport(read, len(samples), dict(dropped), _waiting(spec, token_length))
    if not samples:
        raise ValueError(f"workload {name!r}: no sample is left; {report}")
    return PaperWorkload(spec, samples, report)


def bucket_workload(
    workload: PaperWorkload, outputs: Mapping[str, str], token_length: TokenLength | None = None
) -> PaperWorkload:
    """Puts each sample into its 5% bucket of edit distance and drops what the paper leaves out (section 5.1).

    outputs: by task_id, the target's own greedy output without speculation. The distance is the normalised Levenshtein
    distance between the program and the output's longest code block. Dropped: more context (prompt plus output) than
    the spec allows, if `token_length` is given; distances beyond Table 4's range; buckets with fewer samples than the
    spec asks. Samples come back sorted by bucket, `group` set to its name, e.g. "15-20%".
    """
    spec = workload.spec
    if spec.max_bucket is None:
        names = [name for name, other in PAPER_WORKLOADS.items() if other.max_bucket is not None]
        raise ValueError(f"workload {spec.name!r} has no edit-distance buckets in the paper; {', '.join(names)} have")
    missing = [sample.task_id for sample in workload.samples if sample.task_id not in outputs]
    if missing:
        raise ValueError(
            f"outputs lacks {len(missing)} of the samples, first {missing[0]!r}; give one for each task_id"
        )
    dropped: Counter[str] = Counter(workload.report.dropped)
    buckets: dict[int, list[Sample]] = {}
    for sample in workload.samples:
        output = outputs[sample.task_id]
        edge = bucket(output_distance(sample.reference_input or "", output))
        if _too_long(spec, sample, output, token_length):
            dropped[_context_reason(spec)] += 1
        elif edge >= spec.max_bucket:
            dropped[f"edit distance of {spec.max_bucket}% or more"] += 1
        else:
            buckets.setdefault(edge, []).append(replace(sample, group=bucket_name(edge)))
    kept: list[Sample] = []
    for _, samples in sorted(buckets.items()):
        if len(samples) < spec.min_bucket_samples:
            dropped[f"in a {BUCKET_PERCENT}% bucket of fewer than {spec.min_bucket_samples}"] += len(samples)
        else:
            kept += samples
    notes = () if token_length is not None else _context_note(spec)
    report = FilterReport(workload.report.read, len(kept), dict(dropped), notes)
    if not kept:
        raise ValueError(f"workload {spec.name!r}: no bucket is left; {report}")
    return PaperWorkload(spec, kept, report)


class _Drop(Exception):
    """Why a row is not a sample."""


def _collect(
    spec: WorkloadSpec, rows: Iterator[Row], limit: int | None, token_length: TokenLength | None
) -> tuple[list[Sample], int, Counter[str]]:
    samples: dict[str, Sample] = {}
    prompts: set[str] = set()
    dropped: Counter[str] = Counter()
    read = 0
    for read, (where, row) in enumerate(rows, 1):
        try:
            sample = _sample(spec, row, where, read)
            text = sample.messages[0]["content"]
            if _too_long(spec, sample, "", token_length):
                raise _Drop(_context_reason(spec))
            if spec.distinct and text in prompts:
                raise _Drop("prompt repeated")
        except _Drop as reason:
            dropped[str(reason)] += 1
            continue
        prompts.add(text)
        if sample.task_id in samples:
            sample = replace(sample, task_id=f"{sample.task_id}@{read}")
        samples[sample.task_id] = sample
        if len(samples) == limit:
            break
    return list(samples.values()), read, dropped


def _sample(spec: WorkloadSpec, row: Mapping[str, Any], where: str, number: int) -> Sample:
    """The row as a sample, or _Drop if a filter takes it out; ValueError for a row in another layout."""
    values = {role: _value(row, column, role, where) for role, column in spec.fields.items()}
    task_id = f"{spec.name}/{values.get('id', number)}"
    if spec.kind == "chat":
        return Sample(task_id, _first_turn(values["turns"], spec.fields["turns"], where), group=str(values["group"]))
    # EditBench has a selection only where the user made one.
    values = {role: "" if role == "selection" and value is None else value for role, value in values.items()}
    texts = {role: _text(value, spec.fields[role], where) for role, value in values.items() if role in _TEXTS}
    if spec.kind == "prompt":
        program = longest_code_block(texts["prompt"])
        if program is None:
            raise _Drop("no code block in the prompt")
        messages: Messages = [{"role": "user", "content": texts["prompt"]}]
    else:
        program = texts["input"]
        if not program.strip() or not texts["instruction"].strip():
            raise _Drop("empty instruction or program")
        messages = _edit(texts)
    if spec.min_input_chars is not None and len(program) <= spec.min_input_chars:
        raise _Drop(f"program of {spec.min_input_chars:,} characters or fewer")
    if spec.reference_distance is not None:
        _check_distance(spec, values, program, where)
    return Sample(task_id, messages, program, texts.get("output"))


def _edit(texts: Mapping[str, str]) -> Messages:
    instruction, selection = texts["instruction"], texts.get("selection", "")
    # EditBench's "javascript/react" is no name that a fence knows.
    language = texts.get("language", "python").split("/")[0]
    if selection.strip():
        fence = "```"
        while fence in selection:
            fence += "`"
        instruction += f"\n\nThis part was selected for the change:\n{fence}{language}\n{selection}\n{fence}"
    return edit_messages(instruction, texts["input"], language)


def _check_distance(spec: WorkloadSpec, values: Mapping[str, Any], program: str, where: str) -> None:
    low, high = spec.reference_distance or (0.0, 1.0)
    if "distance" in values:
        distance = values["distance"]
        if isinstance(distance, bool) or not isinstance(distance, int | float):
            raise ValueError(f"{where}: field {spec.fields['distance']!r} is {distance!r}; it must be a number")
    else:
        distance = normalised_distance(program, values["output"])
    if not low <= distance <= high:
        raise _Drop(f"reference edit distance outside {low:.0%} to {high:.0%}")


def _first_turn(turns: Any, column: str, where: str) -> Messages:
    """The paper asks first turns only (section 5.1); a list of strings, or of {"role", "content"} messages."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else turns
    text = first.get("content") if isinstance(first, Mapping) else first
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: field {column!r} is {turns!r}; it must be a list that begins with a text")
    if SPEED_BENCH_PLACEHOLDER in text:
        raise _Drop("text left out of the published file (the data set's own script fetches it)")
    return [{"role": "user", "content": text}]


def _value(row: Mapping[str, Any], column: str, role: str, where: str) -> Any:
    if column not in row:
        raise ValueError(
            f"{where}: field {column!r} is missing (it has {', '.join(map(str, row)) or 'none'}); "
            f"if it has another name, pass fields={{{role!r}: NAME}}"
        )
    return row[column]


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {column!r} is {value!r}; it must be a text")
    return value


def _with_fields(spec: WorkloadSpec, fields: Mapping[str, str]) -> WorkloadSpec:
    for role, column in fields.items():
        if role not in spec.fields:
            raise ValueError(f"fields has the role {role!r}; {spec.name!r} has {', '.join(spec.fields)}")
        if not isinstance(column, str) or not column:
            raise ValueError(f"fields[{role!r}]={column!r} is not a column name")
    return replace(spec, fields=MappingProxyType({**spec.fields, **fields}))


def _too_long(spec: WorkloadSpec, sample: Sample, output: str, token_length: TokenLength | None) -> bool:
    if spec.max_context_tokens is None or token_length is None:
        return False
    prompt = sum(token_length(message["content"]) for message in sample.messages)
    return prompt + (token_length(output) if output else 0) > spec.max_context_tokens


def _context_reason(spec: WorkloadSpec) -> str:
    return f"more than {spec.max_context_tokens:,} tokens of context"


def _context_note(spec: WorkloadSpec) -> tuple[str, ...]:
    if spec.max_context_tokens is None:
        return ()
    return (f"the limit of {spec.max_context_tokens:,} tokens of context was not applied: it needs token_length",)


def _waiting(spec: WorkloadSpec, token_length: TokenLength | None) -> tuple[str, ...]:
    notes = _context_note(spec) if token_length is None else ()
    if spec.max_bucket is None:
        return notes
    return (*notes, "buckets wait for the target's outputs (bucket_workload)")
