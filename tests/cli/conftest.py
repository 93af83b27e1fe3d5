"""A tiny target, a cost file, and no terminal, for every test of this directory."""

from __future__ import annotations

import io
import sys

import pytest

from hspark.policy import LinearCost
from tests.saved_target import save_tiny_target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_target(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cost file, so that nothing is measured."""
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    LinearCost(1.0, 0.05).save(path)
    return str(path)


@pytest.fixture
def common(tiny: str, cost: str) -> list[str]:
    return ["--model", tiny, "--dtype", "float32", "--cost", cost]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input as in a script: no terminal, and empty."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.delenv("NO_COLOR", raising=False)
