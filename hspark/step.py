"""The device side of one decode step: draft, choose, allocate, verify, commit (section 2 of the specification).

Every method is pure tensor code over all R rows, with static shapes and without a host read; price and budget arrive
as scalars. The engine calls `propose`, `allocate` and `verify` one after the other, or as one compiled function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hspark.core import SOURCE_FREE, SOURCE_MODEL, SOURCE_TARGET, Chain, RowState
from hspark.drafters.base import Drafter
from hspark.policy import Policy, allocate
from hspark.sampling import SamplingMode, TokenCounts, process_logits, target_log_probs
from hspark.target import CausalTarget
from hspark.verify import Layout, Seeds, Verdict, Verifier, pack


class Shape(NamedTuple):
    """The static sizes of one verification. size: T packed slots. queries: at most this many of one row.

    context: leading positions of the KV buffers that are attended to; above every position of the step.
    full: the host knows that every row of the span runs and has exactly `queries` slots.
    span: the first row that may have slots, and the row after the last; None for all rows.
    """

    size: int
    queries: int
    context: int
    full: bool = False
    span: tuple[int, int] | None = None


class Outcome(NamedTuple):
    """What one step did to the R rows; everything the host needs to know. W is the width of the chains.

    tokens:   int64 [R, W + 1], the committed tokens, `count` of them.   count: int64 [R], 0 for rows not running.
    sources:  int64 [R, W + 1] SOURCE_* code of each committed token.
    drafted, kept, accepted: int64 [R] length of the chain, slots verified, slots accepted.
    chain_sources: int64 [R, W] who drafted each slot.   reason: int64 [R] REASON_* code of the policy.
    survival: float32 [R, W] of the kept chain, from which later steps are sized.
    failed:   bool [R] the target's logits held NaN or infinity in a slot of this row.
    logprobs: float32 [R, W + 1] the target's own log-probability of each committed token, or None if nobody asked.
    """

    tokens: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nothing here uses
    sources: Tensor
    drafted: Tensor
    kept: Tensor
    accepted: Tensor
    chain_sources: Tensor
    reason: Tensor
    survival: Tensor
    failed: Tensor
    logprobs: Tensor | None


class DecodeStep:
    """Binds target, drafters, policy and verifier. `width` is W, the width of the chains that the policy returns."""

    def __init__(
        self,
        target: CausalTarget,
        policy: Policy,
        verifier: Verifier,
        model_drafter: Drafter | None,
        free_drafter: Drafter | None,
    ) -> None:
        self.target = target
        self.policy = policy
        self.verifier = verifier
        self.model_drafter = model_drafter if policy.needs_model else None
        self.free_drafter = free_drafter if policy.needs_free else None
        self.drafters = tuple(d for d in (self.model_drafter, self.free_drafter) if d is not None)
        self.width = max((drafter.width for drafter in self.drafters), default=0)
        # Told of a drafter that raised while it was shown hidden states; None lets the error through.
        self.on_failure: Callable[[Exception], None] | None = None
        for drafter in self.drafters:
            if hasattr(drafter, "catch_up"):  # a draft model reads what the last step committed
                drafter.catch_up = self.width + 1

    def propose(self, rows: RowState, speculate: Tensor, price: Tensor, mode: SamplingMode) -> Chain:
        """The chain that each row keeps, cut to the room that the row has left. speculate: bool [R]; price: 0-dim."""
        batch, device = rows.length.shape[0], rows.length.device
        chains = [
            Chain.empty(batch, 0, device, source) if drafter is None else drafter.propose(rows, mode)
            for drafter, source in ((self.model_drafter, SOURCE_MODEL), (self.free_drafter, SOURCE_FREE))
        ]
        if chains[1].log_probs is not None:  # nothing judges whether sizes and choices read what it sampled
            raise ValueError(
                f"the model-free drafter {self.free_drafter!r} proposed sampled tokens (log_probs); its chains are "
                "verified as point masses, so leave log_probs out, or use it as the model drafter"
            )
        chain = self.policy(chains[0], chains[1], price)
        # The step emits one token beside the accepted drafts, so a draft must leave room for it.
        room = (rows.limit - rows.length - 1).clamp(min=0)
        length = torch.where(active(rows) & speculate, torch.minimum(chain.length, room), 0)
        inside = torch.arange(chain.width, device=device) < length[:, None]
        return chain.replace(length=length, survival=torch.where(inside, chain.survival, 0.0))

    def observe(self, features: Tensor, row: Tensor, position: Tensor) -> None:
        """Shows every drafter its own part of features [T, len(target.taps) * H]; see `Drafter.observe`."""
        size = features.shape[1] // max(len(self.target.taps), 1)
        first = 0
        for drafter in self.drafters:
            if not drafter.taps:
                continue
            last = first + size * len(drafter.taps)
            try:
                drafter.observe(features[:, first:last], row, position)
            except Exception as error:
                if self.on_failure is None:
                    raise
                self.on_failure(error)
            first = last

    def allocate(self, chain: Chain, budget: Tensor) -> Tensor:
        """Slots to verify of each row, int64 [R], within the batch-wide budget (0-dim)."""
        return allocate(chain.survival, chain.length, budget)

    def verify(
        self, rows: RowState, chain: Chain, kept: Tensor, mode: SamplingMode, shape: Shape, logprobs: bool = False
    ) -> Outcome:
        """Target forward over 1 + kept slots of every running row, verification, commit into `rows` (in place)."""
        running = active(rows)
        anchor = rows.length - 1
        layout = pack(kept, running, chain.width, shape.size)
        inputs = torch.cat([rows.tokens.gather(1, anchor[:, None]), chain.tokens], dim=1)
        position = anchor[layout.row] + layout.offset
        plan = self.target.plan(
            layout.row,
            layout.offset,
            layout.valid,
            layout.index[:, : shape.queries],
            anchor,
            shape.context,
            full=shape.full,
            span=shape.span,
        )
        logits, features = self.target.forward(inputs[layout.row, layout.offset], position, plan)
        if features is not None:
            dump = torch.where(layout.valid, position, self.target.max_length)
            self.observe(features, layout.row, dump)
        law = slot_law(logits, rows, chain, layout, mode)
        seeds = Seeds(rows.sampling.seed, anchor)
        verdict = self.verifier(law, layout, chain, kept, seeds, greedy=not mode.sampled)
        broken = broken_slots(logits, law, verdict.emitted) & layout.valid
        failed = torch.zeros_like(anchor).index_add(0, layout.row, broken.to(anchor.dtype)) > 0
        tokens, count = commit(rows, chain, verdict, running)
        slots = torch.arange(chain.width + 1, device=count.device)
        chain_sources = torch.zeros_like(chain.tokens) if chain.source is None else chain.source
        last = count.new_full((count.shape[0], 1), SOURCE_TARGET)
        sources = torch.where(slots < verdict.accepted[:, None], torch.cat([chain_sources, last], 1), SOURCE_TARGET)
        return Outcome(
            tokens=tokens,
            count=count,
            sources=sources,
            drafted=chain.length,
            kept=kept,
            accepted=verdict.accepted,
            chain_sources=chain_sources,
            reason=torch.zeros_like(count) if chain.reason is None else chain.reason,
            survival=chain.survival,
            failed=failed,
            logprobs=token_log_probs(logits, layout.index, tokens) if logprobs else None,
        )


class StepFunctions(NamedTuple):
    """The three functions of a step as an engine calls them, and whether a compiler has made them."""

    propose: Callable[..., Chain]
    allocate: Callable[..., Tensor]
    verify: Callable[..., Outcome]
    compiled: bool = False

    @staticmethod
    def of(step: DecodeStep, compiler: Callable[[Any], Any] | None = None) -> StepFunctions:
        """compiler: applied to each, for example torch.compile with fullgraph=True; None leaves them as they are."""
        if compiler is None:
            return StepFunctions(step.propose, step.allocate, step.verify)
        return StepFunctions(compiler(step.propose), compiler(step.allocate), compiler(step.verify), compiled=True)


def active(rows: RowState) -> Tensor:
    """bool [R]: rows that still emit. A row at its limit stops by itself, even before the host has seen it."""
    return rows.running & (rows.length < rows.limit)


def slot_law(logits: Tensor, rows: RowState, chain: Chain, layout: Layout, mode: SamplingMode) -> Tensor:
    """The processed law after each packed slot, from its logits [T, V]; where every row is greedy, any scores [T, V]
    of the same order."""
    if not (mode.sampled or mode.penalties or mode.bias):
        return logits
    state = rows.sampling.take(layout.row)
    counts = count_tokens(rows, chain, layout.row, layout.offset, logits.shape[-1]) if mode.penalties else None
    return (target_log_probs if mode.sampled else process_logits)(logits, state, mode, counts)


def broken_slots(logits: Tensor, law: Tensor, emitted: Tensor | None) -> Tensor:
    """bool [T]: slots whose logits [T, V] hold NaN or infinity; minus infinity alone bans a token, and is none.

    emitted: int64 [T] where the law [T, V] is largest, up to noise, or None. NaN and infinity are larger than any
    number, and make NaN of a softmax: they show there, and nobody has to look at the vocabulary again.
    """
    if emitted is None:
        return ~logits.amax(dim=-1).isfinite()
    scores = logits.gather(1, emitted[:, None]) + law.gather(1, emitted[:, None])
    return ~scores[:, 0].isfinite()


def commit(rows: RowState, chain: Chain, verdict: Verdict, running: Tensor) -> tuple[Tensor, Tensor]:
    """Appends the accepted drafts and the token after them to every running row; returns (tokens [R, W+1], count [R]).

    Row r, length n, accepted a:   n .. n+a-1 accepted drafts, n+a the recovered or bonus token, which becomes the
    anchor: the new length is n+a+1. Everything else goes to the dump column, the last one of `rows.tokens`.
    """
    slots = torch.arange(chain.width + 1, device=running.device)
    drafts = torch.cat([chain.tokens, verdict.token[:, None]], dim=1)
    tokens = torch.where(slots == verdict.accepted[:, None], verdict.token[:, None], drafts)
    count = torch.where(running, verdict.accepted + 1, 0)
    dump = rows.tokens.shape[1] - 1
    position = torch.where(slots < count[:, None], rows.length[:, None] + slots, dump)
    rows.tokens.scatter_(1, position, tokens)
    rows.length.add_(count)
    return tokens, count


def count_tokens(rows: RowState, chain: Chain, row: Tensor, offset: Tensor, vocab: int) -> TokenCounts:
    """Occurrences of every token before each packed slot's prediction, its own row's drafts up to `offset` included.

    row, offset: int64 [T]. Returns counts [T, V]. Computed anew from the text, so there is nothing to roll back.
    """
    batch, span = rows.tokens.shape
    place = torch.arange(span, device=row.device)
    output = (place >= rows.prompt_length[:, None]) & (place < rows.length[:, None])
    prompt = place < rows.prompt_length[:, None]
    text = rows.tokens.clamp(0, vocab - 1)
    blank = torch.zeros(batch, vocab, device=row.device)
    in_output = blank.scatter_add(1, text, output.float())[row]
    drafts = torch.arange(chain.width, device=row.device) < offset[:, None]
    in_output = in_output.scatter_add(1, chain.tokens[row], drafts.float())
    return TokenCounts(blank.scatter_add(1, text, prompt.float())[row] > 0, in_output)


def token_log_probs(logits: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
    """log-softmax of raw logits [T, V] at the token that follows each slot: index, tokens [R, W + 1] -> float32."""
    total = logits.float().logsumexp(dim=-1)
    return logits[index, tokens].float() - total[index]
