"""Arms: their names, and peers that share the target's weights and end where the engine would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hspark.config import SamplingParams
from hspark.lab.arms import PEERS, ArmSpec, PeerArm, parse_arm, plain_copy
from hspark.lab.bench import run_bench
from hspark.lab.bench_settings import BenchSettings
from hspark.policy import policy_names
from tests.lab.bench_cases import COST, random_prompts, tiny_target
from tests.tiny import plain_logits, tiny_llama


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
