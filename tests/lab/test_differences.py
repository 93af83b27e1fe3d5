"""Outputs are compared token by token, and a margin tells a tie from an error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspark import HybridSpeculator, SamplingParams
from hspark.lab.arms import plain_copy
from hspark.lab.differences import compare, first_difference, with_margin
from hspark.lab.runs import BatchRuns, BenchPrompt, Difference, GroupRun
from tests.tiny import VOCAB, plain_logits, tiny_llama
from tests.toy_tokenizer import toy_tokenizer

TOKENS = st.lists(st.integers(0, 3), max_size=6)


@given(left=TOKENS, right=TOKENS)
def test_first_difference_is_the_length_of_the_common_prefix(left: list[int], right: list[int]) -> None:
    at = first_difference(left, right)
    assert (at is None) == (left == right)
    if at is not None:
        assert left[:at] == right[:at]
        assert left[at : at + 1] != right[at : at + 1]


def runs_of(**outputs: Sequence[Sequence[Sequence[int]]]) -> BatchRuns:
    """[repeat][prompt] outputs of each arm, one prompt a group."""
    prompts = len(outputs["vanilla"][0])
    runs = {
        arm: [[GroupRun([list(tokens)], 1.0, 0.0, len(tokens)) for tokens in repeat] for repeat in repeats]
        for arm, repeats in outputs.items()
    }
    return BatchRuns(1, [[index] for index in range(prompts)], ["edit"] * prompts, runs)


def check(batch: BatchRuns, skip: str = "") -> list[Difference]:
    prompts = [BenchPrompt(f"p{index}", "edit", [1, 2, 3]) for index in range(len(batch.groups))]
    compare(batch, prompts, lambda index: SamplingParams(), lambda arm: arm != skip, tiny_llama())
    return batch.differences


def test_every_difference_is_found_once() -> None:
    same = [[5, 6, 7], [8, 9]]
    batch = runs_of(
        vanilla=[same, [[5, 6, 7], [8, 8]]],  # vanilla itself, in its second run
        good=[same, same],
        bad=[same, [[5, 0, 7], [8, 9]]],
        worse=[[[5, 6], [8, 9, 9]], [[0, 6, 7], [8, 9]]],
        skipped=[[[0], [0]], same],
    )
    found = {(d.arm, d.task_id): (d.repeat, d.position, d.expected, d.got) for d in check(batch, skip="skipped")}
    assert found == {
        ("vanilla", "p1"): (2, 1, 9, 8),
        ("bad", "p0"): (2, 1, 6, 0),
        ("worse", "p0"): (1, 2, 7, None),
        ("worse", "p1"): (1, 2, None, 9),
    }
    assert batch.compared == dict.fromkeys(("vanilla", "good", "bad", "worse"), 2)
    for difference in batch.differences:
        assert (difference.margin is None) == (None in (difference.expected, difference.got))


def test_margin_is_the_plain_models_logit_difference() -> None:
    model = tiny_llama()
    text = [1, 2, 3, 4]
    logits = plain_logits(model, torch.tensor(text))[-1]
    difference = with_margin(Difference("p", "a", 1, 1, 1, 7, 9), text, SamplingParams(), model)
    assert difference.margin == pytest.approx(float(logits[7] - logits[9]), abs=1e-5)
    assert difference.near_tie is False


def test_equal_logits_are_a_near_tie() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[9] = model.lm_head.weight[7] * (1 + 1e-7)
    difference = with_margin(Difference("p", "a", 1, 1, 1, 7, 9), [1, 2, 3], SamplingParams(), model)
    assert difference.near_tie is True


def test_sampled_margin_uses_the_requests_own_noise() -> None:
    """The token that was sampled has the best score, so every other one has a positive margin against it."""
    model = tiny_llama()
    plain = plain_copy(model)
    speculator = HybridSpeculator(model, policy="vanilla", max_batch_size=1, max_length=64)
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(max_new_tokens=6, temperature=1.3, seed=11)
    output = speculator.generate(prompt, params)[0].token_ids
    other_seed = SamplingParams(max_new_tokens=6, temperature=1.3, seed=12)
    negative = 0
    for position, token in enumerate(output):
        text = prompt + output[:position]
        for other in {0, 13, VOCAB - 1} - {token}:
            difference = Difference("p", "a", 1, 1, position, token, other)
            margin = with_margin(difference, text, params, plain).margin
            assert margin is not None
            assert margin > 0
            wrong = with_margin(difference, text, other_seed, plain).margin
            negative += wrong is not None and wrong < 0
    assert negative > 0, "another request's noise explains the draws as well, so this test could not fail"


def test_texts_are_given_where_there_is_a_tokenizer() -> None:
    tokenizer = toy_tokenizer()
    ids = [tokenizer("a")["input_ids"][0], tokenizer("b")["input_ids"][0]]
    batch = runs_of(vanilla=[[[ids[0]]]], other=[[[ids[1]]]])
    model = tiny_llama(vocab_size=len(tokenizer))
    prompts = [BenchPrompt("p", "edit", [1, 2])]
    compare(batch, prompts, lambda index: SamplingParams(), lambda arm: True, model, tokenizer)
    assert [(d.expected_text, d.got_text) for d in batch.differences] == [("a", "b")]
