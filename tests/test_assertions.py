"""The shared checks accept what is right and fail on what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hspark.core import Chain
from tests.assertions import assert_equal_trees, assert_one_graph, assert_valid_chain


def _chain() -> Chain:
    return Chain.build(torch.tensor([[1, 2, 0]]), torch.tensor([2]), torch.tensor([[0.5, 0.5, 0.0]]), source=1)


def test_valid_chain_passes() -> None:
    assert_valid_chain(_chain(), vocab=3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", torch.tensor([[1, 3, 0]]), "not below"),
        ("tokens", torch.tensor([[1, -1, 0]]), "negative"),
        ("length", torch.tensor([4]), "leaves 0..3"),
        ("survival", torch.tensor([[0.25, 0.5, 0.0]]), "increases"),
        ("survival", torch.tensor([[0.5, 0.25, 0.1]]), "past the end"),
        ("survival", torch.tensor([[0.5, 0.2, 0.0]]), "not close"),
        ("source", None, "None"),
        ("source", torch.tensor([[1, 1, 1]], dtype=torch.int32), "int32"),
        ("acceptance", torch.tensor([[0.5, 0.5]]), "shape"),
        ("point_mass", torch.tensor([[False, True, True]]), "log_probs is None"),
        ("log_probs", torch.zeros(1, 2, 3), "log_probs has shape"),
    ],
)
def test_a_broken_promise_is_found(field: str, value: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_valid_chain(_chain()._replace(**{field: value}), vocab=3)


def test_a_draft_law_that_does_not_sum_to_one_is_found() -> None:
    chain = _chain()._replace(point_mass=torch.zeros(1, 3, dtype=torch.bool), log_probs=torch.zeros(1, 3, 3))
    with pytest.raises(AssertionError, match="not close"):
        assert_valid_chain(chain)


def test_one_graph_rejects_a_host_read() -> None:
    def reads(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1

    assert assert_one_graph(lambda x: x * 2, torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(Exception, match=r"item|branching|Unsupported"):
        assert_one_graph(reads, torch.ones(2))


def test_equal_trees_compares_structure_and_bits() -> None:
    assert_equal_trees((torch.ones(2), 3), (torch.ones(2), 3))
    for other in ((torch.ones(3), 3), (torch.ones(2), 4), (torch.ones(2),), (torch.full((2,), 1 + 1e-6), 3)):
        with pytest.raises(AssertionError):
            assert_equal_trees((torch.ones(2), 3), other)
