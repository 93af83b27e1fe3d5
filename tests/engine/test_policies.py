"""One text for every policy, drafting mode and batch size under coupled verification; books say what was kept."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest

from hspark import HybridSpeculator, RequestOutput, SamplingParams
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_config import DSparkConfig
from hspark.policy import LinearCost, policy_names
from tests.drafters.dspark_cases import random_model, save_model
from tests.drafters.test_dspark_end_to_end import COMMON
from tests.tiny import tiny_llama

PROMPTS = [[1, 2, 3, 4, 5, 6] * 3, [5] * 20, [7], [9, 8, 7, 9, 8, 7, 9, 8, 7, 9, 8]]
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, seed=21)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = DSparkConfig(**{**COMMON, "num_target_layers": 3})
    return save_model(random_model(config, seed=1), tmp_path_factory.mktemp("drafter"), "deepspec")


def run(policy: str, drafting: str, rows: int, checkpoint: Path | None) -> list[RequestOutput]:
    speculator = HybridSpeculator(
        copy.deepcopy(tiny_llama(0)),
        drafter=None if checkpoint is None else DSparkDrafter.from_pretrained(checkpoint, drafting=drafting),
        policy=policy,
        drafting=drafting,
        cost=LinearCost(0.05, 0.001),
        max_batch_size=rows,
        max_length=48,
    )
    return speculator.generate(PROMPTS, PARAMS)


@functools.cache
def plain() -> list[list[int]]:
    return [output.token_ids for output in run("vanilla", "greedy", 1, None)]


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("policy", policy_names())
def test_one_text_for_one_seed(policy: str, drafting: str, checkpoint: Path) -> None:
    for rows in (1, 3, 8):
        outputs = run(policy, drafting, rows, checkpoint)
        assert [output.token_ids for output in outputs] == plain(), f"{rows} rows"


def test_books_name_the_kept_chain_and_the_reason(checkpoint: Path) -> None:
    outputs = run("proposed", "greedy", 1, checkpoint)
    kept = {key for output in outputs for key in output.metrics.reasons}
    assert kept <= {"ngram:contains", "ngram:value", "dspark:value", "dspark:no_match", "none:no_match", "none:value"}
    assert any(key.startswith("ngram:") for key in kept)
    assert any(key.startswith("dspark:") for key in kept)
    for output in outputs:
        assert sum(output.metrics.reasons.values()) == output.metrics.steps
        assert set(output.sources) <= {"ngram", "dspark", "target"}
        assert len(output.sources) == len(output.token_ids)
