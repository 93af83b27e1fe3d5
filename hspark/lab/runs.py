"""What a benchmark is run on, and what was measured before anything is summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hspark.core import RequestMetrics


@dataclass(frozen=True)
class BenchPrompt:
    """One request: a name, a kind ("edit", "chat", ...) by which results are also broken down, and token ids."""

    task_id: str
    kind: str
    token_ids: list[int]


@dataclass
class GroupRun:
    """One arm's run over one group of prompts.

    seconds: wall time until the last request ended; prefill_seconds: the part spent on prompts (for the peers: until
    their first tokens). decode_tokens: output tokens that came in the remaining time.
    forwards: forwards of the target in the remaining time; 0 where an arm cannot tell.
    steps, slots, budget, price: engine steps, and sums over them of draft slots verified, budgets and prices.
    metrics, errors: per request; no metrics for the peers, which report none.
    """

    token_ids: list[list[int]]
    seconds: float
    prefill_seconds: float
    decode_tokens: int
    forwards: int = 0
    steps: int = 0
    slots: int = 0
    budget: float = 0.0
    price: float = 0.0
    metrics: list[RequestMetrics] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds


@dataclass(frozen=True)
class Difference:
    """Where an arm's output first leaves that of vanilla decoding.

    position: index into the output. expected, got: the two token ids, None where that output has ended; their texts
    where there is a tokenizer. margin: score of `expected` minus score of `got`, where the score decides which token is
    emitted (the logit; above temperature 0 the log-probability plus the request's noise), from one plain forward over
    the common prefix; None where it was not computed. near_tie: the margin is within what two kernels differ by.
    """

    task_id: str
    arm: str
    batch_size: int
    repeat: int
    position: int
    expected: int | None
    got: int | None
    expected_text: str | None = None
    got_text: str | None = None
    margin: float | None = None
    near_tie: bool | None = None


@dataclass
class BatchRuns:
    """Everything measured at one batch size.

    groups: indices of the prompts of each group. kinds: the kind of each group. runs: by arm, [repeat][group].
    compared: by arm, how many outputs were compared with vanilla's; arms whose text may differ rightly are left out.
    """

    batch_size: int
    groups: list[list[int]]
    kinds: list[str]
    runs: dict[str, list[list[GroupRun]]]
    compared: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def record(self, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
        """The raw timings, JSON-ready."""
        names = ("seconds", "prefill_seconds", "tokens", "decode_tokens", "forwards", "steps", "slots")
        return {
            "groups": [[prompts[index].task_id for index in group] for group in self.groups],
            "runs": {
                arm: [[{name: getattr(run, name) for name in names} for run in runs] for runs in repeats]
                for arm, repeats in self.runs.items()
            },
        }
