"""The paper's workloads read from files of the published layouts; every filter has a case on either side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hspark.lab.editing import normalised_distance
from hspark.lab.paper_workloads import (
    PAPER_WORKLOADS,
    SPEED_BENCH_PLACEHOLDER,
    PaperWorkload,
    bucket_workload,
    load_paper_workload,
)
from hspark.lab.workloads import edit_messages
from tests.lab.paper_rows import LONG, Record, blazedit, canitedit, changed, editbench, turns, write


def words(text: str) -> int:
    return len(text.split())


ROWS: dict[str, Record] = {
    "blazedit-5k": blazedit(0.1),
    "blazedit-10k": blazedit(0.1),
    "canitedit": canitedit(7, changed(LONG, 0.1)),
    "nextcoder": {"prompt": f"Fix this:\n```python\n{LONG}```", "completion": "```python\ny\n```"},
    "editbench": editbench(3),
    "instructcoder": {"instruction": "Use y.", "input": "x = 1", "output": "y = 1"},
    "mt-bench": turns(81, "Write a poem.", "writing"),
    "speed-bench-1k": turns("a1", "Sort these.", "low_entropy"),
    "speed-bench-2k": turns("a1", "Sort these.", "low_entropy"),
    "speed-bench-8k": turns("a1", "Sort these.", "low_entropy"),
}


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_every_layout_is_read_and_every_missing_field_named(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS[name]])
    workload = load_paper_workload(name, path)
    assert [sample.task_id.split("/")[0] for sample in workload.samples] == [name]
    assert (workload.report.read, workload.report.kept, workload.report.dropped) == (1, 1, {})
    for role, column in PAPER_WORKLOADS[name].fields.items():
        write(path, [{key: value for key, value in ROWS[name].items() if key != column}])
        with pytest.raises(ValueError, match=f"line 1: field '{column}' is missing .* pass fields={{'{role}': NAME}}"):
            load_paper_workload(name, path)


def test_edit_samples_hold_prompt_program_and_reference(tmp_path: Path) -> None:
    after = changed(LONG, 0.1)
    path = write(tmp_path / "rows.jsonl", [canitedit(7, after)])
    (sample,) = load_paper_workload("canitedit", path).samples
    assert sample.task_id == "canitedit/7"
    assert sample.messages == edit_messages("Change it so.", LONG)
    assert (sample.reference_input, sample.reference_output, sample.group) == (LONG, after, None)
    (lazy,) = load_paper_workload("canitedit", path, fields={"instruction": "instruction_lazy"}).samples
    assert lazy.messages == edit_messages("change", LONG)


def test_nextcoder_prompts_are_sent_as_published(tmp_path: Path) -> None:
    prompt = f"Fix:\n```python\n{LONG}```\nshort:\n```\nz\n```"
    rows = [{"prompt": prompt, "completion": "done"}, {"prompt": "no code" * 400, "completion": "done"}]
    workload = load_paper_workload("nextcoder", write(tmp_path / "rows.jsonl", rows))
    (sample,) = workload.samples
    assert sample.messages == [{"role": "user", "content": prompt}]
    assert sample.reference_input == LONG.rstrip("\n")
    assert workload.report.dropped == {"no code block in the prompt": 1}


def test_editbench_shows_the_selection_and_the_language(tmp_path: Path) -> None:
    rows = [editbench(1, language="javascript/react"), editbench(2, selection=None), editbench(3, selection="```js")]
    first, second, third = load_paper_workload("editbench", write(tmp_path / "rows.jsonl", rows)).samples
    text = first.messages[0]["content"]
    assert "selected for the change:\n```javascript\nx = 1\n```" in text
    assert f"```javascript\n{LONG}```" in text
    assert "selected" not in second.messages[0]["content"]
    assert "````python\n```js\n````" in third.messages[0]["content"]


@pytest.mark.parametrize("name", ["blazedit-5k", "blazedit-10k", "canitedit", "nextcoder", "editbench"])
def test_programs_must_be_longer_than_1000_characters(name: str, tmp_path: Path) -> None:
    def row(program: str) -> Record:
        make: dict[str, Callable[[], Record]] = {
            "canitedit": lambda: canitedit(len(program), changed(program, 0.1), program),
            "nextcoder": lambda: {"prompt": f"Fix:\n```\n{program}\n```", "completion": ""},
            "editbench": lambda: editbench(len(program), program),
        }
        return make.get(name, lambda: blazedit(0.1, program))()

    path = write(tmp_path / "rows.jsonl", [row("a" * 1000), row("a" * 1001)])
    workload = load_paper_workload(name, path)
    assert [len(sample.reference_input or "") for sample in workload.samples] == [1001]
    assert workload.report.dropped == {"program of 1,000 characters or fewer": 1}


def test_short_programs_stay_in_instructcoder(tmp_path: Path) -> None:
    empty = {"instruction": "Write a program.", "input": "", "output": "x"}
    workload = load_paper_workload("instructcoder", write(tmp_path / "rows.jsonl", [ROWS["instructcoder"], empty]))
    assert [sample.reference_input for sample in workload.samples] == ["x = 1"]
    assert workload.report.dropped == {"empty instruction or program": 1}


@pytest.mark.parametrize("name", ["blazedit-5k", "canitedit"])
def test_reference_edit_distance_from_5_to_25_percent(name: str, tmp_path: Path) -> None:
    program = "abcdefghij" * 200
    inside, outside = [0.05, 0.1, 0.25], [0.0, 0.0495, 0.2505, 0.8]
    rows = []
    for number, share in enumerate([*inside, *outside]):
        after = changed(program, share)
        assert normalised_distance(program, after) == pytest.approx(share)
        rows.append(blazedit(share, program) if name == "blazedit-5k" else canitedit(number, after, program))
    workload = load_paper_workload(name, write(tmp_path / "rows.jsonl", rows))
    assert [sample.task_id for sample in workload.samples] == [
        f"{name}/{n}" for n in ([1, 2, 3] if name == "blazedit-5k" else [0, 1, 2])
    ]
    assert workload.report.dropped == {"reference edit distance outside 5% to 25%": 4}
    assert str(workload.report) == "3 of 7 kept; 4 dropped: reference edit distance outside 5% to 25%"


def test_speed_bench_drops_placeholders_and_repeated_prompts(tmp_path: Path) -> None:
    rows = [
        turns("a", "Sort.", "low_entropy"),
        turns("b", "Sort.", "low_entropy"),
        turns("c", f"{SPEED_BENCH_PLACEHOLDER}", "mixed"),
        turns("a", "Tell a story.", "high_entropy"),
    ]
    workload = load_paper_workload("speed-bench-8k", write(tmp_path / "rows.jsonl", rows))
    assert [sample.task_id for sample in workload.samples] == ["speed-bench-8k/a", "speed-bench-8k/a@4"]
    assert list(workload.by_group()) == ["low_entropy", "high_entropy"]
    assert sum(workload.report.dropped.values()) == 2
    assert workload.report.dropped["prompt repeated"] == 1
    assert workload.output_limits(words) == [512, 512]


def test_mt_bench_asks_first_turns_and_keeps_repeated_ones(tmp_path: Path) -> None:
    rows = [turns(81, "Write."), turns(82, "Write."), {**turns(83, ""), "turns": [{"role": "user", "content": "Hi."}]}]
    samples = load_paper_workload("mt-bench", write(tmp_path / "rows.jsonl", rows)).samples
    assert [sample.messages for sample in samples] == [
        [{"role": "user", "content": t}] for t in ("Write.", "Write.", "Hi.")
    ]
    write(tmp_path / "rows.jsonl", [turns(81, " ")])
    with pytest.raises(ValueError, match="line 1: field 'turns' is"):
        load_paper_workload("mt-bench", tmp_path / "rows.jsonl")


@pytest.fixture
def edits(tmp_path: Path) -> Callable[[str, int], PaperWorkload]:
    def load(name: str, count: int) -> PaperWorkload:
        code = [f"{LONG}# {number:04}" for number in range(count)]
        rows = [editbench(i, text) for i, text in enumerate(code)]
        if name == "nextcoder":
            rows = [{"prompt": f"Fix:\n```\n{text}\n```", "completion": ""} for text in code]
        return load_paper_workload(name, write(tmp_path / "rows.jsonl", rows))

    return load


def outputs_at(workload: PaperWorkload, shares: list[float]) -> dict[str, str]:
    pairs = zip(workload.samples, shares, strict=True)
    return {s.task_id: f"Here:\n```python\n{changed(s.reference_input or '', share)}\n```" for s, share in pairs}


def test_buckets_of_five_percent_with_at_least_ten_samples(edits: Callable[[str, int], PaperWorkload]) -> None:
    workload = edits("nextcoder", 40)
    assert workload.report.notes == ("buckets wait for the target's outputs (bucket_workload)",)
    shares = [0.42] * 10 + [0.07] * 9 + [0.02] * 11 + [0.69] + [0.71] * 9
    result = bucket_workload(workload, outputs_at(workload, shares))
    assert {name: len(samples) for name, samples in result.by_group().items()} == {"0-5%": 11, "40-45%": 10}
    assert [sample.group for sample in result.samples] == ["0-5%"] * 11 + ["40-45%"] * 10
    assert result.report.dropped == {"edit distance of 70% or more": 9, "in a 5% bucket of fewer than 10": 10}
    assert (result.report.read, result.report.kept, result.report.notes) == (40, 21, ())


def test_editbench_context_is_prompt_plus_output(edits: Callable[[str, int], PaperWorkload]) -> None:
    workload = edits("editbench", 12)
    assert "not applied: it needs token_length" in str(workload.report)
    outputs = outputs_at(workload, [0.01] * 12)
    first = workload.samples[0]
    spare = 6000 - words(first.messages[0]["content"]) - words(outputs[first.task_id])
    outputs[first.task_id] += "\n" + " word" * spare
    assert bucket_workload(workload, outputs, words).report.kept == 12
    outputs[first.task_id] += " word"
    result = bucket_workload(workload, outputs, words)
    assert result.report.kept == 11
    assert result.report.dropped == {"more than 6,000 tokens of context": 1}
    assert bucket_workload(workload, outputs).report.kept == 12


def test_editbench_prompts_alone_over_the_context_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [editbench(1), editbench(2, "word " * 6001)])
    assert len(load_paper_workload("editbench", path).samples) == 2
    assert load_paper_workload("editbench", path, token_length=words).report.dropped == {
        "more than 6,000 tokens of context": 1
    }


def test_bucket_workload_refuses(edits: Callable[[str, int], PaperWorkload], tmp_path: Path) -> None:
    workload = edits("nextcoder", 3)
    with pytest.raises(ValueError, match="outputs lacks 3 of the samples, first 'nextcoder/1'"):
        bucket_workload(workload, {})
    with pytest.raises(ValueError, match="no bucket is left; 0 of 3 kept; 3 dropped: in a 5% bucket"):
        bucket_workload(workload, outputs_at(workload, [0.1, 0.2, 0.3]))
    chat = load_paper_workload("mt-bench", write(tmp_path / "chat.jsonl", [turns(1, "Hi.")]))
    with pytest.raises(ValueError, match="'mt-bench' has no edit-distance buckets in the paper; nextcoder, editbench"):
        bucket_workload(chat, {"mt-bench/1": ""})


def test_output_limits_are_the_papers_or_follow_the_reference(tmp_path: Path) -> None:
    limits = {name: spec.max_new_tokens for name, spec in PAPER_WORKLOADS.items()}
    assert (limits["blazedit-5k"], limits["nextcoder"], limits["editbench"]) == (4096, 4096, 4096)
    assert (limits["instructcoder"], limits["mt-bench"], limits["canitedit"]) == (200, 256, None)
    after = changed(LONG, 0.1)
    workload = load_paper_workload("canitedit", write(tmp_path / "rows.jsonl", [canitedit(1, after)]))
    assert workload.output_limits(words) == [round(1.5 * words(after))]
    assert workload.output_limits(words, margin=0.1) == [256]


def test_limit_takes_the_first_that_pass_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [blazedit(0.9), blazedit(0.1), blazedit(0.1)])
    path.write_text(path.read_text() + "not JSON\n")
    workload = load_paper_workload("blazedit-5k", path, limit=2)
    assert (workload.report.read, workload.report.kept) == (3, 2)
    with pytest.raises(ValueError, match="line 4 is not valid JSON"):
        load_paper_workload("blazedit-5k", path)
    assert PAPER_WORKLOADS["instructcoder"].take == 3200
    assert PAPER_WORKLOADS["nextcoder"].take == 4000


def test_instructcoder_takes_3200_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS["instructcoder"]] * 3203)
    assert load_paper_workload("instructcoder", path).report.kept == 3200
    assert load_paper_workload("instructcoder", path, limit=3202).report.kept == 3202


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "humaneval"}, "name='humaneval' is not a workload of the paper; use one of blazedit-5k, "),
        ({"limit": 0}, "limit=0 is out of range"),
        ({"limit": True}, "limit=True is out of range"),
        ({"fields": {"program": "code"}}, "fields has the role 'program'; 'mt-bench' has id, turns, group"),
        ({"fields": {"turns": ""}}, r"fields\['turns'\]='' is not a column name"),
        ({"path": "nowhere.jsonl"}, "path='nowhere.jsonl' does not exist"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [turns(1, "Hi.")])
    with pytest.raises(ValueError, match=message):
        load_paper_workload(**{"name": "mt-bench", "path": path, **arguments})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**blazedit(0.1), "code": 3}, "field 'code' is 3; it must be a text"),
        ({**blazedit(0.1), "norm_distance": "0.1"}, "field 'norm_distance' is '0.1'; it must be a number"),
        (blazedit(0.9), "no sample is left; 0 of 1 kept; 1 dropped: reference edit distance"),
    ],
)
def test_bad_rows_are_named(record: Record, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_paper_workload("blazedit-5k", write(tmp_path / "rows.jsonl", [record]))
