"""The DSpark drafter on the device: one graph for each part of a step, and buffers that stay where they are."""

from __future__ import annotations

import pytest
import torch

from hspark.drafters.dspark_context import buffer_bytes
from hspark.drafters.dspark_model import DSparkModel
from tests.assertions import assert_one_graph, assert_valid_chain
from tests.drafters.dspark_cases import GREEDY, bound, features_of, feed, rows_of, target_info
from tests.drafters.dspark_models import ALL_PARTS, MODELS, TEXT, a_batch


def test_a_step_compiles_to_one_graph(model: DSparkModel) -> None:
    drafter, rows = a_batch(model, drafting="probabilistic")
    assert_one_graph(lambda: drafter.propose(rows, ALL_PARTS))


def test_a_greedy_step_compiles_to_one_graph() -> None:
    drafter, rows = a_batch(MODELS["bonus_windowed_reduced"])
    assert_one_graph(lambda: drafter.propose(rows, GREEDY))


def test_observing_compiles_to_one_graph(model: DSparkModel) -> None:
    drafter = bound(model)
    features, row = features_of(model.config, TEXT[:4]), torch.zeros(4, dtype=torch.int64)

    def observe() -> list[torch.Tensor]:
        drafter.observe(features, row, torch.arange(4))
        return [t for buffer in drafter.buffers for t in buffer]

    assert_one_graph(observe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_allocated_once_and_as_large_as_foretold(model: DSparkModel, dtype: torch.dtype) -> None:
    drafter = bound(model, rows=3, max_length=50, target=target_info(model.config, dtype=dtype))
    held = [t for buffer in drafter.buffers for t in buffer]
    assert sum(t.nbytes for t in held) == buffer_bytes(model.config, 3, 50, dtype)
    places = [t.data_ptr() for t in held]
    feed(drafter, 1, TEXT[:20])
    chain = drafter.propose(rows_of([TEXT[:1], TEXT[:21], TEXT[:1]], max_length=50), GREEDY)
    assert_valid_chain(chain, 40)
    assert places == [t.data_ptr() for buffer in drafter.buffers for t in buffer]
