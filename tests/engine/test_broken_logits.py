"""NaN and infinite logits: the request that meets them ends with an error; nobody else, before or after, notices."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch

from hspark.config import SamplingParams
from hspark.target import CausalTarget
from tests.fixtures import PatternDrafter, ScriptedTarget, build_engine, finish, serve
from tests.plain import Law, model_law, plain_decode, random_law
from tests.tiny import VOCAB, tiny_llama

V, POISON = 16, 44
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2])
ONE_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])
GREEDY = SamplingParams(max_new_tokens=14)


def breaking(law: Law, prompt: tuple[int, ...], place: int, value: float = math.nan) -> Law:
    """`law`, whose logits hold `value` where output place `place` of `prompt` is due."""

    def broken(prefix: tuple[int, ...]) -> torch.Tensor:
        logits = law(prefix).clone()
        if prefix[: len(prompt)] == prompt and len(prefix) == len(prompt) + place:
            logits[3] = value
        return logits

    return broken


@RUN_AHEAD
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("width", [1, 7])
def test_one_row_fails_alone(value: float, temperature: float, width: int, run_ahead: int) -> None:
    """Row 0 meets a NaN at place 3: it keeps its three tokens and an error; row 1 equals plain decoding."""
    law = random_law(V)
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=4)
    bad, good = (1, 2, 3), (4, 5)
    known = {p: plain_decode(law, p, params).ids for p in (bad, good)}
    target = ScriptedTarget(breaking(law, bad, 3, value), V, rows=2)
    drafter = PatternDrafter(known, V, width=width)
    engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead)
    failed, fine = serve(engine, [(bad, params), (good, params)])
    assert failed.finish_reason == "error"
    assert failed.error == "the target's logits for position 6 hold NaN or infinity; the request was ended"
    assert failed.token_ids == known[bad][:3]
    assert (fine.token_ids, fine.finish_reason, fine.error) == (known[good], "length", None)
    (again,) = serve(engine, [(good, params)])
    assert again.token_ids == known[good]


@RUN_AHEAD
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_sampled_row_fails_alone_under_rejection(value: float, run_ahead: int) -> None:
    """No slot has one token of its own there, so all logits are looked at."""
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=4)
    bad, good = (1, 2, 3), (4, 5)
    target = ScriptedTarget(breaking(random_law(V), bad, 3, value), V, rows=2)
    drafter = PatternDrafter({bad: [0] * 20, good: [0] * 20}, V, width=3)
    engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead, verify="rejection")
    failed, fine = serve(engine, [(bad, params), (good, params)])
    assert (failed.finish_reason, len(failed.token_ids)) == ("error", 3)
    assert (fine.finish_reason, len(fine.token_ids)) == ("length", 20)


@RUN_AHEAD
def test_a_row_of_minus_infinity_alone_is_an_error(run_ahead: int) -> None:
    """Nothing is left to be emitted."""
    law = random_law(V)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=14, temperature=temperature, seed=4)
        target = ScriptedTarget(lambda prefix: law(prefix) - (math.inf if len(prefix) == 6 else 0.0), V)
        (output,) = serve(build_engine(target, budget="all", run_ahead=run_ahead), [((1, 2, 3), params)])
        assert (output.finish_reason, len(output.token_ids)) == ("error", 3)


@RUN_AHEAD
def test_minus_infinity_is_a_ban_and_no_error(run_ahead: int) -> None:
    law = random_law(V)
    target = ScriptedTarget(breaking(law, (1, 2, 3), 3, -math.inf), V, rows=2)
    (output,) = serve(build_engine(target, budget="all", run_ahead=run_ahead), [((1, 2, 3), GREEDY)])
    assert output.finish_reason == "length"
    assert output.token_ids[3] != 3


@RUN_AHEAD
def test_what_lies_behind_the_end_does_not_matter(run_ahead: int) -> None:
    """NaN logits behind a stop token inside the same block: plain decoding would never have seen them."""
    law = random_law(V)
    prompt = (1, 2, 3)
    known = {prompt: plain_decode(law, prompt, GREEDY).ids}
    stop = SamplingParams(max_new_tokens=14, stop_token_ids=(known[prompt][2],))
    expected = plain_decode(law, prompt, stop)
    for place in range(len(expected.ids), 7):
        target = ScriptedTarget(breaking(law, prompt, place), V)
        engine = build_engine(target, free=PatternDrafter(known, V), budget="all", run_ahead=run_ahead)
        (output,) = serve(engine, [(prompt, stop)])
        assert (output.token_ids, output.finish_reason) == (expected.ids, "stop")


# -- a real model in which one token id is broken --------------------------------------------------------------------


@functools.cache
def model() -> Any:
    """A tiny model whose embedding of token POISON is NaN: whatever has read it, in any row, is NaN from there on."""
    made = tiny_llama(num_hidden_layers=2)
    with torch.no_grad():
        made.get_input_embeddings().weight[POISON] = math.nan
    return made


CLEAN = [(1, 2, 3), (4, 5), (9, 8, 9, 8, 9)]


@functools.cache
def known() -> dict[tuple[int, ...], list[int]]:
    law = model_law(model())
    outputs = {p: plain_decode(law, p, GREEDY).ids for p in CLEAN}
    assert all(len(ids) == 14 and POISON not in ids for ids in outputs.values())
    return outputs


def poisoned_engine(run_ahead: int, *, rows: int = 1, period: int = 4) -> Any:
    """Every `period`-th draft is the broken token, so that it is processed and rejected again and again."""
    drafter = PatternDrafter(known(), VOCAB, right=lambda place, slot: (place + 1) % period != 0, wrong=POISON)
    target = CausalTarget(copy.deepcopy(model()), rows, 64)
    return build_engine(target, free=drafter, budget="all", run_ahead=run_ahead)


@ONE_AHEAD
@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_rejected_draft_that_breaks_the_logits_changes_nothing(period: int, run_ahead: int) -> None:
    """Its NaN keys and values stay in the row's buffer, masked, and must not reach a later step."""
    engine = poisoned_engine(run_ahead, rows=2, period=period)
    outputs = serve(engine, [(p, GREEDY) for p in CLEAN], limit=300)
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [(known()[p], "length") for p in CLEAN]


@ONE_AHEAD
def test_a_broken_prompt_fails_and_its_row_is_clean_afterwards(run_ahead: int) -> None:
    engine = poisoned_engine(run_ahead)
    bad = (11, POISON, 12, 13, 14, 15, 16, 17, 18)
    for prompt in CLEAN:
        failed, output = serve(engine, [(bad, GREEDY), (prompt, GREEDY)])
        assert failed.finish_reason == "error"
        assert failed.token_ids == []
        assert output.token_ids == known()[prompt]


@ONE_AHEAD
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_row_is_clean_after_cancelling_a_request_in_trouble(steps: int, run_ahead: int) -> None:
    """Cancelled before its first result, with NaNs of its prompt or of rejected drafts behind it or still in flight."""
    bad = (11, POISON, 12, 13, 14, 15, 16, 17, 18)
    for first in (bad, CLEAN[2]):
        engine = poisoned_engine(run_ahead, period=1)
        request = engine.submit(list(first), GREEDY)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        following = [engine.submit(list(p), GREEDY) for p in CLEAN]
        finish(engine, following, limit=400)
        assert [r.token_ids for r in following] == [known()[p] for p in CLEAN]
    engine = poisoned_engine(run_ahead)
    engine.prefill_tokens = 2
    request = engine.submit(list(bad), GREEDY)
    engine._admit()
    engine._prefill_chunk(0, request, 2)  # cancelled halfway through its prompt
    engine.cancel(request)
    (output,) = serve(engine, [(CLEAN[0], GREEDY)])
    assert output.token_ids == known()[CLEAN[0]]


@ONE_AHEAD
def test_a_row_is_clean_after_a_stop_with_broken_drafts_behind_it(run_ahead: int) -> None:
    """The host sees a stop late: what the row drafts meanwhile is broken, and belongs to nobody."""
    engine = poisoned_engine(run_ahead, period=1)
    for prompt in CLEAN * 2:
        stop = known()[prompt][1]
        params = SamplingParams(max_new_tokens=14, stop_token_ids=(stop,))
        first, second = serve(engine, [(prompt, params), (prompt, GREEDY)])
        assert first.token_ids == known()[prompt][: known()[prompt].index(stop) + 1]
        assert second.token_ids == known()[prompt]


@ONE_AHEAD
@pytest.mark.parametrize("call", [1, 2, 4])
def test_rows_are_clean_after_an_interrupt_with_broken_drafts_in_flight(call: int, run_ahead: int) -> None:
    """The outcome that says so is lost with the interrupted step; a cancelled request leaves its row to another."""
    engine = poisoned_engine(run_ahead, rows=2, period=1)
    requests = [engine.submit(list(p), GREEDY) for p in CLEAN[:2]]
    collect, calls = engine._collect, [0]

    def interrupted(flight: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        collect(flight)

    engine._collect = interrupted
    with pytest.raises(KeyboardInterrupt):
        finish(engine, requests, limit=400)
    engine.cancel(requests[1])
    requests[1] = engine.submit(list(CLEAN[2]), SamplingParams(max_new_tokens=14, speculate=False))
    finish(engine, requests, limit=400)
    assert [r.token_ids for r in requests] == [known()[CLEAN[0]], known()[CLEAN[2]]]
