"""`hspark lab` end to end on a tiny pair on disk: record, studies, report; going on after a kill; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hspark.cli import main
from hspark.drafters.dspark_config import DSparkConfig
from hspark.lab import lab_record
from hspark.lab.lab_record import RecordSettings, record_file
from hspark.lab.study import STUDY_ORDER, load_studies
from hspark.lab.table import RecordTable
from hspark.policy import LinearCost
from tests.drafters.dspark_cases import random_model, save_model
from tests.drafters.test_dspark_end_to_end import COMMON
from tests.lab.made_table import made_table
from tests.saved_target import save_tiny_target
from tests.toy_tokenizer import TOY_VOCAB

PROGRAM = "def add(a, b):\n    return a + b\n"
TOKENS = 40
STUDY_OPTIONS = ["--batch-sizes", "2", "--row-steps", "40", "--orders", "2", "--resamples", "10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter, a cost file, and a workload of edits and a question."""
    path = tmp_path_factory.mktemp("lab")
    save_tiny_target(path / "target")
    config = {**COMMON, "vocab_size": TOY_VOCAB, "mask_token_id": TOY_VOCAB - 1, "num_target_layers": 3}
    save_model(random_model(DSparkConfig(**config), seed=3), path / "drafter")
    LinearCost(1.0, 0.05).save(path / "cost.json")
    edits = [{"task_id": f"edit/{n}", "instruction": f"Rename a to v{n}.", "input": PROGRAM} for n in range(4)]
    lines = [*edits, {"task_id": "chat/0", "prompt": "Why?"}]
    (path / "work.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[str]:
    target = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--dtype", "float32"]
    return [*target, "--device", "cpu", "--max-new-tokens", str(TOKENS), "--engine-cost", str(folder / "cost.json")]


@pytest.fixture(scope="module")
def table(folder: Path, pair: list[str]) -> str:
    assert main(["lab", "record", str(folder / "work.jsonl"), "--out", str(folder / "table"), *pair]) == 0
    return str(folder / "table")


def settings(folder: Path, **changes: Any) -> RecordSettings:
    common = {"target": str(folder / "target"), "drafter": str(folder / "drafter"), "dtype": "float32", "device": "cpu"}
    return RecordSettings(**{**common, "max_new_tokens": TOKENS, "cost": str(folder / "cost.json"), **changes})


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["lab", *arguments]) == 0
    return capsys.readouterr().out


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status: Any = main(["lab", *arguments])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


# -- the whole way ---------------------------------------------------------------------------------------------------


def test_record_studies_report(folder: Path, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    work, cost, out = str(folder / "work.jsonl"), str(folder / "cost.json"), str(folder / "studies")
    study = ["study", "all", "--table", table, "--workload", work, "--cost", cost, "--out", out, *STUDY_OPTIONS]
    shown = run([*study, "--json"], capsys)
    record = json.loads(shown)
    names = [each["name"] for each in record["studies"]]
    assert set(names) | set(record["left_out"]) == set(STUDY_ORDER)
    assert list(record["left_out"]) == ["never_choose", "against_engine"]
    assert [each.name for each in load_studies(out)] == names
    command = record["studies"][0]["command"]
    assert command == " ".join(["hspark lab study acceptance --table", table, "--workload", work, "--cost", cost, *STUDY_OPTIONS])  # fmt: skip  # noqa: E501
    page = folder / "page.html"
    assert str(page) in run(["report", "--studies", out, "--out", str(page), "--title", "A tiny pair"], capsys)
    text = page.read_text()
    assert "<h1>A tiny pair</h1>" in text
    for name in names:
        assert f'<section id="{name}">' in text
    assert "drafter (greedy)" in text
    about = json.loads(page.with_suffix(".json").read_text())["about"]
    assert (about["target"], about["outputs"], about["dtype"]) == ("target", 5, "float32")


def test_a_report_of_several_tables_says_which_study_is_of_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = str(tmp_path / "studies"), tmp_path / "new" / "page.html"
    for count, name in ((3, "acceptance"), (4, "estimator")):
        table = str(made_table(count).save(tmp_path / str(count)))
        run(["study", name, "--table", table, "--out", out, "--resamples", "5"], capsys)
    run(["report", "--studies", out, "--out", str(page)], capsys)
    about = json.loads(page.with_suffix(".json").read_text())["about"]
    assert about["target"] == "made"
    assert not {"outputs", "positions"} & set(about)
    head, *sections = page.read_text().split("<section")
    assert "<dt>outputs</dt>" not in head
    assert ["<dt>outputs</dt><dd>3</dd>" in text for text in sections] == [True, False]
    assert ["<dt>outputs</dt><dd>4</dd>" in text for text in sections] == [False, True]


def test_the_recorded_table(folder: Path, table: str) -> None:
    loaded = RecordTable.load(table)
    assert loaded.task_ids == ("edit/0", "edit/1", "edit/2", "edit/3", "chat/0")
    assert loaded.info["target"] == str(folder / "target")
    assert loaded.model_width == COMMON["block_size"]
    assert loaded.limit.tolist() == [TOKENS] * 5
    assert (loaded.output_length <= TOKENS).all()
    assert loaded.temperature.tolist() == [0.0] * 5
    assert (loaded.free_length > 0).any()


@pytest.mark.slow
def test_everything_at_once_is_the_same(folder: Path, pair: list[str], table: str, capsys: Any) -> None:
    out = folder / "whole"
    words = [str(folder / "work.jsonl"), "--out", str(out), *pair, "--cost", str(folder / "cost.json"), *STUDY_OPTIONS]
    shown = run(["all", *words], capsys)
    assert "left out never_choose: " in shown
    assert "Acceptance by position" in shown
    assert (out / "report.html").exists()
    assert RecordTable.load(out / "table").token.tolist() == RecordTable.load(table).token.tolist()
    [found] = [each for each in load_studies(out / "studies") if each.name == "ladder"]
    assert found.command.startswith(f"hspark lab study ladder --table {out / 'table'}")
    again = ["record", words[0], "--out", str(out / "table"), *pair, "--json"]
    assert json.loads(run(again, capsys))["outputs"] == 5  # nothing is generated twice


def test_one_study_shows_its_tables(folder: Path, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(["study", "acceptance", "--table", table, "--resamples", "10"], capsys)
    assert "Both drafters" in shown
    assert "n-gram drafter, given a match" in shown
    assert "saved to" not in shown


# -- recording -------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on(folder: Path, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_record, "_BATCHES_KEPT", 1)
    done: list[int] = []
    inner = lab_record.HybridSpeculator.generate

    def generate(self: Any, prompts: Any, params: Any) -> Any:
        done.append(len(prompts))
        if len(done) == 2:
            raise KeyboardInterrupt
        return inner(self, prompts, params)

    monkeypatch.setattr(lab_record.HybridSpeculator, "generate", generate)
    own = settings(folder, batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        record_file(folder / "work.jsonl", tmp_path, own)
    kept = (tmp_path / "outputs.jsonl").read_text()
    assert kept.count("\n") == 2
    (tmp_path / "outputs.jsonl").write_text(kept + '{"half": ')
    resumed = record_file(folder / "work.jsonl", tmp_path, own)
    assert done == [2, 2, 2, 1]
    whole = RecordTable.load(table)
    assert resumed.token.tolist() == whole.token.tolist()
    assert resumed.model_tokens.tolist() == whole.model_tokens.tolist()
    with pytest.raises(ValueError, match=r"out: .* holds outputs of other requests"):
        record_file(folder / "work.jsonl", tmp_path, settings(folder, max_new_tokens=9))


def test_recorded_outputs_need_no_answers(folder: Path, table: str, tmp_path: Path, capsys: Any) -> None:
    outputs = folder / "table" / "outputs.jsonl"
    sampled = json.loads(outputs.read_text().splitlines()[0]) | {"temperature": 1.0}
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(outputs.read_text() + json.dumps(sampled) + "\n")
    words = ["--target", str(folder / "target"), "--drafter", "none", "--dtype", "float32"]
    assert main(["lab", "record", str(mixed), "--out", str(tmp_path / "t"), *words, "--json"]) == 0
    told = capsys.readouterr()
    shown = json.loads(told.out)
    assert "left out 1 of 6 outputs, at another temperature than 0" in told.err
    again = RecordTable.load(tmp_path / "t")
    assert shown["outputs"] == 5
    assert again.model_width == 0
    assert again.token.tolist() == RecordTable.load(table).token.tolist()
    warm = record_file(mixed, tmp_path / "warm", settings(folder, drafter=None, max_new_tokens=None, temperature=1.0))
    assert warm.outputs == 1
    assert "max_new_tokens=3 with recorded outputs" in refused(["record", str(mixed), "--out", str(tmp_path / "u"), *words, "--max-new-tokens", "3"], capsys)  # fmt: skip  # noqa: E501
    for option, value in (("--seed", "3"), ("--batch-size", "2")):
        message = refused(["record", str(mixed), "--out", str(tmp_path / "u"), *words, option, value], capsys)
        assert f"={value} with recorded outputs" in message
    with pytest.raises(ValueError, match=r"holds no output at temperature=0\.5"):
        record_file(mixed, tmp_path / "v", settings(folder, drafter=None, max_new_tokens=None, temperature=0.5))


def test_sampled_answers_keep_their_seeds(folder: Path, tmp_path: Path) -> None:
    own = settings(folder, temperature=1.0, seed=7, max_new_tokens=12, limit=3, drafting="probabilistic")
    found = record_file(folder / "work.jsonl", tmp_path, own)
    assert found.seed.tolist() == [7, 8, 9]
    assert found.temperature.tolist() == [1.0] * 3
    assert found.info["drafter"]["drafting"] == "probabilistic"


# -- refusals --------------------------------------------------------------------------------------------------------


def test_mistakes_are_named_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab_record, "load_target", lambda *_: pytest.fail("a target was loaded"))
    table = str(made_table(3).save(tmp_path / "table"))
    work = str(folder / "work.jsonl")
    study = ["study", "policies", "--table", table]
    cases: list[tuple[list[str], str]] = [
        (["studies"], "command='studies' is unknown; use one of record, study, report, all"),
        (["study", "speed", "--table", table], "study='speed' is unknown; use all, or one of acceptance"),
        (["study", "ladder"], "--table"),
        (["study", "ladder", "--table", str(tmp_path)], "holds no record table"),
        ([*study, "--batch-sizes", "4,x"], "batch_sizes='4,x'"),
        ([*study, "--batch-sizes", "4,2"], "batch_sizes=(4, 2)"),
        ([*study, "--orders", "0"], "orders=0"),
        ([*study, "--sizing-delay", "-1"], "sizing_delay=-1"),
        ([*study, "--out", work], "out="),
        (["report", "--studies", str(tmp_path), "--out", "r.pdf"], "holds no study"),
        ([*study, "--cost", str(tmp_path / "no")], "cannot be read"),
        ([*study, "--estimator", "best"], "estimator='best' is neither a file nor a preset"),
        ([*study, "--train-table", str(tmp_path)], "train_table: "),
        ([*study, "--sampled-table", str(tmp_path)], "sampled_table: "),
        ([*study, "--overhead", work + "x"], "overhead="),
        ([*study, "--workload", work + "x"], "workload="),
        (["study", "edit_distance", "--table", table], "--workload"),
        (["report", "--studies", str(tmp_path / "none")], "does not exist"),
        (["record", work + "x", "--out", str(tmp_path / "a")], "file="),
        (["record", work, "--out", str(tmp_path / "a"), "--batch-size", "0"], "batch_size=0"),
        (["record", work, "--out", str(tmp_path / "a"), "--limit", "0"], "limit=0"),
        (["record", work, "--out", str(tmp_path / "a"), "--temperature", "-1"], "temperature=-1"),
        (["record", work, "--out", str(tmp_path / "a"), "--drafter", "nowhere"], "nowhere"),
        (
            ["record", work, "--out", str(tmp_path / "a"), "--drafter", str(folder / "target")],
            "is not a DSpark drafter",
        ),
        (["record", work, "--out", work], f"out={work!r} cannot be used"),
        (["record", work, "--out", str(tmp_path / "a"), "--engine-cost", "foo"], "engine_cost: cost file 'foo'"),
        (["all", work + "x", "--out", str(tmp_path / "a")], "file="),
        (["all", work, "--out", f"{work}/a"], "out="),
    ]
    for option, value, message in (
        ("--batch-sizes", "foo", "batch_sizes='foo'"),
        ("--row-steps", "0", "row_steps=0"),
        ("--orders", "0", "orders=0"),
        ("--resamples", "-1", "resamples=-1"),
        ("--sizing-delay", "-1", "sizing_delay=-1"),
        ("--engine-cost", "foo", "engine_cost: cost file 'foo'"),
        ("--train-table", "foo", "train_table: "),
        ("--sampled-table", "foo", "sampled_table: "),
        ("--overhead", "foo", "overhead='foo'"),
        ("--bench", "foo", "bench='foo'"),
        ("--cost", "foo", "cost file 'foo'"),
        ("--estimator", "foo", "estimator='foo'"),
        ("--drafter", "foo", "drafter='foo' does not exist"),
    ):
        cases.append((["all", work, "--out", str(tmp_path / "a"), option, value], message))
    for arguments, message in cases:
        assert message in refused(arguments, capsys), arguments
    assert not (tmp_path / "a").exists()


def test_text_needs_the_tables_tokenizer(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = made_table(3)
    directory = str(table.save(tmp_path / "table"))
    work = tmp_path / "work.jsonl"
    work.write_text(
        "".join(json.dumps({"task_id": n, "instruction": "x", "input": "y"}) + "\n" for n in table.task_ids)
    )
    words = [
        "study",
        "edit_distance",
        "--table",
        directory,
        "--workload",
        str(work),
        "--cost",
        str(folder / "cost.json"),
    ]
    assert "tokenizer='made'" in refused(words, capsys)
    shown = run([*words, "--tokenizer", str(folder / "target"), *STUDY_OPTIONS], capsys)
    assert "Speed-up by edit distance" in shown


@pytest.mark.parametrize("command", ["record", "study", "report", "all"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["lab", command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"\n  hspark lab {command}" in out
    assert "None" not in out
    assert main(["lab"]) == 0
    assert "hspark lab COMMAND --help" in capsys.readouterr().out
