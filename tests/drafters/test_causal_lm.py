"""A small language model as drafter: exact output, chains as a fresh copy would draft them, honest bookkeeping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.drafters.confidence import ProbabilityCurve
from hspark.drafters.dspark import committed_counts
from hspark.policy import LinearCost
from hspark.sampling import (
    STREAM_COUPLED,
    STREAM_DRAFT,
    SamplingMode,
    gumbel_noise,
    process_logits,
    slot_key,
    target_log_probs,
)
from hspark.target import CausalTarget
from tests.assertions import assert_valid_chain
from tests.drafters.dspark_cases import rows_of
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


def bound_pair(drafting: str, noise: str, rows: int) -> tuple[CausalLMDrafter, Any]:
    """A drafter of 3 tokens bound to a target, and an untouched copy of its model."""
    small = tiny_qwen3(1)
    plain = copy.deepcopy(small)
    drafter = CausalLMDrafter(small, length=3, drafting=drafting, noise=noise)
    drafter.bind(CausalTarget(tiny_llama(0), rows, 64).info("tiny"), rows, 64)
    return drafter, plain


SETTINGS: dict[str, Any] = {
    "temperature": torch.tensor([0.0, 0.7, 1.0, 1e-6, 1.4]),
    "top_k": torch.tensor([0, 0, 3, 0, 0]),
    "frequency_penalty": torch.tensor([3.0, 0.0, 0.4, 0.0, 3.0]),
    "presence_penalty": torch.tensor([0.0, 0.2, 0.0, 0.0, 0.3]),
    "repetition_penalty": torch.tensor([1.0, 1.3, 1.0, 1.0, 2.0]),
}
GREEDY_ROWS = [True, False, False, True, False]


@pytest.mark.parametrize(
    ("drafting", "noise"), [("greedy", "coupled"), ("probabilistic", "coupled"), ("probabilistic", "independent")]
)
def test_each_slot_follows_the_processed_law_of_its_own_prefix(drafting: str, noise: str) -> None:
    """Tokens, reported laws and point masses, with filters and with penalties that count the drafts before a slot."""
    texts = [[(7 * i + row) % 11 + row for i in range(6 + row)] for row in range(5)]
    drafter, plain = bound_pair(drafting, noise, 5)
    for row, text in enumerate(texts):
        drafter.prefill(torch.tensor(text[:-1]), row, 0)
    rows = rows_of(texts, prompt_length=3, seed=torch.arange(5) + 70, **SETTINGS)
    mode = SamplingMode(sampled=True, filters=True, penalties=True)
    chain = drafter.propose(rows, mode)
    assert_valid_chain(chain, VOCAB)
    sampled = drafting == "probabilistic"
    assert (chain.log_probs is not None) is sampled
    assert chain.point_mass.tolist() == [[greedy or not sampled] * 3 for greedy in GREEDY_ROWS]
    anchor = rows.length - 1
    for slot in range(3):
        logits = torch.stack([plain_logits(plain, torch.tensor(text))[-1] for text in texts])
        now = rows_of(texts, prompt_length=3, **SETTINGS)
        counts = committed_counts(now, VOCAB)
        if not sampled:
            expected = process_logits(logits, rows.sampling, mode, counts)
        else:
            expected = target_log_probs(logits, rows.sampling, mode, counts)
            assert chain.log_probs is not None
            torch.testing.assert_close(chain.log_probs[:, slot], expected, rtol=1e-4, atol=1e-4)
            if noise == "coupled":
                drawn = gumbel_noise(rows.sampling.seed, anchor + 1 + slot, VOCAB, STREAM_COUPLED)
            else:
                drawn = gumbel_noise(rows.sampling.seed, slot_key(anchor, slot), VOCAB, STREAM_DRAFT)
            expected = expected + drawn
        assert chain.tokens[:, slot].tolist() == expected.argmax(dim=-1).tolist()
        texts = [[*text, token] for text, token in zip(texts, chain.tokens[:, slot].tolist(), strict=True)]


def test_the_target_as_its_own_drafter_is_always_accepted_by_rejection() -> None:
    """Under penalties and filters the two laws are equal at every slot, so a draft of probability q / p = 1 stays."""
    target = tiny_llama(0)
    drafter = CausalLMDrafter(copy.deepcopy(target), length=4, drafting="probabilistic", noise="independent")
    params = SamplingParams(
        max_new_tokens=25, temperature=1.0, seed=5, frequency_penalty=1.5, repetition_penalty=1.3, top_k=20
    )
    outputs = speculator(target, drafter, drafting="probabilistic", verify="rejection").generate(PROMPTS, params)
    for output in outputs:
        count = output.metrics.drafters["draft_model"]
        assert count.accepted == count.verified == 20


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


def test_the_default_curve_is_the_fitted_one() -> None:
    half = torch.tensor(0.5).log()
    assert CausalLMDrafter(None).curve == ProbabilityCurve()
    assert float(CausalLMDrafter(None, curve=ProbabilityCurve(0, 1)).curve(half)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("option", "value"), [("length", 0), ("length", True), ("drafting", "sometimes"), ("noise", "loud")]
)
def test_bad_options_are_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        CausalLMDrafter(None, **{option: value})  # type: ignore[arg-type]
