"""Where an output ends: end-of-sequence tokens, stop strings, the cap, wherever they fall inside a committed block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hspark.config import SamplingParams
from hspark.target import CausalTarget
from tests.fixtures import PatternDrafter, ScriptedTarget, build_engine, serve
from tests.plain import model_law, plain_decode, scripted_law
from tests.tiny import VOCAB, tiny_mistral
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, decode, encode, toy_tokenizer

V, EOS = 16, 15
PROMPT = (1, 2, 3)
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])
# The continuation without an end: no id is EOS, no five tokens repeat within the first 40.
ENDLESS = [(7 * i + i * i // 3) % 14 for i in range(40)]


def oracle_engine(script: list[int], *, width: int = 7, vocab: int = V, after: int = 0, **options: Any) -> Any:
    """A scripted target with a drafter that is always right, also beyond the end of the output."""
    target = ScriptedTarget(scripted_law(vocab, (PROMPT, script), after=after), vocab)
    oracle = PatternDrafter({PROMPT: script}, vocab, width=width)
    return build_engine(target, free=oracle, **{"budget": "all", **options})


def with_eos(place: int) -> list[int]:
    """A script whose token at output place `place` (from 1) is EOS; it goes on behind it."""
    return [*ENDLESS[: place - 1], EOS, *ENDLESS[place:]]


@RUN_AHEAD
def test_first_eos_ends_the_output_though_more_was_accepted(run_ahead: int) -> None:
    """EOS as the second token of a block of eight: both engines and plain decoding return two tokens."""
    script = with_eos(2)
    engine = oracle_engine(script, eos_token_ids=(EOS,), run_ahead=run_ahead)
    (output,) = serve(engine, [(PROMPT, SamplingParams(max_new_tokens=20))])
    assert output.token_ids == script[:2]
    assert output.finish_reason == "stop"
    assert output.metrics.steps == 1


@RUN_AHEAD
def test_earlier_of_stop_and_cap_wins_on_all_cells(run_ahead: int) -> None:
    """EOS at output place 1..8 against caps of 1..8; on the same token the stop wins."""
    for place in range(1, 9):
        engine = oracle_engine(with_eos(place), eos_token_ids=(EOS,), run_ahead=run_ahead)
        for cap in range(1, 9):
            params = SamplingParams(max_new_tokens=cap)
            plain = plain_decode(engine.target.law, PROMPT, params, eos=(EOS,))
            (output,) = serve(engine, [(PROMPT, params)])
            assert (output.token_ids, output.finish_reason) == (plain.ids, plain.finish_reason), (place, cap)
            assert output.finish_reason == ("stop" if place <= cap else "length")
            assert output.metrics.tokens == len(output.token_ids)


@RUN_AHEAD
@pytest.mark.parametrize("width", [3, 7])
def test_exactly_the_cap_is_returned_and_counted(width: int, run_ahead: int) -> None:
    engine = oracle_engine(ENDLESS, width=width, run_ahead=run_ahead)
    for cap in range(1, 17):
        (output,) = serve(engine, [(PROMPT, SamplingParams(max_new_tokens=cap))])
        assert output.token_ids == ENDLESS[:cap]
        assert output.metrics.tokens == len(output.sources) == cap
        assert output.metrics.steps == -(-cap // (width + 1))


@RUN_AHEAD
@pytest.mark.parametrize("cap", [1, 5])
def test_very_first_token_may_be_the_end(cap: int, run_ahead: int) -> None:
    """An output that is one EOS holds that EOS."""
    engine = oracle_engine(with_eos(1), eos_token_ids=(EOS,), run_ahead=run_ahead)
    (output,) = serve(engine, [(PROMPT, SamplingParams(max_new_tokens=cap))])
    assert (output.token_ids, output.finish_reason) == ([EOS], "stop")


def test_a_step_never_counts_more_than_it_delivered() -> None:
    """tokens = steps + accepted, also where EOS cuts a block: the token that ends a block is the step's own."""
    for place in range(1, 20):
        engine = oracle_engine(with_eos(place), eos_token_ids=(EOS,))
        (output,) = serve(engine, [(PROMPT, SamplingParams(max_new_tokens=40))])
        counts = output.metrics.drafters.get("ngram")
        accepted = counts.accepted if counts else 0
        assert accepted == len(output.token_ids) - output.metrics.steps
        assert accepted == output.sources.count("ngram")
        assert counts is None or (sum(counts.accepted_by_position) == accepted <= counts.verified <= counts.drafted)


def test_several_end_tokens_and_ignoring_them() -> None:
    """The model's ids and the request's own end it; ignore_eos switches off only the model's."""
    script = [4, 5, EOS, 6, 7, 8]
    engine = oracle_engine(script, eos_token_ids=(EOS, 9))
    ends = {(): 3, (7,): 3, (5,): 2, (4, 6): 1}
    for own, length in ends.items():
        (output,) = serve(engine, [(PROMPT, SamplingParams(max_new_tokens=6, stop_token_ids=own))])
        assert (output.token_ids, output.finish_reason) == (script[:length], "stop")
    (output,) = serve(engine, [(PROMPT, SamplingParams(max_new_tokens=6, ignore_eos=True))])
    assert (output.token_ids, output.finish_reason) == (script, "length")
    (output,) = serve(engine, [(PROMPT, SamplingParams(max_new_tokens=6, ignore_eos=True, stop_token_ids=(7,)))])
    assert (output.token_ids, output.finish_reason) == (script[:5], "stop")


def text_engine(script: list[int], prompt: list[int], width: int, run_ahead: int) -> Any:
    law = scripted_law(TOY_VOCAB, (prompt, script), after=TOY_EOS)
    oracle = PatternDrafter({tuple(prompt): script}, TOY_VOCAB, width=width)
    target = ScriptedTarget(law, TOY_VOCAB, max_length=128)
    return build_engine(
        target, free=oracle, budget="all", eos_token_ids=(TOY_EOS,), tokenizer=toy_tokenizer(), run_ahead=run_ahead
    )


STOPS: list[tuple[str, tuple[str, ...], str, str]] = [
    # (what the target writes, stop strings, text that is returned, finish reason)
    ("abcabd xyz", ("abd",), "abc", "stop"),  # begins inside one token, ends inside another
    ("one. two. three", (". t",), "one", "stop"),  # the first of two occurrences
    ("stop here now", ("now", "here"), "stop ", "stop"),  # the earliest of several, whatever their order
    ("aaab tail", ("ab", "aaab"), "", "stop"),  # both end on one token: the one that begins earlier
    ("naïve café 🙂 end", ("é 🙂",), "naïve caf", "stop"),  # characters of several tokens
    ("🙂🙃🙂", ("🙃",), "🙂", "stop"),
    ("a the b the c", ("the c",), "a the b ", "stop"),
    ("\n\nanswer\n\n", ("\n\n",), "", "stop"),  # at the very start
    ("nothing to see", ("unseen",), "nothing to see", "stop"),  # ends by EOS
    ("almost stopp", ("stopped",), "almost stopp", "stop"),  # a beginning of a stop string is text after all
]


@RUN_AHEAD
@pytest.mark.parametrize(("written", "stops", "text", "reason"), STOPS)
def test_stop_strings_cut_the_text(
    written: str, stops: tuple[str, ...], text: str, reason: str, run_ahead: int
) -> None:
    prompt, script = encode("Q: "), [*encode(written), TOY_EOS]
    params = SamplingParams(max_new_tokens=60, stop=stops)
    for width in (1, 3, 15):
        engine = text_engine(script, prompt, width, run_ahead)
        plain = plain_decode(engine.target.law, prompt, params, eos=(TOY_EOS,), decode=decode)
        (output,) = serve(engine, [(prompt, params)])
        assert (output.text, output.finish_reason) == (text, reason)
        assert (plain.text, plain.finish_reason) == (text, reason)
        assert output.token_ids == plain.ids


@RUN_AHEAD
def test_stop_string_against_the_cap_on_every_cell(run_ahead: int) -> None:
    """A stop string that completes on token 1..8 against caps 1..8: as plain decoding, the stop first on a tie."""
    prompt, written = encode("Q: "), encode("0123456789")
    engine = text_engine(written, prompt, 7, run_ahead)
    for last in range(1, 9):
        for cap in range(1, 9):
            params = SamplingParams(max_new_tokens=cap, stop="0123456789"[max(0, last - 2) : last])
            plain = plain_decode(engine.target.law, prompt, params, eos=(TOY_EOS,), decode=decode)
            (output,) = serve(engine, [(prompt, params)])
            assert (output.token_ids, output.text, output.finish_reason) == (plain.ids, plain.text, plain.finish_reason)
            assert output.finish_reason == ("stop" if last <= cap else "length")


def test_cap_inside_a_character_shows_it_as_broken() -> None:
    """Text that can no longer complete is shown as it is, and tokens stay exact."""
    prompt, script = encode("Q: "), encode("x🙂y")
    for cap in range(1, 7):
        engine = text_engine(script, prompt, 7, 0)
        (output,) = serve(engine, [(prompt, SamplingParams(max_new_tokens=cap))])
        assert output.token_ids == script[:cap]
        assert output.text == decode(script[:cap])


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_stops_in_any_text_equal_plain_decoding(data: st.DataObject) -> None:
    """Random texts over few characters, random stop strings, drafts of any width and quality."""
    symbols = st.text(alphabet="ab é🙂", min_size=1, max_size=24)
    prompt, script = encode("Q: "), [*encode(data.draw(symbols)), TOY_EOS]
    stops = tuple(data.draw(st.lists(st.text(alphabet="ab é🙂", min_size=1, max_size=4), max_size=3)))
    params = SamplingParams(max_new_tokens=data.draw(st.integers(1, 40)), stop=stops)
    engine = text_engine(script, prompt, data.draw(st.integers(1, 9)), data.draw(st.integers(0, 1)))
    period = data.draw(st.integers(2, 9))
    engine.device_step.free_drafter.right = lambda place, slot: place % period != 1
    plain = plain_decode(engine.target.law, prompt, params, eos=(TOY_EOS,), decode=decode)
    (output,) = serve(engine, [(prompt, params)])
    assert (output.token_ids, output.text, output.finish_reason) == (plain.ids, plain.text, plain.finish_reason)


@RUN_AHEAD
def test_next_request_in_a_row_starts_clean_after_a_stop_inside_a_block(run_ahead: int) -> None:
    """A stop drops processed drafts; what they left in keys and values never reaches the row's next request."""
    plain = tiny_mistral()
    law = model_law(plain)
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in (9, 4, 14)]
    free = {prompt: plain_decode(law, prompt, SamplingParams(max_new_tokens=24)).ids for prompt in prompts}
    target = CausalTarget(copy.deepcopy(plain), 1, 64)
    engine = build_engine(target, free=PatternDrafter(free, VOCAB), budget="all", run_ahead=run_ahead)
    for prompt in prompts * 2:
        stop = free[prompt][2]
        params = SamplingParams(max_new_tokens=24, stop_token_ids=(stop,))
        (output,) = serve(engine, [(prompt, params)])
        assert output.token_ids == plain_decode(law, prompt, params).ids
        (output,) = serve(engine, [(prompt, SamplingParams(max_new_tokens=20))])
        assert output.token_ids == free[prompt][:20]
