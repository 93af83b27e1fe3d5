"""The n-gram drafter in a batch: its operators, its estimator, and its settings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hspark.core import SOURCE_FREE, RowState
from hspark.drafters import NgramDrafter
from hspark.drafters.base import Drafter, TargetInfo
from hspark.drafters.ngram import match
from hspark.policy.estimator import AcceptanceEstimator
from hspark.sampling import SamplingMode, SamplingState
from tests.drafters.ngram_cases import as_batch


class OperatorCount(TorchDispatchMode):
    """Counts the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def row_state(tokens: Tensor, length: Tensor) -> RowState:
    rows = tokens.shape[0]
    return RowState(
        tokens=tokens,
        length=length,
        prompt_length=length.clone(),
        limit=torch.full_like(length, tokens.shape[1]),
        running=torch.ones(rows, dtype=torch.bool),
        sampling=SamplingState.defaults(rows),
    )


def test_operator_count_is_constant() -> None:
    """The same few operators for one short row and for many long ones, and none that reads back to the host."""
    drafter = NgramDrafter()
    counts = []
    for rows, size in [(1, 8), (3, 100), (64, 700)]:
        state = row_state(torch.randint(0, 3, (rows, size)), torch.full((rows,), size))
        with OperatorCount() as count:
            drafter.propose(state, SamplingMode())
        counts.append(count.names)
    assert counts[0] == counts[1] == counts[2]
    assert len(counts[0]) < 120
    assert not [name for name in counts[0] if "_local_scalar_dense" in name or "nonzero" in name]


@pytest.mark.parametrize("periodic", [True, False])
def test_compiles_to_one_graph(periodic: bool) -> None:
    drafter = NgramDrafter(periodic=periodic)
    state = row_state(torch.randint(0, 2, (3, 90)), torch.tensor([90, 40, 7]))
    eager = drafter.propose(state, SamplingMode())
    compiled = torch.compile(drafter.propose, fullgraph=True, backend="aot_eager")(state, SamplingMode())
    assert int(eager.length.sum()) > 0
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b


def test_drafter_follows_the_protocol_and_the_estimator() -> None:
    drafter = NgramDrafter()
    assert isinstance(drafter, Drafter)
    assert (drafter.name, drafter.width, drafter.taps) == ("ngram", 15, ())
    text = [5, 6, 7, 8, 9] * 4
    tokens, length = as_batch([text, [1, 2, 3], [1]], 64)
    chain = drafter.propose(row_state(tokens, length), SamplingMode(sampled=True))
    assert chain.length.tolist() == [15, 0, 0]
    assert chain.tokens[0].tolist() == [5, 6, 7, 8, 9] * 3
    found = match(tokens, length)
    expected = AcceptanceEstimator.preset("qwen3-4b")(found.match_length, found.agreement, found.copy_length)
    assert torch.equal(chain.acceptance[0], expected[0])
    assert torch.equal(chain.survival[0], expected[0].cumprod(0))
    assert not chain.survival[1:].any()
    assert bool(chain.point_mass.all())
    assert chain.log_probs is None
    assert chain.source is not None
    assert bool((chain.source == SOURCE_FREE).all())


@pytest.mark.parametrize("length", [1, 4, 15])
def test_shorter_drafts(length: int) -> None:
    drafter = NgramDrafter(length=length)
    chain = drafter.propose(row_state(*as_batch([[1, 2, 3] * 8], 40)), SamplingMode())
    assert chain.width == length == int(chain.length)
    assert chain.tokens[0].tolist() == ([1, 2, 3] * 8)[:length]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length", 0),
        ("length", 15.0),
        ("length", True),
        ("min_match", 0),
        ("min_match", 16),
        ("max_match", 0),
        ("max_match", 256),
        ("copy_cap", 14),
        ("periodic", 1),
    ],
)
def test_bad_settings_name_the_argument(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        NgramDrafter(**{name: value})  # type: ignore[arg-type]


def test_estimator_must_fit_the_drafter() -> None:
    preset = AcceptanceEstimator.preset("qwen3-8b")
    with pytest.raises(ValueError, match=r"fitted for min_match, max_match, copy_cap = \(5, 15, 256\)"):
        NgramDrafter(preset, min_match=4)
    state = row_state(*as_batch([[1, 2, 3] * 8], 40))
    with pytest.raises(ValueError, match="use one that estimates length=15 positions"):
        NgramDrafter(lambda n, a, m: torch.ones(1, 7)).propose(state, SamplingMode())
    longer = NgramDrafter(preset, length=20).propose(state, SamplingMode())
    assert int(longer.length) == longer.width == 20
    assert longer.acceptance[0, 14] == longer.acceptance[0, 19] > 0


def test_any_callable_may_estimate() -> None:
    """It sees the features, and what it says becomes the chain's acceptance."""
    seen: list[list[int]] = []

    def estimator(match_length: Tensor, agreement: Tensor, copy_length: Tensor) -> Tensor:
        seen.append([int(match_length), int(agreement), int(copy_length)])
        return torch.full((1, 15), 0.5)

    chain = NgramDrafter(estimator).propose(row_state(*as_batch([[1, 2, 3] * 8], 40)), SamplingMode())
    assert seen == [[15, 1, 21]]
    assert chain.acceptance[0].tolist() == [0.5] * 15


def test_bind_moves_the_estimator_to_the_target() -> None:
    target = TargetInfo("tiny", 32, 8, 1, torch.float32, torch.device("meta"), None, None)
    drafter = NgramDrafter()
    drafter.bind(target, max_batch_size=2, max_length=64)
    assert isinstance(drafter.estimator, AcceptanceEstimator)
    assert drafter.estimator.device == torch.device("meta")
