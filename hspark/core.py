"""The shared nouns of the package: chains, rows, and what a request returns.

Everything here is data. The device side (`Chain`, `RowState`) consists of NamedTuples of tensors, which
`torch.compile` and `torch.utils._pytree` take as they are; the host side (`RequestOutput`, `RequestMetrics`)
consists of dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hspark.sampling import SamplingState

# Codes in `Chain.source`: who drafted the token in a slot.
SOURCE_TARGET, SOURCE_MODEL, SOURCE_FREE = 0, 1, 2

# Codes in `Chain.reason`: why the policy kept this chain (section 5 of the paper).
REASON_ONLY, REASON_NO_MATCH, REASON_CONTAINS, REASON_VALUE, REASON_EXTENDED = 0, 1, 2, 3, 4
REASON_NAMES = ("only", "no_match", "contains", "value", "extended")


class Chain(NamedTuple):
    """One drafter's tokens for every row of the batch: B rows, static width W, V target tokens.

    tokens:     int64 [B, W]. Entries at or past `length` are valid token ids without meaning.
    length:     int64 [B], 0..W. 0 is an ordinary answer: nothing drafted.
    acceptance: float32 [B, W]. Estimated probability that slot k is accepted given that all earlier ones were.
    survival:   float32 [B, W]. Running product of `acceptance`, non-increasing, 0 at and past `length`.
    point_mass: bool [B, W]. True where the token was chosen deterministically (its draft law is a point mass);
                False where it was sampled from `log_probs`.
    log_probs:  float32 [B, W, V] draft law of each sampled slot, in target ids, or None when no slot is sampled.
    source:     int64 [B, W] SOURCE_* code of each slot, or None for a chain whose origin is implied.
    reason:     int64 [B] REASON_* code, set by policies.
    """

    tokens: Tensor
    length: Tensor
    acceptance: Tensor
    survival: Tensor
    point_mass: Tensor
    log_probs: Tensor | None = None
    source: Tensor | None = None
    reason: Tensor | None = None

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    @staticmethod
    def empty(batch: int, width: int, device: torch.device | str = "cpu", source: int = SOURCE_TARGET) -> Chain:
        """A chain that drafts nothing for any of `batch` rows."""
        shape = (batch, width)
        return Chain(
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            length=torch.zeros(batch, dtype=torch.int64, device=device),
            acceptance=torch.zeros(shape, device=device),
            survival=torch.zeros(shape, device=device),
            point_mass=torch.ones(shape, dtype=torch.bool, device=device),
            source=torch.full(shape, source, dtype=torch.int64, device=device),
        )

    def replace(self, **fields: Any) -> Chain:
        """This chain with some of its fields replaced, as `_replace` does it.

        Through the constructor, because torch 2.11 cannot return from a compiled graph what `_replace` has made of
        one of the graph's inputs.
        """
        return Chain(**{**dict(zip(self._fields, self, strict=True)), **fields})

    @staticmethod
    def build(
        tokens: Tensor,
        length: Tensor,
        acceptance: Tensor,
        *,
        source: int,
        point_mass: Tensor | None = None,
        log_probs: Tensor | None = None,
    ) -> Chain:
        """A chain from tokens [B, W], length [B] and acceptance [B, W]; masks past `length`, multiplies up survival.

        `point_mass` defaults to all True (deterministic drafting).
        """
        inside = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
        acceptance = torch.where(inside, acceptance.float(), 0.0)
        if point_mass is None:
            point_mass = torch.ones_like(inside)
        return Chain(
            tokens=torch.where(inside, tokens, 0),
            length=length,
            acceptance=acceptance,
            survival=acceptance.cumprod(dim=1),
            point_mass=point_mass,
            log_probs=log_probs,
            source=torch.full_like(tokens, source),
        )


class RowState(NamedTuple):
    """What the device knows of the R rows of the engine; drafters read it, the step's commit writes it.

    tokens:   int64 [R, S]. Prompt and committed output of the request in each row.
    length:   int64 [R]. Committed tokens; the newest, at `length - 1`, is the anchor, which the target has not
              processed yet. Entries of `tokens` at or past it are stale.
    prompt_length: int64 [R]. Tokens of the prompt.
    limit:    int64 [R]. The length at which the request ends by its own max_new_tokens.
    running:  bool [R]. False for rows without a request; such rows have length 1 and are never packed.
    sampling: each row's sampling parameters.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    limit: Tensor
    running: Tensor
    sampling: SamplingState


@dataclass
class DrafterMetrics:
    """Counts of one drafter's tokens in one request (or summed over several).

    drafted counts the tokens of its kept chains, verified those that were sent to the target, accepted those that
    were delivered beside each step's own token: tokens = steps + the sum of accepted. The lists hold the same counts
    by position in the chain (index 0 is the first draft token); reached counts those verified whose predecessors were
    all accepted, so accepted / reached is the acceptance.
    """

    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    reached_by_position: list[int] = field(default_factory=list)


@dataclass
class RequestMetrics:
    """What one request cost and gained.

    steps:   target forwards that this request took part in after its prompt was processed.
    tokens:  output tokens delivered.
    seconds: wall time from admission to the end; `prefill_seconds` is the part in which the host was busy with the
             prompt, which on an accelerator is less than the device takes for it (`hspark bench` waits for that).
    drafters: by source name ("ngram", "dspark").
    reasons: how often each kept chain was kept for which reason, by "source:reason".
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    drafters: dict[str, DrafterMetrics] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Output tokens per step, the recovered or bonus token included; 0.0 before the first step."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass
class RequestOutput:
    """The result of one request.

    text is None when the target has no tokenizer. `sources` names, for each output token, who proposed it: a
    drafter's name, or "target" for the last token of every step, also where a stop token was drafted. `logprobs`
    holds, if asked for, the target's own log-probability of each token (natural logarithm, before temperature,
    penalties and filters). `lossy` is True when the speculator ran a combination that does not preserve the target's
    distribution, which only `allow_lossy=True` permits.
    `error` says what went wrong when finish_reason is "error".
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    sources: list[str]
    metrics: RequestMetrics
    logprobs: list[float] | None = None
    error: str | None = None
    lossy: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        from dataclasses import asdict

        record = asdict(self)
        record["metrics"]["acceptance_length"] = self.metrics.acceptance_length
        return record
