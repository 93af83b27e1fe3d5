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

from hspark.config import SamplingParams
from hspark.lab.arms import PEERS, ArmSpec, PeerArm, parse_arm, plain_copy
from hspark.lab.bench import encode_samples, make_groups, run_bench
from hspark.lab.bench_report import BenchReport
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.observer import Observer
from hspark.lab.runs import BenchPrompt, GroupRun
from hspark.lab.workloads import Sample
from hspark.models import LoadedTarget
from hspark.policy import LinearCost, policy_names
from tests.saved_target import load_tiny_target, save_tiny_target
from tests.tiny import VOCAB, plain_logits, tiny_llama
from tests.toy_tokenizer import toy_tokenizer

COST = LinearCost(1.0, 0.05)


def tiny_target(**changes: Any) -> LoadedTarget:
    return LoadedTarget("tiny", tiny_llama(**changes), None, (), None)


def random_prompts(count: int, seed: int = 0) -> list[BenchPrompt]:
    """Alternating kinds, different lengths."""
    generator = torch.Generator().manual_seed(seed)
    kinds = ["edit", "chat"]
    return [
        BenchPrompt(f"p{i}", kinds[i % 2], torch.randint(0, VOCAB, (5 + i,), generator=generator).tolist())
        for i in range(count)
    ]


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


def test_plain_copy_shares_weights_and_survives_the_takeover() -> None:
    target = tiny_target()
    plain = plain_copy(target.model)
    for own, shared in zip(target.model.parameters(), plain.parameters(), strict=True):
        assert own is shared
    before = plain_logits(plain, torch.arange(9))
    run_bench(target, random_prompts(1), BenchSettings(max_new_tokens=2, cost=COST))
    model: Any = target.model
    assert model.get_input_embeddings().weight is plain.get_input_embeddings().weight
    assert torch.equal(plain_logits(plain, torch.arange(9)), before)


def test_peer_ends_where_the_engine_would() -> None:
    """The peers honour the same end-of-sequence ids and the same limit, and say how long the prompt took."""
    plain = plain_copy(tiny_llama())
    prompt = random_prompts(1)[0].token_ids
    free = PeerArm(ArmSpec("transformers", None), plain, ()).run([prompt], [SamplingParams(max_new_tokens=12)])
    tokens = free.token_ids[0]
    assert len(tokens) == 12
    eos = tokens[5]
    for name, lookup in PEERS.items():
        arm = PeerArm(ArmSpec(name, None, lookup_tokens=lookup), plain, (eos,))
        stopped = arm.run([prompt], [SamplingParams(max_new_tokens=12)])
        assert stopped.token_ids == [tokens[: tokens.index(eos) + 1]]
        assert 0 < stopped.prefill_seconds < stopped.seconds
        assert 0 < stopped.decode_tokens < stopped.tokens
        on = arm.run([prompt], [SamplingParams(max_new_tokens=12, ignore_eos=True)])
        assert on.token_ids == [tokens]


def test_arm_names() -> None:
    assert parse_arm(" vanilla ") == ArmSpec("vanilla", "vanilla")
    assert parse_arm("ngram_only:all") == ArmSpec("ngram_only:all", "ngram_only", "all")
    assert parse_arm("proposed:8").budget == 8
    assert parse_arm("transformers-lookup") == ArmSpec("transformers-lookup", None, lookup_tokens=10)
    assert not any(parse_arm(name).is_peer for name in policy_names())
    for name in ("ngram", "", "ngram_only:", "transformers:all"):
        with pytest.raises(ValueError, match=r"is unknown; use one of 'proposed'.*'transformers-lookup'"):
            parse_arm(name)
    with pytest.raises(ValueError, match="budget='most' is unknown; use 'adaptive', 'all'"):
        parse_arm("ngram_only:most")
    with pytest.raises(ValueError, match="takes no budget; use 'vanilla'"):
        parse_arm("vanilla:4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ()}, "arms is empty"),
        ({"arms": ("ngram_only", "ngram_only")}, "names one twice"),
        ({"batch_sizes": ()}, "batch_sizes=.* is empty"),
        ({"batch_sizes": (0,)}, "batch_sizes holds 0"),
        ({"repeats": 0}, "repeats holds 0"),
        ({"group_size": -1}, "group_size holds -1"),
        ({"arms": ("transformers",), "batch_sizes": (4,)}, "arm='transformers' runs at batch size 1 only"),
        ({"arms": ("model_only",)}, "arm='model_only' needs a model drafter"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is out of range"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"verify": "hope"}, "verify='hope' is not a verifier; use one of"),
        ({"drafting": "wild"}, "drafting='wild' is unknown"),
        ({"estimator": "none-such"}, "estimator='none-such' is neither a file nor a preset"),
        ({"cost": "/no/such/file"}, "cost file '/no/such/file' cannot be read"),
        ({"budget_delay": -1}, "budget_delay=-1"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchSettings(**changes)


def test_vanilla_is_always_measured() -> None:
    assert BenchSettings(arms=("ngram_only",)).arms == ("vanilla", "ngram_only")
    assert BenchSettings(arms=("ngram_only", "vanilla")).arms == ("ngram_only", "vanilla")


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


class Interrupt(Observer):
    """Ctrl-C when an arm begins for the `at`-th time."""

    def __init__(self, at: int) -> None:
        self.left = at

    def begin(self, arm: str, batch_size: int, prompts: Sequence[BenchPrompt]) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("at", "sizes", "requests", "note"),
    [
        (6, [1], [2], "of batch size 1 are reported 2 of 3 requests and 1 of 2 repeats"),
        (9, [1], [3], "of batch size 1 are reported 3 of 3 requests and 1 of 2 repeats"),
        (13, [1], [6], "of batch size 2 are reported 0 of 3 requests"),
        (17, [1, 2], [6, 2], "of batch size 2 are reported 2 of 3 requests and 1 of 2 repeats"),
    ],
)
def test_an_interrupt_keeps_what_every_arm_has_run(at: int, sizes: list[int], requests: list[int], note: str) -> None:
    """Two arms, three groups of one prompt, two repeats: 12 runs at each batch size."""
    prompts = random_prompts(3)
    settings = BenchSettings(
        arms=("vanilla", "ngram_only"), batch_sizes=(1, 2), repeats=2, max_new_tokens=4, group_size=1, cost=COST
    )
    report = run_bench(tiny_target(), prompts, settings, observer=Interrupt(at))
    assert [batch.batch_size for batch in report.batches] == sizes
    for batch, count in zip(report.batches, requests, strict=True):
        assert {arm.requests for arm in batch.arms} == {count}
        assert {len(repeat) for runs in batch.runs["runs"].values() for repeat in runs} == {len(batch.runs["groups"])}
    assert note in report.header["notes"][-1]


def test_an_interrupt_before_anything_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_bench(tiny_target(), random_prompts(2), BenchSettings(max_new_tokens=4, cost=COST), observer=Interrupt(1))


def test_an_interrupt_after_an_arm_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first arm fails in the third group, before the interrupt in it: what the other one ran is kept."""
    calls = Counter[str]()

    def run(self: PeerArm, *_: Any) -> GroupRun:
        calls["run"] += 1
        if calls["run"] == 4:  # after the warm-up and two groups
            raise RuntimeError("broken")
        return GroupRun([[1]], 1.0, 0.1, 1)

    monkeypatch.setattr(PeerArm, "run", run)
    settings = BenchSettings(arms=("transformers", "vanilla"), max_new_tokens=4, cost=COST)
    report = run_bench(tiny_target(), random_prompts(3), settings, observer=Interrupt(6))
    assert [(arm.name, arm.requests) for arm in report.batches[0].arms] == [("vanilla", 2)]
    failed, interrupted = report.header["notes"]
    assert "transformers failed on group 2" in failed
    assert "of batch size 1 are reported 2 of 3 requests" in interrupted
