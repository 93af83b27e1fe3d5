"""A small language model as drafter: exact output, chains as a fresh copy would draft them, honest bookkeeping."""

from __future__ import annotations

import copy

import pytest
import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.policy import LinearCost
from tests.tiny import VOCAB, plain_logits, tiny_llama, tiny_qwen3

PROMPTS = [[1, 2, 3, 4], [7], [5, 6] * 9, [9, 8, 7, 6, 5, 4, 3]]
COST = LinearCost(0.05, 0.001)


def speculator(target: object, drafter: CausalLMDrafter | None, **settings: object) -> HybridSpeculator:
    settings = {"policy": "model_only", "cost": COST, "max_length": 64, "budget": "all", **settings}
    return HybridSpeculator(copy.deepcopy(target), drafter=drafter, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("policy", ["model_only", "proposed", "extension"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_equals_plain_decoding(drafting: str, policy: str, temperature: float) -> None:
    target, small = tiny_llama(0), tiny_qwen3(1)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=11)
    plain = speculator(target, None, policy="vanilla").generate(PROMPTS, params)
    drafter = CausalLMDrafter(small, length=4, drafting=drafting)
    outputs = speculator(target, drafter, policy=policy, drafting=drafting, max_batch_size=3).generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_drafter_is_always_accepted(temperature: float) -> None:
    """Caches after partial and full acceptance are right: one wrong key would cost a draft."""
    target = tiny_llama(0)
    drafter = CausalLMDrafter(copy.deepcopy(target), length=4, drafting="probabilistic")
    params = SamplingParams(max_new_tokens=25, temperature=temperature, seed=5)
    outputs = speculator(target, drafter, drafting="probabilistic").generate(PROMPTS, params)
    for output in outputs:
        count = output.metrics.drafters["draft_model"]
        assert count.accepted == count.verified == 20
        assert output.metrics.steps == 5


def test_drafts_after_rejections_equal_a_fresh_drafters() -> None:
    """An untrained drafter is nearly always wrong; what it drafts still depends on the committed text alone."""
    target, small = tiny_llama(0), tiny_qwen3(1)
    plain = copy.deepcopy(small)
    drafter = CausalLMDrafter(small, length=3)
    engine = speculator(target, drafter, max_batch_size=2).engine
    requests = [engine.submit([3, 1, 4, 1, 5], SamplingParams(max_new_tokens=12)) for _ in range(2)]
    compared = 0
    while not all(request.done for request in requests):
        engine.step()
        chain = drafter.propose(engine.rows, requests[0].params.mode)
        for row, request in enumerate(engine.owners):
            if request is None:
                continue
            text = request.prompt + request.token_ids
            for slot in range(3):
                token = int(plain_logits(plain, torch.tensor(text))[-1].argmax())
                assert int(chain.tokens[row, slot]) == token
                text.append(token)
            compared += 1
    assert compared > 4


def test_other_vocabulary_is_refused() -> None:
    drafter = CausalLMDrafter(tiny_llama(1, vocab_size=VOCAB * 2))
    with pytest.raises(ValueError, match=r"96 token ids and target .* has 48; use a draft model"):
        speculator(tiny_llama(0), drafter)


@pytest.mark.parametrize("vocab", [VOCAB - 2, VOCAB + 2])
def test_padded_vocabularies_may_differ(vocab: int) -> None:
    target = tiny_llama(0)
    drafter = CausalLMDrafter(tiny_llama(1, vocab_size=vocab), drafting="probabilistic")
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=2)
    plain = speculator(target, None, policy="vanilla").generate(PROMPTS, params)
    outputs = speculator(target, drafter, drafting="probabilistic").generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.parametrize(("option", "value"), [("length", 0), ("drafting", "sometimes"), ("noise", "loud")])
def test_bad_options_are_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        CausalLMDrafter(None, **{option: value})  # type: ignore[arg-type]
