"""An interrupted benchmark reports what every arm has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from hspark.lab.arms import PeerArm
from hspark.lab.bench import run_bench
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.observer import Observer
from hspark.lab.runs import BenchPrompt, GroupRun
from tests.lab.bench_cases import COST, random_prompts, tiny_target


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
