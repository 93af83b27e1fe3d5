"""`hspark generate`: what the library gives, every option, and its mistakes in one line."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hspark import HybridSpeculator, SamplingParams
from hspark.cli import main
from hspark.generate import _parser, sampling_params
from hspark.policy import LinearCost
from tests.cli.output import CODE, error_of
from tests.saved_target import save_tiny_target
from tests.toy_tokenizer import decode


def generate(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    assert main(["generate", *arguments]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_stream_and_json_are_what_the_library_gives(
    tiny: str, common: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "the abc the abc the abc"
    options = [prompt, *common, "--max-new-tokens", "24", "--ignore-eos"]
    streamed, quiet = generate(options, capsys)
    record = json.loads(generate([*options, "--json", "--logprobs"], capsys)[0])
    speculator = HybridSpeculator.from_pretrained(
        tiny, dtype="float32", cost=LinearCost(1.0, 0.05), max_batch_size=1, progress=False
    )
    messages = [{"role": "user", "content": prompt}]
    expected = speculator.generate(messages, SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=True))[0]
    assert quiet == ""
    assert streamed in (expected.text, f"{expected.text}\n")
    assert record["token_ids"] == expected.token_ids
    assert record["text"] == expected.text
    assert record["sources"] == expected.sources
    assert record["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert record["metrics"]["steps"] == expected.metrics.steps < 24


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["abc"], "<user>abc<assistant>"),
        (["abc", "--raw"], "abc"),
        (["abc", "--system", "the"], "<system>the<user>abc<assistant>"),
        (["--file", "{file}"], "<user>from a file\n<assistant>"),
        ([], "<user>from a pipe<assistant>"),
        (["-"], "<user>from a pipe<assistant>"),
    ],
)
def test_where_prompts_come_from(
    arguments: list[str],
    expected: str,
    common: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    arguments = [argument.format(file=tmp_path / "prompt.txt") for argument in arguments]
    record = json.loads(generate([*arguments, *common, "--max-new-tokens", "1", "--json"], capsys)[0])
    assert decode(record["prompt_token_ids"]) == expected


def test_edit_asks_for_the_whole_program(common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text("abc = 1\n")
    options = ["Rename abc.", "--edit", str(tmp_path / "program.py"), *common, "--max-new-tokens", "1", "--json"]
    prompt = decode(json.loads(generate(options, capsys)[0])["prompt_token_ids"])
    assert prompt.startswith("<user>Rename abc.\n\n```python\nabc = 1\n```")


def test_target_without_a_template_continues_the_text(
    cost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save_tiny_target(tmp_path / "plain", chat=False))
    options = ["generate", "abc", "--model", path, "--cost", cost, "--max-new-tokens", "1"]
    assert main([*options, "--json"]) == 0
    assert decode(json.loads(capsys.readouterr().out)["prompt_token_ids"]) == "abc"
    assert "needs a chat template" in error_of([*options, "--system", "the"], capsys)


def test_colours_and_statistics_when_asked_for(common: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["the abc the abc the abc", *common, "--max-new-tokens", "24", "--ignore-eos"]
    plain, _ = generate(options, capsys)
    coloured, stats = generate([*options, "--color", "always", "--stats"], capsys)
    assert CODE.search(plain) is None
    assert CODE.search(coloured) is not None
    assert CODE.sub("", coloured) == plain
    assert re.match(r"24 tokens in \d+ steps, \d\.\d\d per step; [\d.]+ tokens/s after", stats)
    assert "by ngram" in stats
    assert "ended by length" in stats
    assert "no coefficients are known for tiny" in stats
    record, stats = generate([*options, "--json", "--stats"], capsys)
    assert json.loads(record)["text"]
    assert re.match(r"24 tokens in \d+ steps", stats)


def test_every_sampling_parameter_has_an_option() -> None:
    """Each field of SamplingParams, moved away from its default from the command line."""
    options = """--max-new-tokens 7 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1
    --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 4=-1.5 --logit-bias 5=2 --stop x --stop y
    --stop-token-id 8 --stop-token-id 9 --ignore-eos --seed 6 --logprobs --no-speculate"""
    params = sampling_params(_parser().parse_args(["prompt", *options.split()]))
    assert params == SamplingParams(
        max_new_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={4: -1.5, 5: 2.0},
        stop=("x", "y"),
        stop_token_ids=(8, 9),
        ignore_eos=True,
        seed=6,
        logprobs=True,
        speculate=False,
    )
    for field in fields(SamplingParams):
        assert getattr(params, field.name) != getattr(SamplingParams(), field.name), field.name
    assert sampling_params(_parser().parse_args(["prompt"])) == SamplingParams()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["x", "--temperature", "nan"], "temperature=nan is not a number"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens=0 is out of range"),
        (["x", "--max-new-tokens", "many"], "argument --max-new-tokens: invalid int value: 'many'"),
        (["x", "--top-p", "0"], "top_p=0.0 is out of range"),
        (["x", "--logit-bias", "4"], "logit_bias='4' is not usable; use ID=X"),
        (["x", "--stop", ""], "use non-empty strings"),
        (["x", "--logprobs"], "logprobs are part of the JSON result; add --json"),
        (["x", "--policy", "best"], "policy='best' is unknown; use one of 'proposed'"),
        (["x", "--policy", "model_only", "--drafter", "none"], "policy='model_only' needs a model drafter"),
        (["x", "--policy", "ngram_only", "--lookup", "none"], "policy='ngram_only' needs lookup='ngram'"),
        (["x", "--budget", "-3"], "budget=-3 is out of range"),
        (["x", "--budget", "some"], "budget='some' is unknown; use 'adaptive', 'all'"),
        (["x", "--verify", "trust"], "verify='trust' is not a verifier; use one of"),
        (["x", "--drafting", "fast"], "drafting='fast' is unknown"),
        (["x", "--dtype", "int8"], "dtype='int8' is not supported; use 'auto'"),
        (["x", "--device", "abacus"], "device='abacus' is not a device"),
        (["x", "--estimator", "guess"], "estimator='guess' is neither a file nor a preset"),
        (["x", "--cost", "/no/such/file"], "cost file '/no/such/file' cannot be read"),
        (["x", "--drafter", "/no/such/drafter"], "/no/such/drafter"),
        (["x", "--model", "smolm2"], "model='smolm2' is unknown"),
        (["x", "--max-length", "1"], "max_length=1 is out of range"),
        (["x", "--budget-delay", "-1"], "budget_delay=-1 is out of range"),
        (["x", "--threads", "0"], "threads=0 is out of range"),
        (["x", "--raw", "--system", "y"], "raw uses no chat template"),
        (["x", "--file", "y"], "prompt='x' and file='y' are both given"),
        (["-", "--file", "y"], "prompt='-' and file='y' are both given"),
        (["--file", "/no/such/file"], "file='/no/such/file' cannot be read (No such file"),
        (["--file", sys.executable], "is not UTF-8"),
        (["x", "--edit", "/no/such/file"], "edit='/no/such/file' cannot be read (No such file"),
        (["x", "--drafter", "nothing"], "drafter='nothing' does not exist; use auto, none"),
        (["x", "--threads", "100000"], "threads=100000 is out of range"),
        (["  "], "prompt holds an empty prompt"),
        ([], "standard input holds an empty prompt"),
    ],
)
def test_mistakes_are_one_line_and_found_before_the_target_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded first")

    if "--model" not in arguments:
        monkeypatch.setattr("hspark.speculator.load_target", refuse)
    assert message in error_of(["generate", *arguments], capsys)


def test_prompt_is_asked_for_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO("never read")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "prompt is missing; give it as an argument" in error_of(["generate"], capsys)


def test_prompt_longer_than_the_rows_is_refused(common: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(["generate", "x" * 40, *common, "--max-length", "32"], capsys)
    assert "leaves no room in max_length=32" in message


def test_interrupted_stream_keeps_what_it_has(
    common: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = HybridSpeculator.stream

    def interrupted(self: HybridSpeculator, *arguments: Any) -> Iterator[Any]:
        chunks = stream(self, *arguments)
        yield from (next(chunks) for _ in range(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(HybridSpeculator, "stream", interrupted)
    assert main(["generate", "abc", *common, "--ignore-eos"]) == 130
    out, err = capsys.readouterr()
    assert len(out) >= 2
    assert err == "\nhspark: interrupted\n"
