"""A stand-in for llama-cpp-python, with a clock of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeLlama:
    """llama_cpp.Llama as the arm uses it: greedy tokens of `follow`, a second for the prompt, a tenth per forward."""

    def __init__(self, follow: Any, clock: Clock | None = None, draft: Any = None, **options: Any) -> None:
        self.follow, self.clock, self.draft, self.options = follow, clock or Clock(), draft, options
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def generate(self, tokens: list[int], temp: float, repeat_penalty: float) -> Iterator[int]:
        assert (temp, repeat_penalty) == (0.0, 1.0)
        text = list(tokens)
        self.clock.now += 1.0
        while True:
            # With a drafter every forward but the prompt's yields two tokens.
            for _ in range(1 if self.draft is None or len(text) == len(tokens) else 2):
                text.append(self.follow(text))
                yield text[-1]
            if self.draft is not None:
                self.draft(text)
            self.clock.now += 0.1


def counter(text: list[int]) -> int:
    return len(text)


def install_fake_llama(monkeypatch: pytest.MonkeyPatch, follow: Any) -> list[FakeLlama]:
    """Puts a module named llama_cpp into place; returns the list of what is opened through it."""
    opened: list[FakeLlama] = []

    def open_model(draft_model: Any = None, **options: Any) -> FakeLlama:
        opened.append(FakeLlama(follow, draft=draft_model, **options))
        return opened[-1]

    module, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    module.Llama = open_model  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: lambda text: text[:num_pred_tokens]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    return opened
