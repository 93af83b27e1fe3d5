"""What goes wrong in one place stays there: signals in a step, tokenizers and drafters that raise, several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hspark import HybridSpeculator
from hspark.engine import Engine
from tests.circle import CIRCLE, continuation, params, speculator
from tests.fixtures import PatternDrafter, ScriptedTarget, build_engine, finish
from tests.plain import plain_decode, random_law
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, toy_tokenizer

# Where a signal may hit: before, between and behind the parts of a step.
PLACES = ("_admit", "_prefill", "_propose", "_run_allocate", "_run_verify", "_collect", "_deliver")


def interrupt(engine: Engine, name: str, call: int, *, behind: bool) -> None:
    """Makes one call of an engine's function raise KeyboardInterrupt, before it does anything or when it has."""
    original, calls = getattr(engine, name), [0]

    def function(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not behind:
            raise KeyboardInterrupt
        result = original(*args, **options)
        if calls[0] == call:
            raise KeyboardInterrupt
        return result

    setattr(engine, name, function)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("place", PLACES)
def test_requests_go_on_after_an_interrupted_step(place: str, behind: bool, run_ahead: int) -> None:
    """Nothing is lost and nothing comes twice, whatever part of the step was interrupted, at any temperature."""
    law, vocab = random_law(16), 16
    jobs = [((1, 2, 3, 4, 5, 6), params(20)), ((4, 5), params(12, temperature=0.9, seed=7)), ((9,), params(15))]
    expected = [plain_decode(law, prompt, own).ids for prompt, own in jobs]
    known = {prompt: ids for (prompt, _), ids in zip(jobs, expected, strict=True)}
    for call in (1, 2, 5):
        drafter = PatternDrafter(known, vocab, right=lambda at, slot: at % 3 != 1)
        target = ScriptedTarget(law, vocab, rows=2)
        engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead, prefill_tokens=3)
        requests = [engine.submit(list(prompt), own) for prompt, own in jobs]
        interrupt(engine, place, call, behind=behind)
        with pytest.raises(KeyboardInterrupt):
            finish(engine, requests, limit=200)
        engine.check_integrity()
        finish(engine, requests, limit=200)
        assert [request.token_ids for request in requests] == expected


def test_an_open_stream_outlives_an_interrupted_call() -> None:
    made = speculator(max_batch_size=2)
    stream = made.stream(CIRCLE[:1], params(40))
    ids = list(next(stream).token_ids)
    interrupt(made.engine, "_collect", 2, behind=False)
    with pytest.raises(KeyboardInterrupt):
        made.generate(CIRCLE[3:4], params(30))
    for chunk in stream:
        ids += chunk.token_ids
    assert ids == continuation(0, 40)
    assert not made.engine.has_work


class Brittle:
    """A tokenizer that raises on one id, as byte decoders do on ids that pad a vocabulary."""

    def __init__(self, bad: int) -> None:
        self.inner, self.bad = toy_tokenizer(), bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        if self.bad in ids:
            raise ValueError("bytes must be in range(0, 256)")
        return self.inner.decode(ids, **options)


def test_a_token_that_cannot_be_decoded_ends_its_own_request() -> None:
    bad = TOY_EOS - 1
    made = speculator(tokenizer=Brittle(bad), max_batch_size=2)
    prompts = [CIRCLE[:1], CIRCLE[1:2]]
    fine, failed = made.generate(prompts, [params(20), params(10, logit_bias={bad: 1e4})])
    assert fine.token_ids == continuation(0, 20)
    assert (failed.finish_reason, failed.token_ids) == ("error", [bad])
    assert failed.error is not None
    assert failed.error.startswith(f"token id {bad} cannot be decoded: ValueError('bytes must")
    assert not made.engine.has_work
    assert made.generate(CIRCLE[2:3], params(5))[0].token_ids == continuation(2, 5)


class BadReader(PatternDrafter):
    """Raises while it reads a prompt."""

    def prefill(self, tokens: Any, row: int, start: int) -> None:
        raise RuntimeError("too long")


def test_a_drafter_that_cannot_read_a_prompt_costs_its_drafts_alone() -> None:
    made = speculator(lookup=BadReader({}, TOY_VOCAB))
    with pytest.warns(UserWarning, match="drafting failed and the step went on without drafts: RuntimeError"):
        (output,) = made.generate([CIRCLE[:4]], params(6))
    assert output.token_ids == continuation(3, 6)
    assert made.engine.draft_failures == 1


def test_threads_take_turns() -> None:
    made: HybridSpeculator = speculator(max_batch_size=3)
    results: dict[int, list[list[int]]] = {}

    def work(start: int) -> None:
        results[start] = [made.generate([CIRCLE[start : start + 1]], params(25))[0].token_ids for _ in range(4)]

    threads = [threading.Thread(target=work, args=(start,), daemon=True) for start in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == {start: [continuation(start, 25)] * 4 for start in range(5)}
    assert not made.engine.has_work


def test_graphs_stay_with_the_thread_that_records_them() -> None:
    made: HybridSpeculator = speculator()
    assert made.engine.only_thread is None, "nothing is bound to a thread where there are no CUDA graphs"
    made.engine.only_thread = threading.get_ident() + 1
    with pytest.raises(RuntimeError, match="compile=True: torch keeps CUDA graphs for the thread that made the engine"):
        made.generate([CIRCLE[:1]], params(5))
    made.engine.only_thread = threading.get_ident()
    assert made.generate([CIRCLE[:1]], params(5))[0].token_ids == continuation(0, 5)


def test_prompts_are_read_in_the_order_of_their_requests_and_in_bounded_parts() -> None:
    """A row that becomes free early does not let a newer request overtake, and a busy batch waits for one part."""
    law = random_law(16)
    engine = build_engine(ScriptedTarget(law, 16, rows=3), budget="all", prefill_tokens=4)
    short = engine.submit([1], params(2))
    busy = engine.submit([2], params(40))
    older = engine.submit([1 + i % 9 for i in range(13)], params(3))
    newer = engine.submit([1 + i % 7 for i in range(13)], params(3))
    read: list[tuple[int, int]] = []
    while not newer.done:
        before = (older.prefilled, newer.prefilled)
        engine.step()
        read.append((older.prefilled - before[0], newer.prefilled - before[1]))
    assert short.done
    assert not busy.done
    assert newer.number > older.number
    assert all(sum(parts) <= 4 for parts in read)
    first_newer = next(at for at, (_, part) in enumerate(read) if part)
    assert sum(part for part, _ in read[: first_newer + 1]) == 12, (
        "the newer prompt was begun before the older one was read"
    )
