"""The clocks of the overhead: every second is booked once, nothing about the engine changes, nothing is chosen."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

import hspark.step
from hspark import HybridSpeculator, SamplingParams
from hspark.cli import main
from hspark.core import Chain
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.lab.floor import linear_layers, linear_seconds
from hspark.lab.overhead import PARTS, NeverChoose, Stopwatch, measure_shares, timed_parts
from hspark.lab.overhead_command import fill
from hspark.policy import LinearCost, policy, policy_names
from hspark.policy.merging import widen
from tests.saved_target import save_tiny_target
from tests.strategies import chain_pairs
from tests.tiny import tiny_llama

COST = LinearCost(1.0, 0.05)


def ticking() -> Any:
    ticks = itertools.count()
    return lambda: float(next(ticks))


def speculator(rows: int = 2, rule: Any = "proposed") -> HybridSpeculator:
    return HybridSpeculator(
        tiny_llama(),
        drafter=CausalLMDrafter(tiny_llama(), length=3),
        policy=rule,
        cost=COST,
        max_batch_size=rows,
        max_length=400,
    )


def test_stopwatch_books_inner_calls_once() -> None:
    clock = ticking()
    watch = Stopwatch(clock)
    inner = watch.wrap("inner", clock)  # a look at the clock before, in and after: 2 seconds
    assert watch.wrap("outer", lambda: [inner(), inner(), clock()])()
    assert watch.take() == {"inner": 4.0, "outer": 4.0}
    assert watch.take() == {}

    def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        watch.wrap("outer", watch.wrap("inner", fails))()
    assert watch.take() == {"inner": 1.0, "outer": 2.0}


@given(pair=chain_pairs())
def test_never_choosing_keeps_the_model_chain(pair: tuple[Chain, Chain]) -> None:
    model, free = pair
    chosen = NeverChoose()(model, free, 0.1)
    plain = policy("model_only")(model, free, 0.1)
    width = chosen.width
    for name in ("tokens", "length", "survival", "acceptance", "source"):
        expected = getattr(widen(plain, width, 1), name)
        inside = torch.arange(width) < plain.length[:, None]
        got = getattr(chosen, name)
        assert torch.equal(got, expected) if got.ndim == 1 else torch.equal(got[inside], expected[inside])


def test_never_choosing_runs_both_drafters_and_changes_no_text() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7] * 4
    params = SamplingParams(max_new_tokens=20)
    outputs = {}
    for name, rule in (("model_only", "model_only"), ("never", NeverChoose())):
        made = speculator(1, rule)
        (outputs[name],) = made.generate(prompt, params)
        assert len(made.engine.device_step.drafters) == (2 if name == "never" else 1)
    assert outputs["never"].token_ids == outputs["model_only"].token_ids
    assert outputs["never"].metrics.steps == outputs["model_only"].metrics.steps
    assert "ngram" not in outputs["never"].metrics.drafters
    assert "never_choose" not in policy_names()


def test_timing_leaves_the_engine_as_it_was() -> None:
    made = speculator(1)
    engine, commit = made.engine, hspark.step.commit
    step = engine.device_step
    owners = (engine, step, step.target, step.model_drafter, step.free_drafter)
    before = [dict(vars(owner)) for owner in owners]
    with timed_parts(engine, Stopwatch()):
        assert hspark.step.commit is not commit
    for owner, names in zip(owners, before, strict=True):
        assert vars(owner).keys() == names.keys()
        assert all(vars(owner)[name] is value for name, value in names.items())
    assert hspark.step.commit is commit


def test_shares_cover_the_step() -> None:
    made = speculator()
    prompts = [[1, 2, 3, 4, 5, 6, 7] * 5, [9, 8, 7, 6, 5] * 6, [3] * 30]
    shares = measure_shares(made.engine, prompts, steps=5, steps_per_round=4, warmup=1, clock=ticking())
    assert (shares.steps, shares.batch_size) == (8, 2)
    assert [each.part for each in shares.parts] == list(PARTS)
    assert all(each.seconds > 0 for each in shares.parts)
    # The same calls in every step take the same ticks, so medians add up to the whole.
    assert sum(each.seconds for each in shares.parts) == pytest.approx(shares.seconds)
    assert sum(each.share for each in shares.parts) == pytest.approx(1.0)
    models = sum(each.share for each in shares.parts if each.part in ("target forward", "drafter forward"))
    assert shares.hybrid_share == pytest.approx(1.0 - models)
    assert shares.tokens >= 2.0
    assert shares.linear_seconds == 1.0
    assert 30 <= shares.context <= 70
    assert not made.engine.has_work
    made.engine.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_are_those_of_a_forward(dtype: torch.dtype) -> None:
    """Laid out anew or not, they hold every weight matrix of the model once; the embedding is no linear layer."""
    plain = tiny_llama().to(dtype)
    expected = sum(m.weight.numel() for m in plain.modules() if isinstance(m, torch.nn.Linear))
    assert sum(m.in_features * m.out_features for m in linear_layers(plain)) == expected
    made = HybridSpeculator(tiny_llama().to(dtype), policy="vanilla", max_length=64)
    layers = linear_layers(made.engine.target.model)
    assert sum(m.in_features * m.out_features for m in layers) == expected
    assert len(layers) == 4 * made.engine.target.config.num_hidden_layers + 1


def test_linear_layers_are_timed_together() -> None:
    ticks, waits = ticking(), [0]

    def wait() -> None:
        waits[0] += 1

    assert linear_seconds(tiny_llama(), 3, repeats=4, clock=ticks, synchronise=wait) == 1.0
    assert waits == [8]


def test_shares_need_an_idle_engine_and_room() -> None:
    made = speculator()
    with pytest.raises(ValueError, match=r"rows hold 400 tokens.*use rows of at least"):
        measure_shares(made.engine, [[1] * 300], steps=5)
    made.engine.submit([1, 2], SamplingParams())
    with pytest.raises(ValueError, match="engine is decoding"):
        measure_shares(made.engine, [[1] * 30], steps=5)


def test_prompts_are_filled_from_the_others() -> None:
    assert fill([[1, 2], [3]], 4) == [[2, 3, 1, 2], [3, 1, 2, 3]]
    assert fill([[1, 2, 3, 4, 5]], 2) == [[4, 5]]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    tiny = str(save_tiny_target(tmp_path / "tiny"))
    COST.save(tmp_path / "cost.json")
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt": "abc abc"}\n{"instruction": "Rename abc.", "input": "abc = 1"}\n')
    fixed = ["--model", tiny, "--dtype", "float32", "--cost", str(tmp_path / "cost.json"), "--max-new-tokens", "12"]
    return ["bench", "overhead", str(work), "--batch-size", "2", "--context", "64", "--steps", "4", *fixed]


def test_overhead_for_people(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--drafter", options[options.index("--model") + 1]]) == 0
    out = capsys.readouterr().out
    assert "one decode step: 2 rows" in out
    for part in PARTS:
        assert f"\n{part} " in out
    assert "all but the forwards of target and model drafter: " in out
    assert "of model_only's decoding speed" in out
    assert "texts: no difference from vanilla's first run in vanilla, model_only, never_choose (2 outputs each)" in out


def test_overhead_without_a_model_drafter(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--drafter", "none"]) == 0
    out = capsys.readouterr().out
    assert "never chosen: not measured, as there is no model drafter" in out
    assert "\nn-gram scan " in out
    assert main([*options, "--drafter", "none", "--policy", "vanilla"]) == 0
    out = capsys.readouterr().out
    assert "\nn-gram scan " not in out, "plain decoding scans nothing"
    assert "and 0.0 drafts verified" in out
    assert "the target's linear layers alone, on as many tokens: " in out


def test_overhead_for_programs(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, tiny = tmp_path / "o.json", options[options.index("--model") + 1]
    assert main([*options, "--drafter", tiny, "--json", "--output", str(output)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(output.read_text())
    arms = record["bench"]["batches"][0]["arms"]
    assert [arm["name"] for arm in arms] == ["vanilla", "model_only", "never_choose"]
    assert record["never_choose"] == arms[2]["decode_speedup"]
    assert arms[1]["steps"] == arms[2]["steps"], "the same budgets, so the same steps"
    assert record["bench"]["batches"][0]["baseline"] == "model_only"
    assert record["shares"]["steps"] >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "batch_size=0 is out of range"),
        (["--context", "0"], "context=0 is out of range"),
        (["--steps", "0"], "steps=0 is out of range"),
        (["--compile", "step"], "compile='step': the parts of a compiled step cannot be told apart"),
        (["--output", "/dev/null/report.json"], "output='/dev/null/report.json' cannot be written"),
        (["--limit", "0"], "limit=0 is out of range"),
        (["--policy", "model_only", "--drafter", "none"], "policy='model_only' needs a model drafter"),
        (["--context", "1900"], "context=1900 is too long for the model's 2048 positions"),
    ],
)
def test_overhead_refuses(
    arguments: list[str], message: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, *arguments, *(["--limit", "1"] if "--limit" not in arguments else [])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
