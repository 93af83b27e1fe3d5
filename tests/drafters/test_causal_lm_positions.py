"""A draft model with fewer positions than the target's rows: it abstains past them, and nothing else changes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.policy import LinearCost
from hspark.sampling import SamplingMode
from hspark.target import CausalTarget
from tests.assertions import assert_one_graph, assert_valid_chain
from tests.drafters.dspark_cases import rows_of
from tests.tiny import VOCAB, tiny_llama

POSITIONS, MAX_LENGTH = 16, 64
TEXT = [(5 * i * i + i) % VOCAB for i in range(MAX_LENGTH)]


def opt(positions: int) -> Any:
    """Learned positions: a table with one row for each."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": positions, "pad_token_id": 0}
    sizes |= {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(word_embed_proj_dim=32, **sizes))


def llama(positions: int, **sizes: Any) -> Any:
    return tiny_llama(1, max_position_embeddings=positions, **sizes)


MODELS = {"llama": llama, "opt": opt}


def bound(model: Any, rows: int, length: int = 4) -> CausalLMDrafter:
    drafter = CausalLMDrafter(model, length=length)
    drafter.bind(CausalTarget(tiny_llama(0), rows, MAX_LENGTH).info("tiny"), rows, MAX_LENGTH)
    return drafter


@pytest.mark.parametrize("family", MODELS)
def test_text_stays_exact_and_short_rows_go_on_drafting(family: str, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [[1, 2, 3, 4], [5, 6] * 12, [7]]
    params = [SamplingParams(max_new_tokens=n) for n in (56, 20, 9)]
    options: dict[str, Any] = {"cost": LinearCost(0.05, 0.001), "max_length": MAX_LENGTH}
    target = tiny_llama(0)
    plain = HybridSpeculator(copy.deepcopy(target), drafter=None, policy="vanilla", **options).generate(prompts, params)
    with caplog.at_level(logging.WARNING):
        drafter = CausalLMDrafter(MODELS[family](POSITIONS), length=4)
        options |= {"policy": "model_only", "budget": "all", "prefill_tokens": 7}
        speculator = HybridSpeculator(target, drafter=drafter, **options)
        outputs = speculator.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert speculator.engine.draft_failures == 0
    assert len([r for r in caplog.records if "draft model drafter knows 16 positions" in r.getMessage()]) == 1
    drafted = [sum(c.drafted for c in o.metrics.drafters.values()) for o in outputs]
    # Anchors 3 .. 15 of the first row draft 4 tokens each at most; the second row begins past the last position.
    assert 0 < drafted[0] <= 13 * 4
    assert drafted[1] == 0
    assert drafted[2] > 0


@pytest.mark.parametrize("family", MODELS)
def test_chains_end_at_the_last_position(family: str) -> None:
    """Slot k needs the model at position anchor + k; up to there, the drafts are those of a model with more."""
    small, large = bound(MODELS[family](POSITIONS), 2), bound(llama(512), 2)
    if family == "llama":  # only here do the two models have the same weights
        large.prefill(torch.tensor(TEXT[:30]), 0, 0)
        large.prefill(torch.tensor(TEXT[:8]), 1, 0)
    for start in (0, 13, 26):
        small.prefill(torch.tensor(TEXT[start : min(start + 13, 30)]), 0, start)
    small.prefill(torch.tensor(TEXT[:8]), 1, 0)
    lengths = []
    for length in range(1, 30):
        rows = rows_of([TEXT[:length], TEXT[:9]], MAX_LENGTH)
        chain = small.propose(rows, SamplingMode())
        assert_valid_chain(chain, VOCAB)
        assert int(chain.length[1]) == 4
        lengths.append(int(chain.length[0]))
        if family == "llama":
            reference = large.propose(rows, SamplingMode())
            for row, count in enumerate(chain.length.tolist()):
                assert chain.tokens[row, :count].tolist() == reference.tokens[row, :count].tolist()
    assert lengths == [4] * 13 + [3, 2, 1] + [0] * 13


def test_a_model_with_positions_enough_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bound(llama(MAX_LENGTH), 1)
    assert not caplog.records


def test_the_limit_needs_no_host_read() -> None:
    drafter = bound(llama(POSITIONS, num_hidden_layers=1), 2, length=2)
    rows = rows_of([TEXT[:16], TEXT[:9]], MAX_LENGTH)
    chain = assert_one_graph(drafter.propose, rows, SamplingMode())
    assert chain.length.tolist() == [1, 2]
