"""Settings shared by every test: hypothesis never judges time, and draws the same examples in every CI run."""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that reach the compiler from now on, which runs them as they are."""
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **kwargs: plain(f, backend=backend, **kwargs))
    return seen
