"""Limits of the context and of the matcher: clipped drafts, exact boundaries, empty drafts, state of one request."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hspark.config import SamplingParams
from hspark.drafters import NgramDrafter
from hspark.target import CausalTarget
from tests.fixtures import PatternDrafter, ScriptedTarget, always, build_engine, never, serve
from tests.plain import model_law, plain_decode, random_law, scripted_law, table_law
from tests.tiny import VOCAB, tiny_llama

V = 16
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


def greedy(cap: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=cap, **more)


@RUN_AHEAD
def test_drafts_longer_than_the_room_are_clipped(run_ahead: int) -> None:
    """Chains of 40 with room for 6: the row near the limit ends there, its neighbour as if it were alone."""
    near, far = tuple(range(10)) * 4 + (1, 2), (3, 4, 5)
    law = random_law(V)
    capacity = len(near) + 6
    known = {p: plain_decode(law, p, greedy(60), max_length=capacity).ids for p in (near, far)}
    target = ScriptedTarget(law, V, rows=2, max_length=capacity)
    drafter = PatternDrafter({p: ids + [1] * 50 for p, ids in known.items()}, V, width=40)
    engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead)
    first, second = serve(engine, [(near, greedy(60)), (far, greedy(30))])
    assert (first.token_ids, first.finish_reason) == (known[near], "length")
    assert len(first.token_ids) == 6
    assert (second.token_ids, second.finish_reason) == (known[far][:30], "length")


@RUN_AHEAD
@pytest.mark.parametrize("capacity", [12, 64, 65])
def test_prompt_and_output_are_cut_at_max_length(capacity: int, run_ahead: int) -> None:
    """prompt + max_new_tokens of L - 1, L and L + 1: the last is cut to L with finish reason "length"."""
    law = random_law(V, seed=1)
    target = ScriptedTarget(law, V, rows=1, max_length=capacity)
    for size in (1, 5, capacity - 2, capacity - 1):
        prompt = tuple(i % 7 for i in range(size))
        ids = plain_decode(law, prompt, greedy(capacity)).ids
        for right in (True, False):
            drafter = PatternDrafter({prompt: ids}, V, right=always if right else never)
            engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead)
            for cap in (capacity - size - 1, capacity - size, capacity - size + 1):
                if cap < 1:
                    continue
                (output,) = serve(engine, [(prompt, greedy(cap))])
                assert output.token_ids == ids[: min(cap, capacity - size)]
                assert output.finish_reason == "length"


def test_prompts_that_leave_no_room_are_refused() -> None:
    engine = build_engine(ScriptedTarget(random_law(V), V, max_length=12))
    with pytest.raises(ValueError, match=r"prompt has 12 tokens, .* max_length=12; use at most 11 tokens"):
        engine.submit([1] * 12, greedy(1))
    assert not engine.has_work


@RUN_AHEAD
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_any_rows_with_any_draft_length(rows: int, run_ahead: int) -> None:
    """Rows 1..4 by draft lengths 1..8, half of the drafts wrong, five requests of different lengths."""
    law = random_law(V, seed=2)
    prompts = [tuple(range(n, 2 * n)) for n in (1, 2, 4, 6, 8)]
    known = {p: plain_decode(law, p, greedy(24)).ids for p in prompts}
    for width in range(1, 9):
        drafter = PatternDrafter(known, V, width=width, right=lambda place, slot: (place * 7 + slot) % 3 != 0)
        target = ScriptedTarget(law, V, rows=rows)
        engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead)
        outputs = serve(engine, [(p, greedy(12 + 3 * i)) for i, p in enumerate(prompts)])
        assert [o.token_ids for o in outputs] == [known[p][: 12 + 3 * i] for i, p in enumerate(prompts)]


@RUN_AHEAD
def test_no_draft_in_any_row_is_plain_decoding(run_ahead: int) -> None:
    """All tokens differ, so nothing ever matches: one token a step, and no drafter in the metrics."""
    table = [(i + 1) % 60 for i in range(60)]
    target = ScriptedTarget(table_law(60, table), 60, rows=2)
    engine = build_engine(target, budget="all", run_ahead=run_ahead)
    outputs = serve(engine, [((0, 1, 2), greedy(30)), ((40,), greedy(12))])
    assert [o.token_ids for o in outputs] == [list(range(3, 33)), list(range(41, 53))]
    assert [o.metrics.steps for o in outputs] == [30, 12]
    assert [o.metrics.drafters for o in outputs] == [{}, {}]


@RUN_AHEAD
def test_one_row_without_drafts_beside_one_with(run_ahead: int) -> None:
    """A drafter that knows only one of two requests: both exact, and only one of them faster."""
    law = random_law(V, seed=3)
    known = {p: plain_decode(law, p, greedy(24)).ids for p in ((1, 2), (3, 4))}
    drafter = PatternDrafter({(3, 4): known[3, 4]}, V)
    engine = build_engine(ScriptedTarget(law, V, rows=2), free=drafter, budget="all", run_ahead=run_ahead)
    plain, fast = serve(engine, [((1, 2), greedy(24)), ((3, 4), greedy(24))])
    assert [plain.token_ids, fast.token_ids] == [known[1, 2], known[3, 4]]
    assert (plain.metrics.steps, fast.metrics.steps) == (24, 3)


# -- the n-gram matcher in the loop ----------------------------------------------------------------------------------


@RUN_AHEAD
def test_one_token_repeated(run_ahead: int) -> None:
    """A prompt of one id 48 times: every suffix matches every other; the output is that of plain decoding."""
    plain = tiny_llama(num_hidden_layers=2)
    law = model_law(plain)
    engine = build_engine(CausalTarget(copy.deepcopy(plain), 2, 128), budget="all", run_ahead=run_ahead)
    prompts = [(7,) * 48, (30,) * 48]
    outputs = serve(engine, [(p, greedy(32)) for p in prompts])
    assert [o.token_ids for o in outputs] == [plain_decode(law, p, greedy(32)).ids for p in prompts]


@RUN_AHEAD
def test_every_committed_token_is_matched_against(run_ahead: int) -> None:
    """A loop of five tokens: from two periods on, every draft is right, so the history lags by nothing."""
    loop = [3, 9, 4, 1, 12]
    table = dict(zip(loop, loop[1:] + loop[:1], strict=True))
    law = table_law(V, [table.get(i, 3) for i in range(V)])
    engine = build_engine(ScriptedTarget(law, V, max_length=128), budget="all", run_ahead=run_ahead)
    (output,) = serve(engine, [((3,), greedy(90))])
    assert output.token_ids == [loop[(i + 1) % 5] for i in range(90)]
    counts = output.metrics.drafters["ngram"]
    assert counts.accepted == counts.verified == counts.drafted
    first = output.sources.index("ngram")
    assert first <= 10  # five tokens must agree with five a period earlier
    assert output.metrics.steps == first + -(-(90 - first) // 16)


@RUN_AHEAD
def test_matcher_state_belongs_to_the_request(run_ahead: int) -> None:
    """A short looping request after a long one in the same row: its metrics are those of a fresh engine."""
    long, short = tuple((5 * i + i * i) % V for i in range(60)), (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1)
    law = random_law(V, seed=5, order=2)

    def fresh() -> Any:
        return build_engine(ScriptedTarget(law, V, rows=1, max_length=128), budget="all", run_ahead=run_ahead)

    used = fresh()
    serve(used, [(long, greedy(60))])
    (after,) = serve(used, [(short, greedy(40))])
    (alone,) = serve(fresh(), [(short, greedy(40))])
    for metrics in (after.metrics, alone.metrics):
        metrics.seconds = metrics.prefill_seconds = 0.0
    assert after == alone
    assert after.metrics.drafters["ngram"].drafted > 0


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["proposed", "ngram_first", "extension", "model_only", "ngram_only", "vanilla"])
def test_any_combination_of_drafters(name: str, sampled: bool) -> None:
    """{none, n-gram, model, both} x {greedy, sampled}: one text."""
    law = random_law(V, seed=6, order=2)
    params = greedy(40, temperature=0.7 if sampled else 0.0, seed=11)
    prompts = [(1, 2, 3), (4, 5, 4, 5, 4, 5, 4, 5)]
    known = {p: plain_decode(law, p, params).ids for p in prompts}
    model = PatternDrafter(known, V, width=4, right=lambda place, slot: place % 4 != 3, source=1)
    for run_ahead in (0, 1):
        target = ScriptedTarget(law, V, rows=2)
        engine = build_engine(target, name, model=model, free=NgramDrafter(min_match=2), run_ahead=run_ahead)
        outputs = serve(engine, [(p, params) for p in prompts])
        assert [o.token_ids for o in outputs] == list(known.values())


@RUN_AHEAD
def test_budgets_change_steps_and_never_the_text(run_ahead: int) -> None:
    """Budget 0, too small for every row, exact, and far beyond the slots there are."""
    script = [1, 2, 3, 4, 5] * 8
    law = scripted_law(V, ((9, 1), script), ((9, 2), script))
    steps: dict[int | str, int] = {}
    budgets: list[Any] = [0, 1, 5, 30, 10_000, "all"]
    for budget in budgets:
        target = ScriptedTarget(law, V, rows=2)
        engine = build_engine(target, budget=budget, run_ahead=run_ahead)
        outputs = serve(engine, [((9, 1), greedy(40)), ((9, 2), greedy(40))])
        assert [o.token_ids for o in outputs] == [script, script]
        steps[budget] = sum(o.metrics.steps for o in outputs)
        assert max(sum(call.valid) for call in target.calls) <= 2 + (30 if budget == "all" else budget)
    assert steps[0] == 80
    assert steps[0] > steps[1] > steps[5] > steps[30] == steps[10_000] == steps["all"]


def test_vocabulary_of_a_real_model_is_respected() -> None:
    """A drafter that proposes the largest id everywhere does not disturb a model of that vocabulary."""
    plain = tiny_llama(num_hidden_layers=2)
    prompt = (1, 2, 3)
    drafter = PatternDrafter({prompt: [VOCAB - 2] * 40}, VOCAB, right=lambda place, slot: False)
    engine = build_engine(CausalTarget(copy.deepcopy(plain), 1, 64), free=drafter, budget="all")
    (output,) = serve(engine, [(prompt, greedy(20))])
    assert output.token_ids == plain_decode(model_law(plain), prompt, greedy(20)).ids
