"""One request on the host: text that becomes certain piece by piece, stop strings, and the books."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hspark.config import SamplingParams
from hspark.request import Detokenizer, Request
from tests.toy_tokenizer import TOY_EOS, decode, encode, toy_tokenizer

NAMES = ["target", "dspark", "ngram"]


def request(tokenizer: Any = None, stop_ids: tuple[int, ...] = (), **params: Any) -> Request:
    own = SamplingParams(**{"max_new_tokens": 100, **params})
    return Request(0, [1, 2], own, seed=1, stop_ids=frozenset(stop_ids), tokenizer=tokenizer)


# -- detokenizing ----------------------------------------------------------------------------------------------------


@given(st.text(max_size=30))
@example("né🙂 the xyz")
@example("a\ufffdb")
@example("👩‍👩‍👧 e\u0301")
def test_pieces_add_up_to_the_text(text: str) -> None:
    ids = encode(text)
    detokenizer = Detokenizer(toy_tokenizer())
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, TOY_EOS), max_size=40))
@example([255, 255, 255])
def test_pieces_add_up_for_any_ids(ids: list[int]) -> None:
    """Also for bytes that are no text, and for special tokens, which show nothing."""
    detokenizer = Detokenizer(toy_tokenizer())
    pieces = "".join(detokenizer.push(token) for token in ids)
    assert pieces + detokenizer.finish() == decode(ids)


def test_a_character_is_shown_when_its_last_token_comes() -> None:
    detokenizer = Detokenizer(toy_tokenizer())
    pieces = [detokenizer.push(token) for token in encode("é🙂!")]
    assert pieces == ["", "é", "", "", "", "🙂", "!"]


def test_finishing_twice_shows_nothing_twice() -> None:
    detokenizer = Detokenizer(toy_tokenizer())
    assert detokenizer.push(encode("🙂")[0]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


class WordTokenizer:
    """Decodes words with blanks between them but none in front, as sentencepiece models do."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_blanks_between_words_survive() -> None:
    """A tokenizer that drops a leading blank: pieces are cut from longer decodings, so no blank is lost."""
    detokenizer = Detokenizer(WordTokenizer())
    assert [detokenizer.push(i) for i in (3, 4, 5)] == ["w3", " w4", " w5"]


def test_long_outputs_decode_only_their_newest_tokens() -> None:
    """The work per token does not grow with the output."""
    longest = 0

    class Counting(WordTokenizer):
        def decode(self, ids: list[int], **options: Any) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    detokenizer = Detokenizer(Counting())
    for token in range(500):
        detokenizer.push(token)
    assert longest <= 3


# -- ends ------------------------------------------------------------------------------------------------------------


def feed(own: Request, ids: list[int], cap: int | None = None) -> list[str]:
    """Commits ids until the request ends; returns what could be shown after each."""
    shown = []
    for place, token in enumerate(ids):
        go_on = own.commit(token, "target", None, last=place + 1 == cap)
        shown.append(own.text or "")
        assert go_on != own.done
        if own.done:
            break
    return shown


@given(
    st.text(alphabet="ab é🙂", max_size=15), st.lists(st.text(alphabet="ab é🙂", min_size=1, max_size=4), max_size=3)
)
def test_shown_text_only_grows_and_ends_before_the_stop(text: str, stops: list[str]) -> None:
    own = request(toy_tokenizer(), stop=stops)
    ids = encode(text)
    shown = feed(own, ids, cap=len(ids))
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)
    found = [at for stop in stops if (at := (own.text or "").find(stop)) >= 0]
    assert not found
    assert text.startswith(own.text or "")
    if ids:
        assert (own.finish_reason == "stop") == any(stop in text for stop in stops)


def test_text_that_may_begin_a_stop_string_is_withheld() -> None:
    own = request(toy_tokenizer(), stop="abcd")
    # "abc" is one token, and so is "ab".
    assert feed(own, encode("xyzabeabca")) == ["x", "xy", "xyz", "xyz", "xyzabe", "xyzabe", "xyzabeabc"]
    own.finish("cancelled")
    assert own.text == "xyzabeabca"


def test_stop_beats_length_on_the_same_token() -> None:
    own = request(toy_tokenizer(), stop="c")
    feed(own, encode("xyc"), cap=3)
    assert (own.finish_reason, own.text) == ("stop", "xy")
    own = request(stop_ids=(9,))
    feed(own, [4, 9], cap=2)
    assert own.finish_reason == "stop"


def test_special_tokens_show_nothing() -> None:
    own = request(toy_tokenizer(), stop_ids=(TOY_EOS,))
    feed(own, [*encode("hi"), TOY_EOS])
    assert (own.text, own.finish_reason) == ("hi", "stop")
    own = request(toy_tokenizer())
    feed(own, [encode("h")[0], TOY_EOS, encode("i")[0]], cap=3)
    assert own.text == "hi"


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_end_from_outside_keeps_what_there_is(reason: str) -> None:
    """Half a character is shown as broken, and nothing changes afterwards."""
    own = request(toy_tokenizer())
    feed(own, encode("ab🙂")[:-1])
    own.finish(reason, "why")
    before = own.output()
    assert (before.text, before.finish_reason, before.error) == (decode(encode("ab🙂")[:-1]), reason, "why")
    own.finish("stop")
    assert own.output() == before


def test_without_a_tokenizer_there_is_no_text() -> None:
    own = request()
    assert own.text is None
    feed(own, [1, 2, 3], cap=3)
    assert own.output().text is None


# -- the books -------------------------------------------------------------------------------------------------------


def test_steps_are_booked_by_drafter_and_position() -> None:
    """A chain of two model slots and two n-gram slots, of which three are verified and two delivered."""
    own = request()
    for token, source in ((5, "dspark"), (6, "dspark"), (7, "target")):
        own.commit(token, source, -0.5, last=False)
    own.count_step(NAMES, [1, 1, 2, 2], drafted=4, kept=3, delivered=2, reason=4)
    own.commit(8, "target", -0.25, last=True)
    own.count_step(NAMES, [0, 0, 0, 0], drafted=0, kept=0, delivered=0, reason=1)
    metrics = own.output().metrics
    assert (metrics.steps, metrics.tokens, metrics.acceptance_length) == (2, 4, 2.0)
    assert metrics.reasons == {"dspark:extended": 1, "none:no_match": 1}
    model, ngram = metrics.drafters["dspark"], metrics.drafters["ngram"]
    assert (model.drafted, model.verified, model.accepted) == (2, 2, 2)
    assert (model.verified_by_position, model.accepted_by_position) == ([1, 1], [1, 1])
    assert (ngram.drafted, ngram.verified, ngram.accepted) == (2, 1, 0)
    assert (ngram.verified_by_position, ngram.accepted_by_position) == ([0, 0, 1], [])
    assert (model.reached_by_position, ngram.reached_by_position) == ([1, 1], [0, 0, 1])


def test_a_stop_at_a_draft_is_the_steps_own_token() -> None:
    """Then the verdict on that draft and on those behind it is not counted as one."""
    own = request(stop_ids=(6,))
    assert own.commit(5, "ngram", None, last=False)
    assert not own.commit(6, "ngram", None, last=False)
    own.count_step(NAMES, [2, 2, 2], drafted=3, kept=3, delivered=1, reason=0)
    assert own.sources == ["ngram", "target"]
    counts = own.metrics.drafters["ngram"]
    assert (counts.accepted, counts.reached_by_position, counts.accepted_by_position) == (1, [1], [1])


def test_an_unstarted_request_has_zero_everywhere() -> None:
    own = request()
    own.finish("cancelled")
    output = own.output()
    assert (output.token_ids, output.sources, output.logprobs) == ([], [], None)
    assert output.metrics.acceptance_length == 0.0
    assert output.metrics.drafters == {}


def test_log_probabilities_are_kept_only_when_asked_for() -> None:
    for asked in (False, True):
        own = request(logprobs=asked)
        own.commit(5, "target", -0.5 if asked else None, last=True)
        assert own.output().logprobs == ([-0.5] if asked else None)
