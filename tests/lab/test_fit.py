"""Fitting from recorded outputs, as a function and from the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hspark.cli import main as command
from hspark.drafters import NgramDrafter
from hspark.lab.fit import fit_outputs, main
from hspark.lab.outputs import RecordedOutput
from hspark.policy.estimator import AcceptanceEstimator
from tests.cli.output import error_of


def copying_outputs(count: int, seed: int = 5) -> list[RecordedOutput]:
    """Answers that copy the prompt and, one time in ten, go on somewhere else in it."""
    rng = random.Random(seed)
    outputs = []
    for _ in range(count):
        prompt = [rng.randrange(200) for _ in range(60)]
        at, answer = 0, []
        for _ in range(80):
            at = rng.randrange(60) if rng.random() < 0.1 else (at + 1) % 60
            answer.append(prompt[at])
        outputs.append(RecordedOutput(tuple(prompt), tuple(answer), 0.0, "copy"))
    return outputs


@pytest.fixture(scope="module")
def outputs() -> list[RecordedOutput]:
    return copying_outputs(40)


def write(path: Path, outputs: list[RecordedOutput]) -> str:
    lines = [
        {"prompt_token_ids": o.prompt_token_ids, "output_token_ids": o.output_token_ids, "temperature": o.temperature}
        for o in outputs
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def test_one_shared_intercept_is_the_accepted_share(outputs: list[RecordedOutput]) -> None:
    """Rung 1 has a closed form, accepted over graded positions, and so is calibrated on its own data."""
    report = fit_outputs(outputs, level=1, holdout=0.0)
    share = report.fitted.accepted_positions / report.fitted.graded_positions
    assert [row.estimated for row in report.reliability] == pytest.approx([share], abs=1e-5)
    assert [row.positions for row in report.reliability] == [report.fitted.graded_positions]
    assert report.scores[0].calibration_error == pytest.approx(0.0, abs=1e-5)
    # Copies break one time in ten.
    assert share == pytest.approx(0.9, abs=0.03)
    assert (report.scored_on, report.held_out) == ("fitted", None)


def test_held_out_scores_and_ladder(outputs: list[RecordedOutput]) -> None:
    done: list[int] = []
    report = fit_outputs(outputs, ladder=True, provenance={"target": "tiny"}, progress=done.append)
    assert report.held_out is not None
    assert (report.fitted.prompts, report.held_out.prompts) == (32, 8)
    assert sum(done) == report.fitted.output_tokens + report.held_out.output_tokens == 40 * 80
    names = [score.name for score in report.scores]
    assert names[0] == "this fit"
    assert len([name for name in names if name.startswith("ladder")]) == 5
    assert "qwen3-4b" in names
    assert sum(row.positions for row in report.reliability) == report.held_out.graded_positions
    binned = sum(row.positions * abs(row.accepted - row.estimated) for row in report.reliability)
    assert binned / report.held_out.graded_positions == pytest.approx(report.scores[0].calibration_error)
    kept = report.estimator.provenance
    assert (kept["target"], kept["visit"], kept["periodic"], kept["level"]) == ("tiny", "positions", True, 6)
    assert kept["held_out"]["log_loss_per_step"] == report.scores[0].log_loss_per_step


def test_own_fit_beats_every_preset_on_its_own_data(outputs: list[RecordedOutput]) -> None:
    own, *others = fit_outputs(outputs, holdout=0.0).scores
    assert others
    assert all(own.log_loss_per_step < other.log_loss_per_step for other in others)


def test_fit_is_for_the_limits_of_the_drafter(outputs: list[RecordedOutput]) -> None:
    drafter = NgramDrafter(length=4, min_match=3, max_match=8, copy_cap=20)
    report = fit_outputs(outputs, drafter, holdout=0.0)
    fitted = report.estimator
    assert (fitted.min_match, fitted.max_match, fitted.copy_cap, fitted.width) == (3, 8, 20, 4)
    assert [score.name for score in report.scores] == ["this fit"]
    assert NgramDrafter(fitted, length=4, min_match=3, max_match=8, copy_cap=20).estimator is not None


def test_command_prints_json_and_saves(
    tmp_path: Path, outputs: list[RecordedOutput], capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = RecordedOutput((1, 2, 3), (4, 5, 6), temperature=1.0)
    path = write(tmp_path / "outputs.jsonl", [*outputs, sampled])
    saved = str(tmp_path / "estimator.json")
    assert main([path, "--target", "tiny", "--visit", "steps", "--save", saved, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sampled_outputs_left_out"] == 1
    assert report["fitted"]["outputs"] + report["held_out"]["outputs"] == 40
    loaded = AcceptanceEstimator.load(saved)
    assert loaded.to_record() == report["estimator"]
    assert loaded.provenance["visit"] == "steps"
    assert NgramDrafter(loaded).width == 15


def test_command_prints_a_table(
    tmp_path: Path, outputs: list[RecordedOutput], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path / "outputs.jsonl", outputs), "--level", "2"]) == 0
    printed = capsys.readouterr().out
    assert "held out: 8 outputs, 640 tokens" in printed
    assert "this fit" in printed
    assert "qwen3-4b" in printed
    assert "beta" in printed


def test_all_temperatures_uses_sampled_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = [RecordedOutput(o.prompt_token_ids, o.output_token_ids, 1.0) for o in copying_outputs(10)]
    path = write(tmp_path / "outputs.jsonl", hot)
    assert main([path, "--all-temperatures", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampled_outputs_left_out"] == 0
    assert command(["fit", path]) == 2
    assert "holds sampled outputs only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none.jsonl"], "outputs='none.jsonl' is not a file"),
        (["{outputs}", "--holdout", "1"], "holdout=1.0 is out of range"),
        (["{outputs}", "--min-match", "0"], "min_match=0 is not usable"),
        (["{outputs}", "--level", "7"], "invalid choice: 7"),
        (["{outputs}", "--device", "abacus"], "device='abacus'"),
        (["{outputs}", "--save", "/dev/null/e.json"], "save='/dev/null/e.json' cannot be written"),
        (["{outputs}", "--min-match", "14"], "replay more outputs"),
    ],
)
def test_mistakes_exit_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    path = write(tmp_path / "outputs.jsonl", [RecordedOutput((1, 2, 3), (1, 2, 3), 0.0)])
    assert complaint in error_of(["fit", *(argument.format(outputs=path) for argument in arguments)], capsys)


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "hspark fit outputs.jsonl --tokenizer smollm2-135m --save estimator.json" in capsys.readouterr().out


def test_the_default_target_has_its_own_fit() -> None:
    """By every name under which it is loaded, and with the held-out scores beside the coefficients."""
    own = AcceptanceEstimator.preset("smollm2-135m")
    for name in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "weights/SmolLM2-135M-Instruct.Q4_1.gguf"):
        found, note = AcceptanceEstimator.for_target(name)
        assert found.coefficients == own.coefficients
        assert "hspark fit" in note
    held_out = own.provenance["held_out_matches_of_5_or_more"]  # the ones that the published fit knows
    assert held_out["calibration_error"] < held_out["qwen3_4b_calibration_error"]
    assert held_out["log_loss_per_step"] < held_out["qwen3_4b_log_loss_per_step"]
    assert own.provenance["held_out_along_steps"]["calibration_error"] <= 0.03
    drafter = NgramDrafter(own)
    assert drafter.min_match == own.min_match == 1
    assert drafter.periodic is own.provenance["periodic"]
