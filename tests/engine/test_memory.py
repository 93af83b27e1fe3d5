"""Memory: nothing grows with the number of requests, buffers are allocated once, offsets have 64 bits."""

from __future__ import annotations

import copy
import functools
import gc
import resource
from typing import Any

import pytest
import torch
from torch import Tensor

from hspark.config import SamplingParams
from hspark.core import SOURCE_MODEL, Chain, RowState
from hspark.drafters import NgramDrafter
from hspark.drafters.base import TargetInfo
from hspark.sampling import SamplingMode
from hspark.target import CausalTarget
from tests.fixtures import MILD, build_engine, serve
from tests.tiny import VOCAB, tiny_gemma4, tiny_llama, tiny_mistral

RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


class TappedDrafter:
    """A model drafter in a few tensor operations: it keeps the hidden states of its taps and reads them to draft."""

    name, width, taps = "dspark", 3, (0, 1)

    def bind(self, target: TargetInfo, max_batch_size: int, max_length: int) -> None:
        self.context = torch.zeros(max_batch_size, max_length + 1, 2 * target.hidden_size)
        self.vocab = target.vocab_size

    def observe(self, features: Tensor, row: Tensor, position: Tensor) -> None:
        self.context[row, position] = features

    def propose(self, rows: RowState, mode: SamplingMode) -> Chain:
        newest = self.context.gather(1, (rows.length - 2).clamp(min=0)[:, None, None].expand(-1, 1, 3))[:, 0]
        tokens = (newest * 1000).long().abs() % self.vocab
        return Chain.build(tokens, torch.full_like(rows.length, 3), torch.full(tokens.shape, 0.5), source=SOURCE_MODEL)


def tensors() -> tuple[int, int]:
    """Tensors alive, and their bytes."""
    gc.collect()
    alive = [item for item in gc.get_objects() if type(item) is Tensor]
    return len(alive), sum(item.numel() * item.element_size() for item in alive)


def requests(count: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts and outputs of many lengths, greedy and sampled, with and without bias, drafts and log-probabilities."""
    return [
        (
            tuple((i + j) % VOCAB for j in range(1 + i % 9)),
            SamplingParams(
                max_new_tokens=1 + i % 7,
                temperature=0.7 * (i % 2),
                logit_bias={3: 1.0} if i % 3 == 0 else None,
                repetition_penalty=1.1 if i % 4 == 0 else 1.0,
                logprobs=i % 5 == 0,
                speculate=i % 6 != 0,
            ),
        )
        for i in range(count)
    ]


@RUN_AHEAD
def test_a_hundred_requests_leave_nothing_behind(run_ahead: int) -> None:
    """Tensors alive, their bytes, and the addresses of all buffers: flat after the first ten requests."""
    target = CausalTarget(copy.deepcopy(tiny_llama(num_hidden_layers=2)), 3, 48)
    model, free = TappedDrafter(), NgramDrafter(min_match=2)
    engine = build_engine(target, "proposed", model=model, free=free, cost=MILD, run_ahead=run_ahead)

    def addresses() -> list[int]:
        held = [*target.buffers.keys, *target.buffers.values, model.context, engine.rows.tokens, engine.speculate]
        return [item.data_ptr() for item in held]

    serve(engine, requests(12))
    before, places = tensors(), addresses()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4):
        serve(engine, requests(22))
        after = tensors()
        assert after[0] <= before[0] + 2, f"{after[0] - before[0]} more tensors"
        assert after[1] <= before[1] + 4096, f"{after[1] - before[1]} more bytes"
    assert addresses() == places
    assert not engine.waiting
    assert len(engine.sizing.history._steps) <= engine.sizing.delay + 1
    # The peak of the process, in KiB; other threads and the allocator's own slack are allowed for.
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    assert grown < 16 * 1024, f"the peak grew by {grown} KiB over 88 requests"


def test_finished_requests_are_not_kept() -> None:
    import weakref

    target = CausalTarget(copy.deepcopy(tiny_llama(num_hidden_layers=1)), 2, 32)
    engine = build_engine(target, run_ahead=1)
    request = engine.submit([1, 2], SamplingParams(max_new_tokens=4))
    while not request.done:
        engine.step()
    watched = weakref.ref(request)
    del request
    serve(engine, [((1,), SamplingParams(max_new_tokens=3))])
    while engine.in_flight:
        engine.step()
    gc.collect()
    assert watched() is None


def test_policies_without_drafters_bind_and_observe_none() -> None:
    """Switched off means that nothing of a drafter is allocated, bound, shown features or asked."""
    target = CausalTarget(copy.deepcopy(tiny_llama(num_hidden_layers=2)), 2, 32)
    model = TappedDrafter()
    engine = build_engine(target, "vanilla", model=model)
    serve(engine, [((1, 2), SamplingParams(max_new_tokens=5))])
    assert not hasattr(model, "context")
    assert target.taps == ()
    assert target._hooks == []
    assert target._captured == {}


def test_opting_out_keeps_no_features() -> None:
    """Captured hidden states do not outlive the forward that captured them."""
    target = CausalTarget(copy.deepcopy(tiny_llama(num_hidden_layers=2)), 2, 32)
    engine = build_engine(target, "model_only", model=TappedDrafter())
    (output,) = serve(engine, [((1, 2, 3), SamplingParams(max_new_tokens=5, speculate=False))])
    assert output.metrics.drafters == {}
    assert target._captured == {}


@pytest.mark.parametrize(
    ("build", "per_position"),
    [
        (tiny_llama, 3 * 2 * 2 * 8),  # layers x (keys, values) x heads x size
        (tiny_mistral, 3 * 2 * 2 * 8),  # a sliding window does not shrink a buffer
        (tiny_gemma4, (2 * 2 * 8) * 2 + (2 * 1 * 16) * 1),  # own buffers of layers 0 to 2 only: the others share
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_the_buffers_is_what_the_formula_says(build: Any, per_position: int, dtype: torch.dtype) -> None:
    """rows x (max_length + 1) positions, each with the keys and values of every layer that has its own."""
    target = CausalTarget(build().to(dtype), 3, 50)
    assert target.buffers.num_bytes() == 3 * 51 * per_position * dtype.itemsize


def test_offsets_are_64_bit() -> None:
    """The plan of a buffer with more than 2**31 positions, from index arithmetic alone."""
    target = object.__new__(CausalTarget)
    target.rows, target.max_length = 8, 2**40
    target.buffers = type("NoLayers", (), {"kinds": []})()  # type: ignore[assignment]
    row, offset = torch.tensor([0, 7, 7]), torch.tensor([0, 0, 1])
    anchor = torch.full((8,), 2**40 - 5)
    index = torch.zeros(8, 2, dtype=torch.int64)
    plan = target.plan(row, offset, torch.tensor([True, True, False]), index, anchor, 4)
    assert plan.write.tolist() == [2**40 - 5, 7 * (2**40 + 1) + 2**40 - 5, 2**40]


def test_the_traced_step_equals_the_eager_one() -> None:
    """Both device functions of a step trace to whole graphs, with hidden states tapped: same ids, same metrics."""
    torch._dynamo.reset()
    jobs = [
        (p, SamplingParams(max_new_tokens=9, temperature=0.8, seed=i, repetition_penalty=1.1))
        for i, p in enumerate([(1, 2, 3), (4, 5, 4, 5, 4, 5)])
    ]
    found = []
    for compiler in (None, functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="eager")):
        target = CausalTarget(copy.deepcopy(tiny_llama(num_hidden_layers=2)), 2, 32)
        engine = build_engine(
            target,
            "proposed",
            model=TappedDrafter(),
            free=NgramDrafter(min_match=2),
            budget="all",
            compiler=compiler,
        )
        outputs = serve(engine, jobs)
        for output in outputs:
            output.metrics.seconds = output.metrics.prefill_seconds = 0.0
        found.append(outputs)
        assert engine.draft_failures == 0
    assert found[0] == found[1]
