"""The public face: prompts, lists, streams, and what an output says."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark import HybridSpeculator, RequestOutput
from hspark.policy import LinearCost
from tests.circle import CIRCLE, circle_model, continuation, params, speculator
from tests.fixtures import FLAT, PatternDrafter
from tests.plain import model_law, plain_decode
from tests.saved_target import load_tiny_target, save_tiny_target
from tests.tiny import VOCAB, tiny_llama
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, decode, encode

# -- prompts and lists -----------------------------------------------------------------------------------------------


def test_a_prompt_may_be_text_ids_or_a_tensor() -> None:
    made = speculator()
    ids = encode("né")
    spellings: list[Any] = [
        "né",
        ids,
        tuple(ids),
        torch.tensor(ids),
        torch.tensor(ids).numpy(),
        list(torch.tensor(ids).numpy()),
    ]
    for prompt in spellings:
        (output,) = made.generate(prompt, params())
        assert output.prompt_token_ids == ids
        assert all(type(token) is int for token in output.prompt_token_ids)
        assert output.token_ids == continuation(len(ids) - 1, 30)
        assert output.text == decode(output.token_ids)


def test_messages_are_rendered_with_the_chat_template() -> None:
    made = speculator()
    messages = [{"role": "user", "content": "né"}]
    assert made.encode(messages) == encode("<user>né<assistant>")
    (output,) = made.generate(messages, params(3))
    assert output.prompt_token_ids == encode("<user>né<assistant>")


def test_lists_keep_their_order_and_may_be_longer_than_the_rows() -> None:
    """Nine prompts of all kinds on two rows, each with its own parameters."""
    made = speculator(max_batch_size=2)
    prompts: list[Any] = [[CIRCLE[i]] for i in range(8)] + ["né"]
    caps = [5, 30, 1, 12, 7, 3, 22, 9, 4]
    outputs = made.generate(prompts, [params(cap) for cap in caps])
    starts = [*range(8), len(encode("né")) - 1]
    assert [o.token_ids for o in outputs] == [continuation(s, cap) for s, cap in zip(starts, caps, strict=True)]
    assert [o.metrics.tokens for o in outputs] == caps
    same = made.generate(prompts, params(4))
    assert [o.token_ids for o in same] == [continuation(s, 4) for s in starts]


def test_two_dimensional_tensors_are_lists_of_prompts() -> None:
    outputs = speculator().generate(torch.tensor([CIRCLE[:2], CIRCLE[1:3]]), params(2))
    assert [o.token_ids for o in outputs] == [continuation(1, 2), continuation(2, 2)]


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    made = speculator(tokenizer=None)
    (output,) = made.generate(CIRCLE[:3], params(6))
    assert (output.token_ids, output.text) == (continuation(2, 6), None)
    chunks = list(made.stream(CIRCLE[:3], params(6)))
    assert [t for c in chunks for t in c.token_ids] == output.token_ids
    assert {c.text for c in chunks} == {""}


def test_defaults_of_parameters() -> None:
    """None means SamplingParams(): greedy, cut at max_length."""
    (output,) = speculator(max_length=40).generate(CIRCLE[:1])
    assert (len(output.token_ids), output.finish_reason) == (39, "length")


def test_an_output_is_json_ready() -> None:
    (output,) = speculator().generate(CIRCLE[:1], params(logprobs=True))
    record = json.loads(json.dumps(output.to_dict()))
    assert record["token_ids"] == output.token_ids
    assert record["metrics"]["acceptance_length"] == pytest.approx(30 / output.metrics.steps)


# -- streams ---------------------------------------------------------------------------------------------------------


def streamed(made: HybridSpeculator, prompt: Any, own: Any) -> tuple[list[int], str, str | None, list[str]]:
    chunks = list(made.stream(prompt, own))
    assert all(chunk.finish_reason is None and chunk.output is None for chunk in chunks[:-1])
    ids = [token for chunk in chunks for token in chunk.token_ids]
    sources = [source for chunk in chunks for source in chunk.sources]
    last = chunks[-1].output
    assert last is not None
    assert last.token_ids == ids
    return ids, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason, sources


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("stop", [(), ("z!",), ("🙂 x",), ("nowhere",)])
@pytest.mark.parametrize("cap", [1, 2, 7, 40])
def test_streams_add_up_to_the_returned_output(cap: int, stop: tuple[str, ...], run_ahead: int) -> None:
    """Ids, text, sources and finish reason, with characters of several tokens and stop strings across blocks."""
    made = speculator(run_ahead=run_ahead)
    prompt = CIRCLE + CIRCLE[:7]  # a full circle, so that the first step already drafts
    (output,) = made.generate(prompt, params(cap, stop=stop))
    assert streamed(made, prompt, params(cap, stop=stop)) == (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.sources,
    )


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_nothing_is_streamed_behind_a_stop_inside_a_block(run_ahead: int) -> None:
    made = speculator(run_ahead=run_ahead)
    prompt = CIRCLE + CIRCLE[:3]
    for place in range(1, 12):
        stop = continuation(2, place)[-1]
        own = params(40, stop_token_ids=(stop,))
        ids, _, reason, _ = streamed(made, prompt, own)
        assert (ids, reason) == (continuation(2, place), "stop")
        (output,) = made.generate(prompt, own)
        assert (output.token_ids, output.finish_reason) == (ids, reason)


def test_text_that_may_become_a_stop_string_is_not_shown_early() -> None:
    """At no point does what was streamed reach into the text that the stop string takes away."""
    made = speculator(policy="vanilla")
    shown = ""
    for chunk in made.stream(CIRCLE[:1], params(40, stop=("xyz!t",))):
        shown += chunk.text
        assert "x" not in shown
    assert shown == "é🙂 "


def test_closing_a_stream_cancels_its_request() -> None:
    made = speculator()
    stream = made.stream(CIRCLE[:1], params(60))
    first = next(stream)
    assert first.finish_reason is None
    assert any(made.engine.owners)
    stream.close()  # type: ignore[attr-defined]
    assert not any(made.engine.owners)
    assert not made.engine.waiting
    made.engine.check_integrity()
    (output,) = made.generate(CIRCLE[:1], params(5))
    assert output.token_ids == continuation(0, 5)


def test_a_stream_that_is_dropped_or_never_started_leaves_nothing() -> None:
    made = speculator()
    never = made.stream(CIRCLE[:1], params(60))
    never.close()  # type: ignore[attr-defined]
    dropped = made.stream(CIRCLE[:1], params(60))
    next(dropped)
    del dropped, never
    gc.collect()
    assert not made.engine.has_work


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_several_streams_at_once(run_ahead: int) -> None:
    """Five streams on two rows, read in turns, one closed midway, and a generate in between."""
    made = speculator(max_batch_size=2, run_ahead=run_ahead)
    streams = {i: made.stream([CIRCLE[i]], params(20 + i)) for i in range(5)}
    seen: dict[int, list[int]] = {i: [] for i in streams}
    turn = 0
    while streams:
        for i in list(streams):
            chunk = next(streams[i], None)
            if chunk is None:
                del streams[i]
                continue
            seen[i] += chunk.token_ids
        turn += 1
        if turn == 2:
            streams.pop(1).close()  # type: ignore[attr-defined]
            (output,) = made.generate([CIRCLE[7]], params(8))
            assert output.token_ids == continuation(7, 8)
    for i, ids in seen.items():
        whole = continuation(i, 20 + i)
        assert ids == (whole[: len(ids)] if i == 1 else whole)
    assert not any(made.engine.owners)


def test_an_interrupted_generate_leaves_a_clean_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made = speculator(max_batch_size=2)
    step, calls = made.engine.step, []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(made.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate([[token] for token in CIRCLE[:5]], params(30))
    assert not made.engine.has_work
    (output,) = made.generate(CIRCLE[:1], params(5))
    assert output.token_ids == continuation(0, 5)


# -- what an output says ---------------------------------------------------------------------------------------------


def test_end_tokens_come_from_the_model_or_its_tokenizer() -> None:
    assert speculator().engine.eos_token_ids == (TOY_EOS,)
    assert speculator(tokenizer=None).engine.eos_token_ids == ()
    assert speculator(eos_token_ids=(3, 4)).engine.eos_token_ids == (3, 4)
    made = speculator(eos_token_ids=(CIRCLE[4],))
    (output,) = made.generate(CIRCLE[:1], params())
    assert (output.token_ids, output.finish_reason) == (continuation(0, 4), "stop")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probabilities_are_the_targets_own(temperature: float) -> None:
    """Before temperature, penalties and filters, for drafted and own tokens alike; None unless asked for."""
    model = tiny_llama(num_hidden_layers=2)
    law = model_law(model)
    own = params(
        20, temperature=temperature, seed=3, logprobs=True, repetition_penalty=1.2, top_k=20, logit_bias={5: 2.0}
    )
    prompts = [(1, 2, 3), (4,)]
    plain = {p: plain_decode(law, p, own) for p in prompts}
    drafter = PatternDrafter({p: r.ids for p, r in plain.items()}, VOCAB, right=lambda place, slot: place % 4 != 1)
    made = HybridSpeculator(
        copy.deepcopy(model), None, lookup=drafter, policy="ngram_only", budget="all", cost=FLAT, max_length=64
    )
    with_logprobs = made.generate([list(p) for p in prompts], own)
    for output, prompt in zip(with_logprobs, prompts, strict=True):
        assert output.token_ids == plain[prompt].ids
        assert output.logprobs == pytest.approx(plain[prompt].logprobs, abs=1e-5)
        assert {"ngram", "target"} == set(output.sources)
    mixed = made.generate([list(p) for p in prompts], [own, params(20)])
    assert mixed[0].logprobs == pytest.approx(plain[prompts[0]].logprobs, abs=1e-5)
    assert mixed[1].logprobs is None


def test_lossy_combinations_are_refused_or_marked() -> None:
    """Sampled drafts under rejection verification with a policy that reads them."""
    model = circle_model()
    drafter = PatternDrafter({}, TOY_VOCAB, source=1)
    settings: dict[str, Any] = {"drafter": drafter, "drafting": "probabilistic", "verify": "rejection", "cost": FLAT}
    with pytest.raises(ValueError, match="changes the output distribution"):
        HybridSpeculator(copy.deepcopy(model), max_length=64, **settings)
    made = HybridSpeculator(copy.deepcopy(model), max_length=64, allow_lossy=True, **settings)
    assert made.generate(CIRCLE[:1], params(3, temperature=1.0))[0].lossy
    assert not made.generate(CIRCLE[:1], params(3))[0].lossy, "greedy outputs are exact in every combination"
    assert not speculator().generate(CIRCLE[:1], params(3))[0].lossy


def test_from_files_to_text(tmp_path: Path) -> None:
    """A target on disk, loaded by path, measured, and decoded: equal to plain decoding of the same files."""
    directory = save_tiny_target(tmp_path / "target")
    made = HybridSpeculator.from_pretrained(
        directory, dtype="float32", device="cpu", policy="ngram_only", max_length=96, max_batch_size=2, progress=False
    )
    assert made.name == "target"
    assert made.engine.eos_token_ids == (TOY_EOS,)
    prompts: list[Any] = ["the cat", [{"role": "user", "content": "hi"}]]
    outputs: list[RequestOutput] = made.generate(prompts, params(24))
    law = model_law(load_tiny_target(directory).model)
    for output in outputs:
        plain = plain_decode(law, output.prompt_token_ids, params(24), eos=(TOY_EOS,), decode=decode)
        assert (output.token_ids, output.text, output.finish_reason) == (plain.ids, plain.text, plain.finish_reason)
    assert outputs[0].metrics.drafters["ngram"].drafted > 0
    assert not isinstance(made.cost, LinearCost), "the cost was not measured"
