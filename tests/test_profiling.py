"""The start-up measurement works at every length that the settings allow, and takes nobody's random numbers."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.policy import StepCostTable
from tests.plain import model_law, plain_decode
from tests.tiny import tiny_llama


@pytest.mark.parametrize("max_length", [2, 3, 9, 17, 18])
def test_the_shortest_rows_are_measured(max_length: int) -> None:
    model, params = tiny_llama(), SamplingParams(max_new_tokens=40)
    speculator = HybridSpeculator(copy.deepcopy(model), None, max_length=max_length)
    cost = speculator.cost
    assert isinstance(cost, StepCostTable)
    assert cost.sizes[-1] == 4 * (1 + speculator.engine.device_step.width)
    (output,) = speculator.generate([1], params)
    assert output.token_ids == plain_decode(model_law(model), (1,), params, max_length=max_length).ids
    assert len(output.token_ids) == max_length - 1
    speculator.engine.check_integrity()


def test_the_callers_random_numbers_are_not_taken() -> None:
    model = tiny_llama()
    drafter = CausalLMDrafter(copy.deepcopy(model))
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    HybridSpeculator(model, None, drafter=drafter, max_length=64)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))
