"""Requests end and rows change hands at any step: state belongs to the request, never to the row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.engine.cases import LAW, RUN_AHEAD, V, engine_for, greedy, plain
from tests.fixtures import FLAT, MILD, STAIRS, check_state, finish
from tests.plain import plain_decode


@RUN_AHEAD
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_cancel_is_keyed_to_the_request_and_not_to_its_row(steps: int, run_ahead: int) -> None:
    """A and B run; A is cancelled, C takes its row, A is cancelled again: B and C are as if they were alone."""
    prompts = [(1, 2), (3,), (5, 6, 7)]
    engine = engine_for(prompts, rows=2, run_ahead=run_ahead)
    a, b = engine.submit([1, 2], greedy(40)), engine.submit([3], greedy(40))
    for _ in range(steps):
        engine.step()
    engine.cancel(a)
    told = list(a.token_ids)
    c = engine.submit([5, 6, 7], greedy(30))
    engine.step()
    engine.cancel(a)
    finish(engine, [b, c])
    assert (a.token_ids, a.finish_reason) == (told, "cancelled")
    assert told == plain((1, 2), 40)[: len(told)]
    assert [b.token_ids, c.token_ids] == [plain((3,), 40), plain((5, 6, 7), 30)]


@RUN_AHEAD
def test_late_results_of_a_cancelled_request_are_dropped(run_ahead: int) -> None:
    """C takes a row whose previous request was cancelled between steps: its metrics start from zero."""

    def metrics(engine: Any, request: Any) -> Any:
        finish(engine, [request])
        request.metrics.seconds = request.metrics.prefill_seconds = 0.0
        return request.output()

    prompts = [(1, 2), (5, 6, 7)]
    engine = engine_for(prompts, rows=1, run_ahead=run_ahead)
    a = engine.submit([1, 2], greedy(40))
    for _ in range(3):
        engine.step()
    engine.cancel(a)
    c = metrics(engine, engine.submit([5, 6, 7], greedy(30)))
    fresh = engine_for(prompts, rows=1, run_ahead=run_ahead)
    assert c == metrics(fresh, fresh.submit([5, 6, 7], greedy(30)))
    assert c.token_ids == plain((5, 6, 7), 30)


def test_cancelling_what_waits_and_what_has_ended() -> None:
    engine = engine_for([(1,)], rows=1)
    running, waiting = engine.submit([1], greedy(3)), engine.submit([2], greedy(3))
    engine.cancel(waiting)
    finish(engine, [running])
    before = running.output()
    engine.cancel(running)
    engine.cancel(waiting)
    assert running.output() == before
    assert running.finish_reason == "length"
    assert (waiting.finish_reason, waiting.token_ids) == ("cancelled", [])
    assert not engine.has_work


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_schedule(data: st.DataObject) -> None:
    """Requests come and are cancelled at any step: what ends is plain decoding, what is cancelled a prefix of it."""
    prompts = [(1,), (2, 3), (4, 5, 6, 7), tuple(range(13))]
    run_ahead = data.draw(st.integers(0, 2))
    period = data.draw(st.integers(2, 6))
    engine = engine_for(
        prompts,
        rows=data.draw(st.integers(1, 3)),
        width=data.draw(st.integers(1, 9)),
        right=lambda place, slot: (place * 2 + slot) % period != 0,
        budget=data.draw(st.sampled_from(["all", "adaptive", 0, 2, 5])),
        budget_delay=data.draw(st.integers(run_ahead + 1, 4)),
        cost=data.draw(st.sampled_from([FLAT, MILD, STAIRS])),
        prefill_tokens=data.draw(st.sampled_from([1, 3, 50])),
        run_ahead=run_ahead,
        eos_token_ids=(data.draw(st.integers(0, V - 1)),),
    )
    requests: list[Any] = []
    for _ in range(data.draw(st.integers(1, 25))):
        move = data.draw(st.sampled_from(["submit", "submit", "step", "step", "step", "cancel"]))
        if move == "submit":
            more = {"temperature": data.draw(st.sampled_from([0.0, 0.9])), "seed": len(requests)}
            requests.append(
                engine.submit(list(data.draw(st.sampled_from(prompts))), greedy(data.draw(st.integers(1, 20)), **more))
            )
        elif move == "step":
            engine.step()
            check_state(engine)
        elif requests:
            engine.cancel(data.draw(st.sampled_from(requests)))
    finish(engine, requests)
    for request in requests:
        whole = plain_decode(LAW, request.prompt, request.params, eos=engine.eos_token_ids)
        if request.finish_reason == "cancelled":
            assert request.token_ids == whole.ids[: len(request.token_ids)]
        else:
            assert (request.token_ids, request.finish_reason) == (whole.ids, whole.finish_reason)
    assert engine.owners == [None] * engine.target.rows
