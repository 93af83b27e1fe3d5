"""When a step is sized from its own survivals, and when from older ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hspark.building import settle
from hspark.config import EngineConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SAMPLED: dict[str, Any] = {"policy": "ngram_first", "drafting": "probabilistic", "verify": "rejection"}


@pytest.mark.parametrize(
    ("settings", "device", "delay"),
    [
        ({}, CPU, 0),
        ({}, CUDA, 2),
        ({"run_ahead": 1}, CPU, 2),
        (SAMPLED, CPU, 2),
        ({**SAMPLED, "budget": "all"}, CPU, 0),
        ({"budget_delay": 3}, CPU, 3),
        ({"budget_delay": 0}, CUDA, 0),
    ],
)
def test_budget_delay(settings: dict[str, Any], device: torch.device, delay: int) -> None:
    assert settle(EngineConfig(**settings), device, has_model=True).budget_delay == delay


def test_without_a_model_drafter_nothing_is_sampled() -> None:
    assert settle(EngineConfig(**SAMPLED), CPU, has_model=False).budget_delay == 0
