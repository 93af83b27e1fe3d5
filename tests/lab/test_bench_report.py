"""Sums, ratios, intervals and tables of a benchmark, on made-up runs whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.config import SamplingParams
from hspark.core import DrafterMetrics, RequestMetrics
from hspark.lab.bench_report import BatchSummary, BenchReport, speed_ratio, summarise, summarise_drafters
from hspark.lab.bench_text import render, same_text
from hspark.lab.runs import BatchRuns, BenchPrompt, Difference, GroupRun
from hspark.request import Request

NAMES = ["target", "dspark", "ngram"]


def run(tokens: int, seconds: float, prefill: float = 0.0) -> GroupRun:
    return GroupRun([[0] * tokens], seconds, prefill, tokens)


def batch(**seconds: list[float]) -> BatchRuns:
    """One run of 10 tokens per group; the last group is chat, the others are edits."""
    count = len(next(iter(seconds.values())))
    runs = {arm: [[run(10, each) for each in values]] for arm, values in seconds.items()}
    groups = [[index] for index in range(count)]
    return BatchRuns(1, groups, ["edit"] * (count - 1) + ["chat"], runs, compared=dict.fromkeys(seconds, count))


def prompts(count: int) -> list[BenchPrompt]:
    return [BenchPrompt(f"p{index}", "edit", [1]) for index in range(count)]


def test_ratio_is_of_sums_over_all_repeats() -> None:
    arm = [[run(10, 1.0), run(30, 1.0)], [run(10, 1.0), run(30, 1.0)]]
    vanilla = [[run(10, 2.0), run(30, 6.0)], [run(10, 2.0), run(30, 6.0)]]
    ratio = speed_ratio(arm, vanilla)
    assert ratio.value == pytest.approx((80 / 4) / (80 / 16))
    assert speed_ratio(arm, vanilla, groups=[0]).value == pytest.approx(2.0)
    assert speed_ratio(arm, vanilla, groups=[1]).value == pytest.approx(6.0)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 2.0, "two groups say next to nothing"
    assert ratio.high > 6.0


def test_prompt_time_is_left_out_of_decode_speed() -> None:
    arm, vanilla = [[run(10, 3.0, prefill=2.0)]], [[run(10, 4.0, prefill=2.0)]]
    assert speed_ratio(arm, vanilla).value == pytest.approx(4 / 3)
    assert speed_ratio(arm, vanilla, decode=True).value == pytest.approx(2.0)
    assert speed_ratio(arm, vanilla).low is None


@given(
    speeds=st.lists(st.floats(0.5, 4.0), min_size=2, max_size=12),
    noise=st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12),
)
def test_noise_that_hits_both_arms_of_a_group_moves_nothing(speeds: list[float], noise: list[float]) -> None:
    """A machine that is slow for a whole group slows numerator and denominator: a constant ratio stays exact."""
    vanilla = [[run(10, load) for load, _ in zip(noise, speeds, strict=False)]]
    steady = [[run(10, load / speeds[0]) for load, _ in zip(noise, speeds, strict=False)]]
    ratio = speed_ratio(steady, vanilla)
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(speeds[0]),) * 3
    varied = speed_ratio([[run(10, load / each) for load, each in zip(noise, speeds, strict=False)]], vanilla)
    assert varied.low is not None
    assert varied.high is not None
    assert varied.low - 1e-9 <= varied.value <= varied.high + 1e-9
    assert min(speeds) - 1e-9 <= varied.value <= max(speeds) + 1e-9


@pytest.mark.parametrize("groups", [2, 3, 8, 20])
def test_intervals_hold_the_truth_as_often_as_they_say(groups: int) -> None:
    """Speed-ups with a spread of 0.3 around 2: of 95 % intervals, at least nine in ten hold it. False alarms: below
    1e-3 if 95 % do. Without the widening of few groups, 44 % would from 2, and 70 % from 3."""
    random = np.random.default_rng(groups)
    held = 0
    for _ in range(200):
        speeds = 2.0 * np.exp(random.normal(0.0, 0.3, groups))
        arm, vanilla = [[run(10, 1 / each) for each in speeds]], [[run(10, 1.0)] * groups]
        ratio = speed_ratio(arm, vanilla)
        truth = 1 / (0.5 * np.exp(0.3**2 / 2))  # of the sums of seconds, in the limit of many groups
        held += ratio.low <= truth <= ratio.high  # type: ignore[operator]
    assert held >= 178, held


def test_groups_without_tokens_or_time_do_not_break_a_ratio() -> None:
    assert speed_ratio([[run(0, 0.0)]], [[run(10, 1.0)]]).value == 0.0
    assert speed_ratio([[run(10, 1.0)]], [[run(0, 0.0)]]).value == 0.0


def count(metrics: Request, drafted: int, kept: int, accepted: int) -> None:
    metrics.count_step(NAMES, [2] * max(drafted, 1), drafted, kept, accepted, 0)


def test_acceptance_is_of_drafts_that_were_reached() -> None:
    """Steps of 3 drafts: all accepted; the first accepted; none; and one whose budget ended after two of them."""
    request = Request(0, [1], SamplingParams(), 0, frozenset(), None)
    request.sources.append("target")
    for kept, accepted in ((3, 3), (3, 1), (3, 0), (2, 2)):
        count(request, 3, kept, accepted)
    drafter = request.metrics.drafters["ngram"]
    assert drafter.verified_by_position == [4, 4, 3]
    assert drafter.reached_by_position == [4, 3, 1]
    assert drafter.accepted_by_position == [3, 2, 1]
    summary = summarise_drafters([request.metrics, RequestMetrics(), request.metrics])["ngram"]
    assert (summary.drafted, summary.verified, summary.accepted) == (24, 22, 12)
    assert summary.acceptance_by_position == [pytest.approx(3 / 4), pytest.approx(2 / 3), 1.0]
    assert summary.survival_by_position == [pytest.approx(3 / 4), pytest.approx(2 / 4), pytest.approx(1 / 3)]


def test_a_draft_behind_the_end_of_a_request_is_not_judged() -> None:
    request = Request(0, [1], SamplingParams(), 0, frozenset({5}), None)
    assert request.commit(7, "ngram", None, last=False)
    assert not request.commit(5, "ngram", None, last=False)
    count(request, 4, 4, 1)
    drafter = request.metrics.drafters["ngram"]
    assert drafter.verified_by_position == [1, 1, 1, 1]
    assert drafter.reached_by_position == drafter.accepted_by_position == [1]


def test_positions_of_different_lengths_add_up() -> None:
    short = RequestMetrics(drafters={"ngram": DrafterMetrics(1, 1, 0, [1], [], [1])})
    long = RequestMetrics(drafters={"ngram": DrafterMetrics(2, 2, 1, [1, 1], [1], [1, 1]), "dspark": DrafterMetrics()})
    summary = summarise_drafters([short, long])
    assert summary["ngram"].acceptance_by_position == [0.5, 0.0]
    assert summary["ngram"].verified_by_position == [2, 1]
    assert summary["dspark"].acceptance_by_position == []


def test_report_says_what_was_slower_and_what_differed() -> None:
    runs = batch(vanilla=[1.0, 1.0, 1.0], fast=[0.5, 0.5, 2.0], slow=[2.0, 2.0, 2.0])
    runs.differences = [
        Difference("p1", "fast", 1, 1, 4, 10, 11, " a", " b", 0.004, True),
        Difference("p2", "slow", 1, 1, 0, 10, None, " a", None),
        Difference("p0", "slow", 1, 1, 2, 10, 12, None, None, 3.25, False),
    ]
    runs.runs["slow"][0][1].errors.append("the target's logits hold NaN")
    summary = summarise(runs, prompts(3))
    text = render(BenchReport(HEADER, [summary]))
    assert "slower than vanilla: slow, 0.50x [0.50, 0.50]" in text
    assert "slower than vanilla on chat: fast, 0.50x" in text
    assert "failed request in slow: the target's logits hold NaN" in text
    assert "3 outputs leave vanilla's, 1 of them at a near-tie" in text
    assert "fast, p1, token 4: ' b' for ' a', margin 0.004 (near-tie)" in text
    assert "slow, p2, token 0: the end for ' a'\n" in text
    assert "slow, p0, token 2: 12 for 10, margin 3.2 (no tie)" in text
    assert [same_text(arm) for arm in summary.arms] == ["identical", "1 of 3 differ", "2 of 3 differ"]
    lines = [line for line in text.splitlines() if line.startswith(("arm ", "vanilla ", "fast ", "slow "))]
    assert len({len(line) for line in lines[:4]}) == 1, "columns are not aligned"


def test_report_without_differences_names_what_was_compared() -> None:
    runs = batch(vanilla=[1.0, 1.0], ngram_only=[0.5, 0.5], transformers=[0.9, 0.9])
    del runs.compared["transformers"]
    text = render(BenchReport(HEADER, [summarise(runs, prompts(2))]))
    assert "no difference from vanilla's first run in vanilla, ngram_only (2 outputs each)" in text
    assert "not comparable" in text
    assert "slower" not in text


def test_an_arm_is_found_by_name() -> None:
    summary: BatchSummary = summarise(batch(vanilla=[1.0], other=[2.0]), prompts(1))
    assert summary.arm("other").speedup.value == pytest.approx(0.5)


HEADER = {
    "machine": {
        "processor": "a processor",
        "cores": 2,
        "threads": 1,
        "load_average": 0.5,
        "load_average_after": 0.6,
        "device": "cpu",
        "system": "Linux",
        "versions": {"hspark": "1"},
    },
    "model": "tiny",
    "dtype": "float32",
    "workload": {"name": "w", "requests": 3, "kinds": {"edit": 3}, "prompt_tokens": 9},
    "settings": {
        "max_new_tokens": 10,
        "temperature": 0.0,
        "seed": 0,
        "repeats": 1,
        "drafter": None,
        "verify": "coupled",
        "budget_delay": 2,
        "cost": "auto",
    },
    "notes": ["a note"],
    "estimator": "estimator: some. And more.",
}
