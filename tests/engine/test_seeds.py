"""With one seed there is one output, whatever the policy, budget, batch, cost, asynchrony or process."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark.config import SamplingParams
from hspark.drafters import NgramDrafter
from hspark.target import CausalTarget
from tests.fixtures import FLAT, MILD, STAIRS, STEEP, ScriptedTarget, build_engine, serve
from tests.plain import model_law, plain_decode, random_law
from tests.tiny import VOCAB, tiny_llama

TOKENS = 14
TEMPERATURES = (0.8, 0.3, 1.5, 0.0)


@functools.cache
def model() -> Any:
    return tiny_llama(num_hidden_layers=2)


@functools.cache
def jobs() -> tuple[tuple[tuple[int, ...], SamplingParams], ...]:
    """Eight requests: prompts of 1 to 15 tokens, repetitive and not, temperatures and filters of every kind."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for i in range(8):
        prompt = torch.randint(0, VOCAB, (2 * i + 1,), generator=generator).tolist()
        if i % 2:
            prompt = (prompt[:3] * 8)[: 2 * i + 1]
        more: dict[str, Any] = {"top_k": 5} if i == 2 else {"top_p": 0.8} if i == 5 else {}
        params = SamplingParams(max_new_tokens=TOKENS, temperature=TEMPERATURES[i % 4], seed=100 + i, **more)
        made.append((tuple(prompt), params))
    return tuple(made)


@functools.cache
def expected() -> list[list[int]]:
    law = model_law(model())
    return [plain_decode(law, prompt, params).ids for prompt, params in jobs()]


def decode(rows: int, policy: str = "ngram_only", **options: Any) -> list[Any]:
    """All jobs on an engine of `rows` rows over the real model; drafts wherever two tokens repeat."""
    target = CausalTarget(copy.deepcopy(model()), rows, 64)
    free = NgramDrafter(min_match=2) if policy == "ngram_only" else None
    return serve(build_engine(target, policy, free=free, **options), list(jobs()))


ARMS: dict[str, dict[str, Any]] = {
    "vanilla": {"policy": "vanilla"},
    "ngram_only": {"cost": FLAT},
    "ngram_only, mild cost": {"cost": MILD},
    "ngram_only, steep cost": {"cost": STEEP},
    "ngram_only, stairs": {"cost": STAIRS},
    "ngram_only, all": {"budget": "all"},
    "ngram_only, none": {"budget": 0},
    "ngram_only, 3 slots": {"budget": 3},
    "ngram_only, fresh sizing": {"cost": MILD, "budget_delay": 0},
}


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_one_seed_one_output(rows: int, run_ahead: int) -> None:
    """Every arm, in float32: token for token what plain decoding without a cache emits."""
    for name, options in ARMS.items():
        if options.get("budget_delay") == 0 and run_ahead:
            continue
        outputs = decode(rows, **{**options, "run_ahead": run_ahead})
        assert [o.token_ids for o in outputs] == expected(), name
        verified = sum(o.metrics.drafters["ngram"].verified for o in outputs if o.metrics.drafters)
        idle = options.get("policy") == "vanilla" or options.get("budget") == 0
        assert (verified == 0) == idle or "steep" in name, f"{name} verified {verified} drafts"
        if name == "ngram_only, all":
            accepted = sum(o.metrics.drafters["ngram"].accepted for o in outputs if o.metrics.drafters)
            assert 0 < accepted < verified, "the workload does not reject and accept drafts"


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("companions", [0, 1, 3, 7])
def test_companions_change_nothing(companions: int, run_ahead: int) -> None:
    """The first job alone and beside others, in every row of the batch."""
    target = CausalTarget(copy.deepcopy(model()), 8, 64)
    engine = build_engine(target, free=NgramDrafter(min_match=2), budget="all", run_ahead=run_ahead)
    for place in {0, companions}:
        batch = list(jobs()[1 : companions + 1])
        batch.insert(place, jobs()[0])
        outputs = serve(engine, batch)
        assert outputs[place].token_ids == expected()[0]


def test_rows_without_filters_do_not_notice_rows_with_them() -> None:
    """The law of an unfiltered row is the same bit for bit beside a filtered one, so no near-tie can flip."""
    from hspark.sampling import SamplingMode, SamplingState, target_log_probs

    state = SamplingState.defaults(2)
    state.temperature.fill_(0.9)
    state.top_k[1] = 3
    logits = 3 * torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    alone = target_log_probs(logits, state, SamplingMode(sampled=True))
    beside = target_log_probs(logits, state, SamplingMode(sampled=True, filters=True))
    assert torch.equal(alone[0], beside[0])
    assert not torch.equal(alone[1], beside[1])


def test_requests_without_a_seed_are_independent() -> None:
    """Four times the same prompt at temperature 1: the outputs are not all equal (chance of equality below 1e-20)."""
    law = random_law(16)
    engine = build_engine(ScriptedTarget(law, 16, rows=4))
    outputs = serve(engine, [((1, 2, 3), SamplingParams(max_new_tokens=30, temperature=1.0))] * 4)
    assert len({tuple(o.token_ids) for o in outputs}) == 4


def test_equal_and_different_seeds() -> None:
    """Equal seeds give equal outputs for equal prompts, in any rows; different seeds differ."""
    engine = build_engine(ScriptedTarget(random_law(16), 16, rows=3))
    seeds = [1, 2, 1, 3, 2, 1]
    batch = [((1, 2, 3), SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed)) for seed in seeds]
    texts = [tuple(o.token_ids) for o in serve(engine, batch)]
    assert len(set(texts)) == 3
    assert [texts.index(text) for text in texts] == [0, 1, 0, 3, 1, 0]


def test_every_row_may_have_the_largest_seed() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2**63 - 1)
    law = random_law(16)
    engine = build_engine(ScriptedTarget(law, 16))
    (output,) = serve(engine, [((1,), params)])
    assert output.token_ids == plain_decode(law, (1,), params).ids


SCRIPT = """
import json
from tests.engine.test_seeds import decode
print(json.dumps([output.token_ids for output in decode(4, budget="all")]))
"""


def test_another_process_with_other_threads_gives_the_same() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected()
