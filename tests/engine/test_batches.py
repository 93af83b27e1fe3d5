"""Rows are independent: admission, prefill, sizing and shapes, with and without steps in flight."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hspark.policy import choose_budget
from hspark.profiling import packed_sizes, profile_step
from hspark.step import Shape
from tests.engine.cases import RUN_AHEAD, V, engine_for, greedy, plain
from tests.fixtures import (
    FLAT,
    MILD,
    STAIRS,
    STEEP,
    check_state,
    finish,
    never,
    serve,
)


@RUN_AHEAD
def test_prompts_of_any_length_one_after_the_other(run_ahead: int) -> None:
    prompts = [tuple((i * n) % V for i in range(n)) for n in (3, 17, 5)]
    engine = engine_for(prompts, run_ahead=run_ahead)
    for prompt in prompts:
        (output,) = serve(engine, [(prompt, greedy(20))])
        assert output.token_ids == plain(prompt, 20)


@RUN_AHEAD
def test_rows_at_different_depths(run_ahead: int) -> None:
    """Eight rows, prompts of 1..8 tokens, caps from 1 to 40: each as if it were alone."""
    prompts = [tuple((3 * i + n) % V for i in range(n)) for n in range(1, 9)]
    caps = [1, 40, 7, 2, 25, 13, 3, 31]
    for budget in ("all", 8, "adaptive"):
        engine = engine_for(prompts, rows=8, budget=budget, cost=MILD, run_ahead=run_ahead)
        outputs = serve(engine, [(p, greedy(cap)) for p, cap in zip(prompts, caps, strict=True)])
        assert [o.token_ids for o in outputs] == [plain(p, cap) for p, cap in zip(prompts, caps, strict=True)]


@RUN_AHEAD
def test_more_requests_than_rows_are_queued_in_order(run_ahead: int) -> None:
    prompts = [(i,) for i in range(11)]
    engine = engine_for(prompts, rows=2, run_ahead=run_ahead)
    requests = [engine.submit(list(p), greedy(4 + i % 3)) for i, p in enumerate(prompts)]
    started: list[int] = []
    while not all(request.done for request in requests):
        engine.step()
        check_state(engine)
        started += [o.number for o in engine.owners if o is not None and o.number not in started]
    assert [r.token_ids for r in requests] == [plain(p, 4 + i % 3) for i, p in enumerate(prompts)]
    # A request that comes and goes within one step of the engine is never seen in a row.
    assert started == sorted(started)


@RUN_AHEAD
def test_long_prompts_do_not_hold_up_running_rows(run_ahead: int) -> None:
    """A prompt of 40 tokens in chunks of 4: beside it, the running row gains a token in every step."""
    first, long = (1, 2), tuple(i % V for i in range(40))
    engine = engine_for([first, long], rows=2, right=never, prefill_tokens=4, run_ahead=run_ahead)
    request = engine.submit(list(first), greedy(30))
    for _ in range(2 + run_ahead):
        engine.step()
    later = engine.submit(list(long), greedy(5))
    while later.prefilled < len(long) - 1:
        before, chunks = len(request.token_ids), len(engine.target.prefilled)
        engine.step()
        check_state(engine)
        assert len(request.token_ids) == before + 1
        assert sum(len(tokens) for _, _, tokens in engine.target.prefilled[chunks:]) <= 4
    finish(engine, [request, later])
    assert [request.token_ids, later.token_ids] == [plain(first, 30), plain(long, 5)]


@pytest.mark.parametrize("prefill_tokens", [1, 2, 3, 7, 1000])
def test_chunks_of_any_size(prefill_tokens: int) -> None:
    prompts = [tuple((7 * i + n) % V for i in range(n)) for n in (1, 2, 8, 9, 20)]
    engine = engine_for(prompts, rows=2, prefill_tokens=prefill_tokens)
    outputs = serve(engine, [(p, greedy(6)) for p in prompts])
    assert [o.token_ids for o in outputs] == [plain(p, 6) for p in prompts]
    longest = max(len(tokens) for _, _, tokens in engine.target.prefilled)
    assert longest <= prefill_tokens


@RUN_AHEAD
def test_a_small_budget_lets_every_row_progress(run_ahead: int) -> None:
    """Budget 8 for 8 rows with chains of 7: every row gains at least a token in every step, none waits for slots."""
    prompts = [(i,) for i in range(8)]
    engine = engine_for(prompts, rows=8, right=lambda place, slot: True, budget=8, run_ahead=run_ahead)
    requests = [engine.submit(list(p), greedy(24)) for p in prompts]
    for _ in range(run_ahead):
        engine.step()
    while not any(request.done for request in requests):
        before = [len(request.token_ids) for request in requests]
        engine.step()
        assert all(len(r.token_ids) > n for r, n in zip(requests, before, strict=True))
        assert sum(engine.target.calls[-1].valid) <= 16
    finish(engine, requests)
    assert [r.token_ids for r in requests] == [plain(p, 24) for p in prompts]


@RUN_AHEAD
def test_opting_out_costs_the_row_its_drafts_and_nobody_else(run_ahead: int) -> None:
    prompts = [(1,), (2,), (3,)]
    engine = engine_for(prompts, right=lambda place, slot: True, run_ahead=run_ahead)
    outputs = serve(engine, [(p, greedy(32, speculate=p != (2,))) for p in prompts])
    assert [o.token_ids for o in outputs] == [plain(p, 32) for p in prompts]
    assert [o.metrics.steps for o in outputs] == [4, 32, 4]
    assert outputs[1].metrics.drafters == {}
    assert set(outputs[1].sources) == {"target"}


# -- sizing ----------------------------------------------------------------------------------------------------------


def test_a_flat_cost_verifies_everything_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [(1,), (2,), (3,)]
    engine = engine_for(prompts, budget="adaptive", cost=FLAT)
    with caplog.at_level(logging.INFO, logger="hspark"):
        outputs = serve(engine, [(p, greedy(40)) for p in prompts])
    assert [record.message for record in caplog.records if "costs nothing" in record.message] == [
        f"a draft slot costs nothing at this size, so every draft is verified: {FLAT!r}"
    ]
    for output in outputs:
        assert output.metrics.drafters["ngram"].verified == output.metrics.drafters["ngram"].drafted


def test_a_steep_cost_verifies_next_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for([(1,), (2,), (3,)], budget="adaptive", cost=STEEP)
    with caplog.at_level(logging.INFO, logger="hspark"):
        outputs = serve(engine, [((i,), greedy(40)) for i in (1, 2, 3)])
    assert [o.metrics.drafters["ngram"].verified for o in outputs] == [0, 0, 0]
    assert [o.metrics.steps for o in outputs] == [40, 40, 40]
    assert "costs nothing" not in caplog.text


@RUN_AHEAD
@pytest.mark.parametrize("delay", [2, 3])
def test_a_step_is_sized_from_survivals_of_delay_steps_before(delay: int, run_ahead: int) -> None:
    """The decisions of every step, recomputed from the survivals that the steps before it produced."""
    prompts = [(1,), (2,), (3,)]
    engine = engine_for(prompts, budget="adaptive", cost=STAIRS, budget_delay=delay, run_ahead=run_ahead)
    engine.device_step.free_drafter.acceptance = 0.7
    requests = [engine.submit(list(p), greedy(50)) for p in prompts]
    survivals: list[torch.Tensor] = []
    while not any(request.done for request in requests):
        told = sum(len(r.prompt) + len(r.token_ids) for r in requests)
        engine.step()
        number = engine.step_number - 1
        known = torch.ones(3, 7) if number < delay else survivals[number - delay]
        assert engine.decision == choose_budget(known, 3, STAIRS, told)
        produced = (
            engine.in_flight[-1].outcome.wait().survival if engine.in_flight else engine.sizing.history._steps[number]
        )
        survivals.append(produced.clone())
    assert number > 2 * delay


@RUN_AHEAD
def test_a_recycled_row_starts_at_survival_one(run_ahead: int) -> None:
    """Until the new request's own survivals are old enough, its slots count as 1, not as the previous owner's."""
    engine = engine_for([(1,), (2,)], rows=1, budget="adaptive", run_ahead=run_ahead)
    engine.device_step.free_drafter.acceptance = 0.25
    first = engine.submit([1], greedy(9))
    finish(engine, [first])
    engine.submit([2], greedy(40))
    seen = []
    for _ in range(6):
        engine._admit()
        seen.append(float(engine.sizing.history.read(engine.step_number)[0, 0]))
        engine.step()
    assert seen == [1.0, 1.0, 0.25, 0.25, 0.25, 0.25]


def test_the_profiler_runs_the_sizes_that_it_records() -> None:
    """Every measured step packs exactly the tokens that its entry names, none of them padding."""
    engine = engine_for([(1,)], rows=3, max_length=64)
    engine.target.cache.fill_(0)
    table = profile_step(engine.device_step, repeats=2)
    sizes = (1, 4, 16, 24)
    assert sizes == (*packed_sizes(3, 7)[:-1:2], packed_sizes(3, 7)[-1])  # every second one, and the last
    assert table.sizes == list(sizes)
    packed = [sum(call.valid) for call in engine.target.calls]
    assert packed == [len(call.valid) for call in engine.target.calls]
    assert {size: packed.count(size) for size in sizes} == {size: len(packed) // len(sizes) for size in sizes}


@RUN_AHEAD
def test_padded_shapes_emit_the_same_tokens(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are static, as an accelerator needs them: bounded by the budget alone, filled with valid ids."""
    prompts = [(i,) for i in range(4)]
    for budget in (0, 3, "all"):
        engine = engine_for(prompts, budget=budget, run_ahead=run_ahead)

        def padded(kept: torch.Tensor, owned: list[int], context: int, settled: bool, engine: Any = engine) -> Shape:
            slots = min(engine.decision.budget, engine.device_step.width * len(owned))
            return Shape(len(owned) + slots + 5, 1 + min(engine.device_step.width, slots), context)

        monkeypatch.setattr(engine.sizing, "shape", padded)
        outputs = serve(engine, [(p, greedy(10 + 5 * i)) for i, p in enumerate(prompts)])
        assert [o.token_ids for o in outputs] == [plain(p, 10 + 5 * i) for i, p in enumerate(prompts)]
        assert all(len(call.valid) >= sum(call.valid) + 5 for call in engine.target.calls)


@RUN_AHEAD
def test_a_row_at_its_limit_beside_running_ones(run_ahead: int) -> None:
    """Row 0 ends by its cap while others go on without drafts: nobody reads row 0's positions instead of its own."""
    engine = engine_for([], rows=3, run_ahead=run_ahead)
    outputs = serve(engine, [((1,), greedy(3)), ((2,), greedy(9)), ((3,), greedy(20))])
    assert [o.token_ids for o in outputs] == [plain((1,), 3), plain((2,), 9), plain((3,), 20)]
