"""For the engine's tests: a scripted target that watches its caller, drafters of known quality, costs by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hspark.config import SamplingParams
from hspark.core import SOURCE_FREE, SOURCE_MODEL, Chain, RequestOutput, RowState
from hspark.drafters import NgramDrafter
from hspark.drafters.base import TargetInfo
from hspark.engine import Engine
from hspark.policy import CostModel, LinearCost, StepCostTable, policy
from hspark.request import Request
from hspark.sampling import STREAM_DRAFT, SamplingMode, gumbel_noise, slot_key
from hspark.step import DecodeStep, StepFunctions
from hspark.verify import verifier
from tests.plain import Law

# Costs by hand: every slot is free, no slot ever pays, slots are free up to a padded size.
FLAT = LinearCost(1.0, 0.0)
STEEP = LinearCost(1.0, 10.0)
MILD = LinearCost(1.0, 0.08)
STAIRS = StepCostTable([4, 8, 16, 32, 64, 128], [1.0, 1.1, 1.3, 1.9, 3.2, 6.0])


class Call(NamedTuple):
    """One forward: the packed tokens, their positions, rows and validity (padding is not valid)."""

    tokens: list[int]
    positions: list[int]
    rows: list[int]
    valid: list[bool]


class _Plan(NamedTuple):
    row: Tensor
    valid: Tensor
    context: int


class ScriptedTarget:
    """A target whose next token is `law` of exactly what its own cache holds, behind the interface of CausalTarget.

    The cache keeps the token that was written at each (row, position), so a missing roll-back, a wrong position or
    another request's leftovers change the output or fail here. Every id, position and packed index that the engine
    passes is checked, padding included. With taps, the features of a token are (its id, its position).
    """

    def __init__(self, law: Law, vocab: int, rows: int = 4, max_length: int = 64) -> None:
        self.law, self.vocab_size, self.rows, self.max_length = law, vocab, rows, max_length
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.taps: tuple[int, ...] = ()
        self.buffers = self
        self.cache = torch.full((rows, max_length + 1), -1)
        self.calls: list[Call] = []
        self.prefilled: list[tuple[int, int, list[int]]] = []
        self.cleared: list[tuple[int, int]] = []

    def info(self, name: str) -> TargetInfo:
        return TargetInfo(name, self.vocab_size, 2, 1, self.dtype, self.device, None, None)

    def set_taps(self, taps: tuple[int, ...]) -> None:
        self.taps = taps

    def clear(self, row: int, start: int = 0) -> None:
        self.cleared.append((row, start))
        self.cache[row, start:] = -1

    def plan(
        self,
        row: Tensor,
        offset: Tensor,
        valid: Tensor,
        index: Tensor,
        anchor: Tensor,
        context: int,
        *,
        full: bool = False,
        span: tuple[int, int] | None = None,
    ) -> _Plan:
        packed = torch.arange(row.shape[0])
        assert index.shape[0] == self.rows
        assert int(offset.max()) < index.shape[1], "queries do not cover the offsets"
        assert bool((index[row, offset] == packed)[valid].all()), "index does not point back at the packed slots"
        assert bool((anchor[row] + offset < context)[valid].all()), "context does not cover the step"
        assert context <= self.max_length
        taking_part = range(*(span or (0, self.rows)))
        assert all(r in taking_part for r in row.tolist()), "a slot's row is outside the span"
        if full:
            queries = index.shape[1]
            assert row.tolist() == [r for r in taking_part for _ in range(queries)], "the step is not full"
            assert offset.tolist() == [q for _ in taking_part for q in range(queries)], "the step is not full"
        return _Plan(row, valid, context)

    def prefill(self, tokens: Tensor, row: int, start: int) -> Tensor | None:
        self._check(tokens, start + torch.arange(tokens.shape[0]))
        self.prefilled.append((row, start, tokens.tolist()))
        self.cache[row, start : start + tokens.shape[0]] = tokens
        return self._features(tokens, start + torch.arange(tokens.shape[0]))

    def forward(self, tokens: Tensor, position: Tensor, plan: _Plan) -> tuple[Tensor, Tensor | None]:
        self._check(tokens, position)
        row, valid = plan.row, plan.valid
        self.calls.append(Call(tokens.tolist(), position.tolist(), row.tolist(), valid.tolist()))
        self.cache[row[valid], position[valid]] = tokens[valid]
        written = (self.cache >= 0).long().cumprod(dim=1).sum(dim=1)
        assert bool((position < written[row])[valid].all()), "a token attends to a position that nobody wrote"
        logits = torch.zeros(tokens.shape[0], self.vocab_size)
        order = getattr(self.law, "order", self.max_length)
        for slot, (r, end) in enumerate(zip(row.tolist(), (position + 1).tolist(), strict=True)):
            if valid[slot]:
                logits[slot] = self.law(tuple(self.cache[r, max(0, end - order) : end].tolist()))
        return logits, self._features(tokens, position)

    def _check(self, tokens: Tensor, position: Tensor) -> None:
        assert tokens.dtype == torch.int64
        assert tokens.shape == position.shape
        assert bool(((tokens >= 0) & (tokens < self.vocab_size)).all()), f"ids {tokens.tolist()} leave the vocabulary"
        assert bool(((position >= 0) & (position < self.max_length)).all()), f"positions {position.tolist()}"

    def _features(self, tokens: Tensor, position: Tensor) -> Tensor | None:
        one = torch.stack([tokens, position], dim=1).float()
        return one.repeat(1, len(self.taps)) if self.taps else None


class PatternDrafter:
    """Right or wrong by a rule, from known continuations: an oracle by default, always wrong with right=never.

    continuations: {prompt: output of plain decoding}. right(place, slot): whether slot `slot` drafts the true token of
    output place `place`; a wrong token is `wrong`, or the true one plus 1. Beyond the known output it drafts nothing.
    fails(call): raise in that call. width, acceptance: of every chain. calls counts `propose`.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        continuations: Mapping[Any, Sequence[int]],
        vocab: int,
        *,
        width: int = 7,
        right: Callable[[int, int], bool] | None = None,
        wrong: int | None = None,
        fails: Callable[[int], bool] = lambda call: False,
        acceptance: float = 0.9,
        source: int = SOURCE_FREE,
    ) -> None:
        self.known = {tuple(prompt): list(ids) for prompt, ids in continuations.items()}
        self.vocab, self.width, self.right, self.wrong, self.fails = vocab, width, right or always, wrong, fails
        self.acceptance, self.source = acceptance, source
        self.name = "dspark" if source == SOURCE_MODEL else "ngram"
        self.calls = 0

    def bind(self, target: TargetInfo, max_batch_size: int, max_length: int) -> None:
        assert target.vocab_size == self.vocab

    def observe(self, features: Tensor, row: Tensor, position: Tensor) -> None:
        raise AssertionError("a drafter without taps is not shown features")

    def propose(self, rows: RowState, mode: SamplingMode) -> Chain:
        self.calls += 1
        if self.fails(self.calls):
            raise RuntimeError("this drafter was told to fail")
        batch = rows.length.shape[0]
        chains = []
        for row, (begin, end) in enumerate(zip(rows.prompt_length.tolist(), rows.length.tolist(), strict=True)):
            place = max(end - begin, 0)
            truth = self.known.get(tuple(rows.tokens[row, :begin].tolist()), [])[place : place + self.width]
            chains.append([t if self.right(place + i, i) else self._wrong(t) for i, t in enumerate(truth)])
        tokens = torch.tensor([chain + [0] * (self.width - len(chain)) for chain in chains]).view(batch, self.width)
        length = torch.tensor([len(chain) for chain in chains])
        return Chain.build(tokens, length, torch.full(tokens.shape, self.acceptance), source=self.source)

    def _wrong(self, token: int) -> int:
        return (token + 1) % self.vocab if self.wrong is None else self.wrong


def always(place: int, slot: int) -> bool:
    """The rule of an oracle."""
    return True


def never(place: int, slot: int) -> bool:
    """The rule of a drafter that is always wrong."""
    return False


class LawDrafter:
    """Samples its chain from a known law, and reports that law: law(tokens so far) -> logits [V] at temperature 1.

    With `sampled=False` it takes the likeliest token of each slot instead, as a point mass.
    """

    name, taps = "dspark", ()

    def __init__(self, law: Law, vocab: int, width: int = 3, acceptance: float = 0.5, sampled: bool = True) -> None:
        self.law, self.vocab, self.width, self.acceptance, self.sampled = law, vocab, width, acceptance, sampled

    def bind(self, target: TargetInfo, max_batch_size: int, max_length: int) -> None:
        assert target.vocab_size == self.vocab

    def observe(self, features: Tensor, row: Tensor, position: Tensor) -> None:
        raise AssertionError("a drafter without taps is not shown features")

    def propose(self, rows: RowState, mode: SamplingMode) -> Chain:
        batch = rows.length.shape[0]
        prefixes = [tuple(row[:end].tolist()) for row, end in zip(rows.tokens, rows.length.tolist(), strict=True)]
        laws = torch.zeros(batch, self.width, self.vocab)
        for slot in range(self.width):
            laws[:, slot] = torch.stack([self.law(prefix) for prefix in prefixes]).log_softmax(dim=1)
            noise = gumbel_noise(rows.sampling.seed, slot_key(rows.length - 1, slot), self.vocab, STREAM_DRAFT)
            drawn = (laws[:, slot] + noise * self.sampled).argmax(dim=1).tolist()
            prefixes = [(*prefix, token) for prefix, token in zip(prefixes, drawn, strict=True)]
        tokens = torch.tensor([prefix[-self.width :] for prefix in prefixes])
        return Chain.build(
            tokens,
            torch.full((batch,), self.width),
            torch.full(tokens.shape, self.acceptance),
            source=SOURCE_MODEL,
            point_mass=torch.full_like(tokens, not self.sampled, dtype=torch.bool),
            log_probs=laws if self.sampled else None,
        )


def build_engine(
    target: Any,
    policy_name: str = "ngram_only",
    *,
    model: Any | None = None,
    free: Any | None = None,
    verify: str = "coupled",
    cost: CostModel = FLAT,
    compiler: Any = None,
    **options: Any,
) -> Engine:
    """An engine over a CausalTarget or ScriptedTarget; `free` is an NgramDrafter where the policy needs one."""
    chosen = policy(policy_name)
    if chosen.needs_free and free is None:
        free = NgramDrafter()
    step = DecodeStep(target, chosen, verifier(verify), model, free)
    for drafter in step.drafters:
        drafter.bind(target.info("target"), target.rows, target.max_length)
    target.set_taps(tuple(tap for drafter in step.drafters for tap in drafter.taps))
    return Engine(step, cost, functions=StepFunctions.of(step, compiler), **options)


def serve(
    engine: Engine, jobs: Sequence[tuple[Sequence[int], SamplingParams]], *, limit: int = 2000, watch: bool = True
) -> list[RequestOutput]:
    """Submits all jobs and steps until they have ended; `watch` checks the engine's state after every step."""
    requests = [engine.submit(list(prompt), params) for prompt, params in jobs]
    finish(engine, requests, limit=limit, watch=watch)
    return [request.output() for request in requests]


def finish(engine: Engine, requests: Sequence[Request], *, limit: int = 2000, watch: bool = True) -> None:
    """Steps until `requests` have ended; AssertionError after `limit` steps."""
    for _ in range(limit):
        if all(request.done for request in requests):
            return
        engine.step()
        if watch:
            check_state(engine)
    raise AssertionError(f"not done after {limit} steps: {[r.number for r in requests if not r.done]}")


def check_state(engine: Engine) -> None:
    """The engine's own check; and a scripted target's cache holds exactly what each request has been told."""
    engine.check_integrity()
    if not isinstance(engine.target, ScriptedTarget):
        return
    for row, owner in enumerate(engine.owners):
        if owner is not None and owner.prefilled >= len(owner.prompt) - 1:
            told = (owner.prompt + owner.token_ids)[:-1]
            assert engine.target.cache[row, : len(told)].tolist() == told, f"row {row} holds another text"
