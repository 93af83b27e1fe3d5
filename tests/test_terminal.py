"""Colours are only paint: the text underneath is unchanged, and each token wears its own source's colour."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspark.config import SamplingParams
from hspark.request import Request
from hspark.terminal import COLOURS, RESET, Painter, legend, paint, wants_colour
from tests.toy_tokenizer import TOY_EOS, decode, encode, toy_tokenizer

CODE = re.compile("\033\\[[0-9;]*m")
SOURCES = ("target", "ngram", "dspark", "something else")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "choice", "environ", "expected"),
    [
        (True, "auto", {}, True),
        (True, "auto", {"TERM": "xterm"}, True),
        (False, "auto", {}, False),
        (True, "auto", {"NO_COLOR": "1"}, False),
        (True, "auto", {"NO_COLOR": ""}, True),
        (True, "auto", {"TERM": "dumb"}, False),
        (True, "never", {}, False),
        (False, "always", {"NO_COLOR": "1"}, True),
    ],
)
def test_when_to_colour(terminal: bool, choice: str, environ: dict[str, str], expected: bool) -> None:
    assert wants_colour(Screen() if terminal else io.StringIO(), choice, environ) is expected


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="color='blue' is unknown; use 'auto', 'always' or 'never'"):
        wants_colour(Screen(), "blue")


def stream(
    ids: list[int], sources: list[str], pieces: list[int], stop: tuple[str, ...], stream: io.StringIO, colour: bool
) -> str:
    """Commits the tokens to a request, `pieces` of them at a time, and paints as its text grows; returns the text."""
    request = Request(0, [1], SamplingParams(stop=stop), 0, frozenset({TOY_EOS}), toy_tokenizer())
    painter = Painter(stream, toy_tokenizer(), colour)
    at, shown = 0, 0
    for count in [*pieces, len(ids)]:
        begin = at
        while at < min(begin + count, len(ids)) and not request.done:
            request.commit(ids[at], sources[at], None, at == len(ids) - 1)
            at += 1
        text = request.text or ""
        painter.write(text[shown:], ids[begin:at], sources[begin:at])
        shown = len(text)
    return request.text or ""


@given(
    text=st.text(alphabet="abc the\n\té€🙂", max_size=20),
    sources=st.lists(st.sampled_from(SOURCES), min_size=80, max_size=80),
    pieces=st.lists(st.integers(0, 5), max_size=10),
    stop=st.sampled_from([(), ("the",), ("b🙂",)]),
)
def test_colours_change_no_text(text: str, sources: list[str], pieces: list[int], stop: tuple[str, ...]) -> None:
    ids = encode(text)
    coloured, plain = io.StringIO(), io.StringIO()
    expected = stream(ids, sources, pieces, stop, coloured, True)
    stream(ids, sources, pieces, stop, plain, False)
    assert plain.getvalue() == expected
    assert CODE.sub("", coloured.getvalue()) == expected


@given(
    text=st.text(alphabet="abc the\n", min_size=1, max_size=20),
    sources=st.lists(st.sampled_from(SOURCES[:3]), min_size=40, max_size=40),
    pieces=st.lists(st.integers(1, 5), max_size=10),
)
def test_every_token_wears_its_source(text: str, sources: list[str], pieces: list[int]) -> None:
    """With tokens that are whole characters, the coloured runs are exactly the tokens."""
    ids = encode(text)
    screen = io.StringIO()
    stream(ids, sources, pieces, (), screen, True)
    expected = "".join(paint(decode([token]), source) for token, source in zip(ids, sources, strict=False))
    assert screen.getvalue() == expected


def test_character_of_several_tokens_wears_the_colour_of_the_last() -> None:
    ids = encode("é")
    assert len(ids) == 2
    screen = io.StringIO()
    stream(ids, ["target", "ngram"], [1, 1], (), screen, True)
    assert screen.getvalue() == f"{COLOURS['ngram']}é{RESET}"


def test_a_model_cannot_steer_the_terminal() -> None:
    text = "a\033[2Jb\r\x07\x9b1mc\td\n"
    screen, pipe = Screen(), io.StringIO()
    Painter(screen, None, False).write(text, [], [])
    Painter(pipe, None, False).write(text, [], [])
    assert screen.getvalue() == "a\ufffd[2Jb\ufffd\ufffd\ufffd1mc\td\n"
    assert pipe.getvalue() == text


def test_legend_shows_every_colour() -> None:
    for source in ("ngram", "dspark"):
        assert COLOURS[source] in legend()
