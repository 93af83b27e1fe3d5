"""What the tests of recording and simulation share: tiny targets and drafters, engines, and recorded outputs."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hspark.config import SamplingParams
from hspark.core import Chain, RequestOutput
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.ngram import NgramDrafter
from hspark.engine import Engine
from hspark.lab.outputs import RecordedOutput
from hspark.policy import AcceptanceEstimator
from hspark.target import CausalTarget
from tests.drafters.dspark_cases import random_model
from tests.drafters.test_dspark_end_to_end import COMMON, KINDS
from tests.fixtures import FLAT, build_engine, serve
from tests.tiny import FAMILIES, VOCAB

MAX_LENGTH = 96
ESTIMATOR = AcceptanceEstimator.preset("qwen3-4b")
Jobs = tuple[tuple[tuple[int, ...], SamplingParams], ...]


@functools.cache
def target_model(family: str) -> Any:
    return FAMILIES[family]()


@functools.cache
def dspark(family: str, drafting: str = "greedy") -> DSparkDrafter:
    config = DSparkConfig(**{**COMMON, **KINDS[family][1]})
    return DSparkDrafter(random_model(config, seed=3), drafting=drafting)


def ngram() -> NgramDrafter:
    """Settings under which short texts match often."""
    return NgramDrafter(lambda n, a, m: AcceptanceEstimator.preset("qwen3-4b")(n + 4, a, m), min_match=1, max_match=15)


def jobs(count: int, cap: int = 24, temperature: float = 0.0) -> Jobs:
    """Requests whose prompts repeat themselves, and of different lengths."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for number in range(count):
        part = torch.randint(0, VOCAB, (3 + number,), generator=generator).tolist()
        params = SamplingParams(max_new_tokens=cap - number % 4, temperature=temperature, seed=50 + number)
        made.append((tuple(part * 2), params))
    return tuple(made)


def engine(family: str, rows: int = 1, policy: str = "proposed", drafting: str = "greedy", **options: Any) -> Engine:
    target = CausalTarget(copy.deepcopy(target_model(family)), rows, MAX_LENGTH)
    drafter = DSparkDrafter(dspark(family).source, drafting=drafting)
    return build_engine(target, policy, model=drafter, free=ngram(), **{"cost": FLAT, **options})


@functools.cache
def answers(family: str, count: int, cap: int = 24, temperature: float = 0.0) -> tuple[RequestOutput, ...]:
    """The outputs of `jobs`, decoded without drafts."""
    return tuple(serve(engine(family, policy="vanilla"), jobs(count, cap, temperature)))


def recorded(family: str, count: int, cap: int = 24, temperature: float = 0.0) -> list[RecordedOutput]:
    return [
        RecordedOutput(tuple(out.prompt_token_ids), tuple(out.token_ids), temperature, f"task {index}")
        for index, out in enumerate(answers(family, count, cap, temperature))
    ]


class Seen(NamedTuple):
    """A chain that was proposed in an engine after `text`; all of one row."""

    text: tuple[int, ...]
    tokens: list[int]
    acceptance: Tensor


def watch(drafter: Any, seen: list[Seen]) -> None:
    """Makes a drafter note every chain that it proposes for a running row."""
    inner = drafter.propose

    def propose(rows: Any, mode: Any) -> Chain:
        chain = inner(rows, mode)
        for row in range(rows.length.shape[0]):
            if rows.running[row]:
                text = tuple(rows.tokens[row, : rows.length[row]].tolist())
                length = int(chain.length[row])
                seen.append(Seen(text, chain.tokens[row, :length].tolist(), chain.acceptance[row, :length].clone()))
        return chain

    drafter.propose = propose
