"""What is counted and reported: tokens, steps, drafts by position, and the target's own log-probabilities."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hspark.config import SamplingParams
from hspark.target import CausalTarget
from tests.fixtures import FLAT, MILD, PatternDrafter, ScriptedTarget, build_engine, serve
from tests.plain import TailLaw, model_law, plain_decode, random_law, table_law
from tests.tiny import VOCAB, plain_logits, tiny_qwen3

V = 16
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


def params(cap: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=cap, **more)


@RUN_AHEAD
def test_only_the_accepted_prefix_counts(run_ahead: int) -> None:
    """Drafts right, wrong, right: one accepted, the third is never looked at, and the wrong one is reached."""
    law = random_law(V)
    known = {(1, 2): plain_decode(law, (1, 2), params(60)).ids}
    drafter = PatternDrafter(known, V, width=3, right=lambda place, slot: slot != 1)
    engine = build_engine(ScriptedTarget(law, V), free=drafter, budget="all", run_ahead=run_ahead)
    (output,) = serve(engine, [((1, 2), params(24))])
    assert output.token_ids == known[1, 2][:24]
    assert output.metrics.steps == 12
    counts = output.metrics.drafters["ngram"]
    assert output.sources == ["ngram", "target"] * 12
    assert counts.accepted == 12
    assert counts.accepted_by_position == [12]
    # The last step has room for one draft only.
    assert counts.verified_by_position == [12, 11, 11]
    assert counts.reached_by_position == [12, 11]
    assert counts.drafted == counts.verified == 34


@RUN_AHEAD
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_books_balance(temperature: float, run_ahead: int) -> None:
    """tokens = steps + accepted, sources agree with counts, positions add up, reasons add up to steps."""
    law = random_law(V, seed=1)
    prompts = [(i, i + 1) for i in range(5)]
    own = [params(10 + 7 * i, temperature=temperature, seed=i) for i in range(5)]
    known = {p: plain_decode(law, p, params(60, temperature=temperature, seed=i)).ids for i, p in enumerate(prompts)}
    for budget, cost in (("all", FLAT), ("adaptive", MILD), (4, FLAT), (0, FLAT)):
        drafter = PatternDrafter(known, V, right=lambda place, slot: (place * 3 + slot) % 4 != 0)
        target = ScriptedTarget(law, V, rows=2)
        engine = build_engine(target, free=drafter, budget=budget, cost=cost, run_ahead=run_ahead)
        outputs = serve(engine, list(zip(prompts, own, strict=True)))
        for output in outputs:
            metrics, counts = output.metrics, output.metrics.drafters["ngram"]
            assert metrics.tokens == len(output.token_ids) == len(output.sources)
            assert metrics.tokens == metrics.steps + counts.accepted
            assert output.sources.count("ngram") == counts.accepted <= counts.verified <= counts.drafted
            assert counts.verified == sum(counts.verified_by_position)
            assert counts.accepted == sum(counts.accepted_by_position)
            assert sum(metrics.reasons.values()) == metrics.steps
            assert metrics.acceptance_length == metrics.tokens / metrics.steps
            for verified, reached in zip(counts.verified_by_position, counts.reached_by_position, strict=False):
                assert reached <= verified
            assert 0 <= metrics.prefill_seconds <= metrics.seconds
        delivered = sum(o.metrics.drafters["ngram"].verified for o in outputs)
        assert engine.slots_verified == delivered
        if run_ahead == 0:
            slots = sum(sum(call.valid) for call in target.calls)
            assert slots == delivered + sum(o.metrics.steps for o in outputs)


def test_without_drafts_the_counts_are_empty_and_no_rate_is_undefined() -> None:
    for policy in ("vanilla", "ngram_only"):
        target = ScriptedTarget(table_law(60, [(i + 1) % 60 for i in range(60)]), 60)
        (output,) = serve(build_engine(target, policy), [((3,), params(5))])
        assert output.metrics.drafters == {}
        assert output.metrics.acceptance_length == 1.0
        assert output.metrics.reasons == {"none:only": 5}


@RUN_AHEAD
def test_log_probabilities_of_a_known_law(run_ahead: int) -> None:
    """Two tokens with odds of three to one at every place: log 3/4 or log 1/4, whatever the request's temperature."""
    logits = torch.full((V,), -torch.inf)
    logits[4], logits[5] = torch.tensor(3.0).log(), 0.0
    law = TailLaw(1, lambda tail: logits)
    own = params(40, temperature=1.7, seed=2, logprobs=True)
    known = {(1,): plain_decode(law, (1,), own).ids}
    drafter = PatternDrafter(known, V, right=lambda place, slot: place % 3 != 0)
    engine = build_engine(ScriptedTarget(law, V), free=drafter, budget="all", run_ahead=run_ahead)
    (output,) = serve(engine, [((1,), own)])
    assert output.token_ids == known[(1,)]
    assert {4, 5} == set(output.token_ids)
    chances = {4: 0.75, 5: 0.25}
    expected = [float(torch.tensor(chances[token]).log()) for token in output.token_ids]
    assert output.logprobs == pytest.approx(expected, abs=1e-5)


@RUN_AHEAD
def test_log_probabilities_belong_to_their_tokens(run_ahead: int) -> None:
    """Four rows that accept different numbers of drafts: each equals a teacher-forced pass over its own ids."""
    model = tiny_qwen3()
    law = model_law(model)
    prompts = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (12, 13)]
    own = [params(20, temperature=0.6 * (i % 2), seed=i, logprobs=i != 1) for i in range(4)]
    known = {p: plain_decode(law, p, mine).ids for p, mine in zip(prompts, own, strict=True)}
    drafter = PatternDrafter(known, VOCAB, right=lambda place, slot: (place * 5 + 2 * slot) % 7 not in (1, 2))
    engine = build_engine(CausalTarget(copy.deepcopy(model), 3, 64), free=drafter, budget="all", run_ahead=run_ahead)
    for output, prompt, mine in zip(serve(engine, list(zip(prompts, own, strict=True))), prompts, own, strict=True):
        assert output.token_ids == known[prompt]
        if not mine.logprobs:
            assert output.logprobs is None
            continue
        text = torch.tensor([*prompt, *output.token_ids])
        forced = plain_logits(model, text)[len(prompt) - 1 : -1].log_softmax(dim=-1)
        expected = forced.gather(1, text[len(prompt) :, None])[:, 0].tolist()
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
