"""The benchmark measures what it says: right counts, fair order, one set of weights, every difference reported."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspark.lab.arms import PEERS
from hspark.lab.bench import encode_samples, make_groups, run_bench
from hspark.lab.bench_report import BenchReport
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.observer import Observer
from hspark.lab.runs import BenchPrompt, GroupRun
from hspark.lab.workloads import Sample
from tests.lab.bench_cases import COST, random_prompts, tiny_target
from tests.saved_target import load_tiny_target, save_tiny_target
from tests.tiny import plain_logits, tiny_llama
from tests.toy_tokenizer import toy_tokenizer


@pytest.fixture(scope="module")
def report() -> BenchReport:
    """Every kind of arm at two batch sizes, twice."""
    arms = ("vanilla", "ngram_only", "ngram_only:all", "ngram_only:2", *PEERS)
    settings = BenchSettings(arms=arms, batch_sizes=(1, 2), repeats=2, max_new_tokens=16, cost=COST)
    return run_bench(tiny_target(), random_prompts(4), settings, workload="random")


def test_every_arm_emits_the_plain_greedy_text(report: BenchReport) -> None:
    for batch in report.batches:
        assert batch.differences == []
        for arm in batch.arms:
            assert (arm.compared, arm.different, arm.errors) == (4, 0, [])
    model, target = tiny_llama(), tiny_target()
    settings = BenchSettings(max_new_tokens=6, cost=COST)
    seen: dict[str, list[list[int]]] = {}

    class Keep(Observer):
        def end(self, arm: str, run: GroupRun) -> None:
            seen.setdefault(arm, []).extend(run.token_ids)

    prompts = random_prompts(1)
    run_bench(target, prompts, settings, observer=Keep())
    text = list(prompts[0].token_ids)
    for _ in range(6):
        text.append(int(plain_logits(model, torch.tensor(text))[-1].argmax()))
    assert seen == {arm: [text[len(prompts[0].token_ids) :]] for arm in ("vanilla", "ngram_only")}


def test_counts_and_rates_add_up(report: BenchReport) -> None:
    for batch in report.batches:
        names = [arm.name for arm in batch.arms]
        assert names == [n for n in report.header["settings"]["arms"] if batch.batch_size == 1 or n not in PEERS]
        for arm in batch.arms:
            runs = [run for repeat in batch.runs["runs"][arm.name] for run in repeat]
            assert arm.requests == 8
            assert arm.tokens == 8 * 16 == sum(run["tokens"] for run in runs)
            assert arm.seconds == pytest.approx(sum(run["seconds"] for run in runs))
            assert arm.tokens_per_second == pytest.approx(arm.tokens / arm.seconds)
            assert 0 < arm.prefill_seconds < arm.seconds
            tokens = sum(run["decode_tokens"] for run in runs)
            assert arm.decode_tokens_per_second == pytest.approx(tokens / (arm.seconds - arm.prefill_seconds))
            assert len(arm.speedup_by_repeat) == 2
        vanilla = batch.arm("vanilla")
        assert (vanilla.speedup.value, vanilla.speedup.low, vanilla.speedup.high) == (1.0, 1.0, 1.0)
        assert set(vanilla.by_kind) == {"edit", "chat"}


def test_what_the_arms_spend(report: BenchReport) -> None:
    for batch in report.batches:
        vanilla = batch.arm("vanilla")
        assert vanilla.acceptance_length == 1.0
        assert (vanilla.slots_per_step, vanilla.mean_budget, vanilla.drafters) == (0.0, None, {})
        two, everything = batch.arm("ngram_only:2"), batch.arm("ngram_only:all")
        assert two.mean_budget == 2.0
        assert 0 < number(two.slots_per_step) <= 2.0
        assert everything.mean_budget == 15.0 * batch.batch_size
        assert everything.drafters["ngram"].drafted == everything.drafters["ngram"].verified
        assert two.drafters["ngram"].drafted > two.drafters["ngram"].verified
        for arm in batch.arms:
            if arm.name in PEERS:
                assert (arm.acceptance_length, arm.steps, arm.mean_running, arm.mean_price) == (None,) * 4
                continue
            length, running = number(arm.acceptance_length), number(arm.mean_running)
            assert length >= 1.0
            assert 1.0 <= running <= batch.batch_size
            assert length * running * number(arm.steps) == pytest.approx(arm.tokens)
            for drafter in arm.drafters.values():
                accepted = sum(
                    round(v * s)
                    for v, s in zip(drafter.verified_by_position, filled(drafter.survival_by_position), strict=True)
                )
                assert accepted == drafter.accepted <= sum(drafter.verified_by_position) == drafter.verified
                for acceptance, survival in zip(
                    drafter.acceptance_by_position, drafter.survival_by_position, strict=True
                ):
                    assert acceptance is None or (survival is not None and survival <= acceptance <= 1.0)
        # G(b*) is at least G(0) of one request, and at most what accepting every slot would give.
        most = 16.0 * batch.batch_size / (1.0 + 0.05 * 15 * batch.batch_size)
        assert 0.05 <= number(batch.arm("ngram_only").mean_price) <= 0.05 * most


def number(value: float | None) -> float:
    assert value is not None
    return value


def filled(values: Sequence[float | None]) -> list[float]:
    return [0.0 if value is None else value for value in values]


def test_report_is_json_and_names_its_circumstances(report: BenchReport) -> None:
    record = json.loads(json.dumps(report.to_dict()))
    header = record["header"]
    assert header["dtype"] == "float32"
    assert header["machine"]["threads"] == torch.get_num_threads()
    assert header["machine"]["versions"]["torch"] == torch.__version__
    assert header["workload"] == {
        "name": "random",
        "requests": 4,
        "kinds": {"edit": 2, "chat": 2},
        "prompt_tokens": 5 + 6 + 7 + 8,
    }
    assert header["notes"] == ["transformers' generate is measured at batch size 1 only"]
    # One cost for all arms that draft alike; none for vanilla.
    assert [(cost["batch_size"], cost["drafters"], cost["kind"]) for cost in header["costs"]] == [
        (1, ["ngram"], "linear"),
        (2, ["ngram"], "linear"),
    ]


def test_model_drafter_arms(tmp_path: Path) -> None:
    """The target drafts for itself, so every model draft is accepted; each arm has buffers of its own."""
    path = save_tiny_target(tmp_path / "tiny")
    target = load_tiny_target(path)
    samples = [Sample(f"s{i}", [{"role": "user", "content": text}]) for i, text in enumerate(("abc", "the the"))]
    arms = ("vanilla", "ngram_only", "model_only:all", "proposed:all", "proposed")
    settings = BenchSettings(arms=arms, batch_sizes=(1, 2), max_new_tokens=18, cost=COST, drafter=str(path))
    drafter = settings.open_drafter("float32", "cpu")
    report = run_bench(target, encode_samples(samples, target), settings, drafter=drafter)
    for batch in report.batches:
        assert [(arm.compared, arm.different) for arm in batch.arms] == [(2, 0)] * 5
        for name in arms[2:]:
            arm = batch.arm(name)
            assert arm.drafters["draft_model"].verified > 0
            assert set(arm.drafters["draft_model"].acceptance_by_position) <= {1.0, None}
        model_only = batch.arm("model_only:all")
        assert model_only.drafters.keys() == {"draft_model"}
        assert number(model_only.acceptance_length) == 6.0
        assert number(batch.arm("proposed:all").acceptance_length) >= 6.0
    assert [(cost["batch_size"], cost["drafters"]) for cost in report.header["costs"]] == [
        (size, names) for size in (1, 2) for names in (["ngram"], ["draft_model"], ["draft_model", "ngram"])
    ]


def test_sampled_outputs_are_equal_with_coupled_verification() -> None:
    settings = BenchSettings(
        arms=("vanilla", "ngram_only:all", "transformers"), max_new_tokens=16, temperature=1.0, seed=3, cost=COST
    )
    batch = run_bench(tiny_target(initializer_range=0.5), random_prompts(3), settings).batches[0]
    assert [(arm.compared, arm.different) for arm in batch.arms] == [(3, 0), (3, 0), (0, 0)]
    rejection = replace(settings, verify="rejection", arms=("vanilla", "ngram_only"))
    report = run_bench(tiny_target(), random_prompts(3), rejection)
    assert [arm.compared for arm in report.batches[0].arms] == [0, 0]
    assert "outputs are not compared" in report.header["notes"][0]


def test_arms_interleave_and_take_turns_at_going_first() -> None:
    order: list[tuple[str, tuple[str, ...]]] = []

    class Watch(Observer):
        def begin(self, arm: str, batch_size: int, prompts: Sequence[BenchPrompt]) -> None:
            order.append((arm, tuple(prompt.task_id for prompt in prompts)))

    arms = ("vanilla", "ngram_only", "ngram_only:all")
    settings = BenchSettings(arms=arms, repeats=2, max_new_tokens=2, cost=COST)
    run_bench(tiny_target(), random_prompts(3), settings, observer=Watch())
    rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert len(rounds) == 6
    for turn in rounds:
        assert {arm for arm, _ in turn} == set(arms)
        assert len({prompts for _, prompts in turn}) == 1
    assert Counter(turn[0][0] for turn in rounds) == dict.fromkeys(arms, 2)


def test_an_arm_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Failing:
        runs = 0

        def run(self, *args: Any, **kwargs: Any) -> GroupRun:
            self.runs += 1
            if self.runs > 2:  # the first is the warm-up
                raise RuntimeError("out of room")
            return GroupRun([[1]], 1.0, 0.0, 1)

    settings = BenchSettings(arms=("vanilla", "ngram_only"), max_new_tokens=2, cost=COST)
    report = run_bench(
        tiny_target(), random_prompts(3), settings, extra_arms={"other": lambda _builder, _size: Failing()}
    )
    assert [arm.name for arm in report.batches[0].arms] == ["vanilla", "ngram_only"]
    assert any("other failed on group 1" in note and "out of room" in note for note in report.header["notes"])


@given(kinds=st.lists(st.sampled_from(["edit", "chat", "maths"]), min_size=1, max_size=20), size=st.integers(1, 7))
def test_groups_partition_the_prompts_by_kind(kinds: list[str], size: int) -> None:
    prompts = [BenchPrompt(str(i), kind, [0]) for i, kind in enumerate(kinds)]
    groups = make_groups(prompts, size)
    assert sorted(index for group in groups for index in group) == list(range(len(kinds)))
    for group in groups:
        assert 1 <= len(group) <= size
        assert len({kinds[index] for index in group}) == 1
    for kind in set(kinds):
        sizes = [len(group) for group in groups if kinds[group[0]] == kind]
        assert len(sizes) == math.ceil(kinds.count(kind) / size)


def test_prompts_that_do_not_fit_are_refused_by_name() -> None:
    target = tiny_target(max_position_embeddings=32)
    settings = BenchSettings(max_new_tokens=24, cost=COST)
    fits = BenchPrompt("short", "edit", [1] * 8)
    with pytest.raises(ValueError, match=r"request 'long' has 9 prompt tokens.*exceed the model's 32 positions"):
        run_bench(target, [fits, BenchPrompt("long", "edit", [1] * 9)], settings)
    with pytest.raises(ValueError, match="request 'none' has an empty prompt"):
        run_bench(target, [BenchPrompt("none", "edit", [])], settings)
    with pytest.raises(ValueError, match="the workload is empty"):
        run_bench(target, [], settings)
    assert run_bench(target, [fits], settings).batches[0].arm("vanilla").tokens == 24


def test_samples_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "abc"}]
    samples = [Sample("e", messages, "abc"), Sample("c", messages)]
    target = load_tiny_target(save_tiny_target(tmp_path / "chat"))
    prompts = encode_samples(samples, target)
    assert [(prompt.task_id, prompt.kind) for prompt in prompts] == [("e", "edit"), ("c", "chat")]
    assert toy_tokenizer().decode(prompts[0].token_ids) == "<user>abc<assistant>"
    plain = load_tiny_target(save_tiny_target(tmp_path / "plain", chat=False))
    assert toy_tokenizer().decode(encode_samples(samples, plain)[0].token_ids) == "abc"
    with pytest.raises(ValueError, match="model 'tiny' has no tokenizer"):
        encode_samples(samples, tiny_target())
