"""Watching a benchmark while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from hspark.lab.bench_settings import BenchSettings
from hspark.lab.runs import BenchPrompt, GroupRun
from hspark.request import Request


class Observer:
    """Told what a benchmark does, as it happens. Every method may be overridden; these do nothing."""

    def begin(self, arm: str, batch_size: int, prompts: Sequence[BenchPrompt]) -> None:
        """An arm starts on a group."""

    def step(self, arm: str, requests: list[Request]) -> None:
        """An arm finished a decode step (not for peers)."""

    def end(self, arm: str, run: GroupRun) -> None:
        """The arm is done with the group."""


class ProgressBar(Observer):
    """A bar on standard error, over all runs of all arms; hidden where standard error is no terminal."""

    def __init__(self, settings: BenchSettings, prompts: int, extra_arms: int = 0) -> None:
        runs = sum(len([s for s in settings.specs if size == 1 or not s.is_peer]) for size in settings.batch_sizes)
        runs += extra_arms * len(settings.batch_sizes)
        self.bar = tqdm(total=runs * settings.repeats * prompts, unit="request", disable=None, leave=False)

    def begin(self, arm: str, batch_size: int, prompts: Sequence[BenchPrompt]) -> None:
        self.bar.set_description(f"batch {batch_size}, {arm}")

    def end(self, arm: str, run: GroupRun) -> None:
        self.bar.update(len(run.token_ids))
