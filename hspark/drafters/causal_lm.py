"""A small causal LM with the target's tokenizer as the model drafter: classic draft-model speculation.

It takes no hidden states and walks token by token, so its chains differ from DSpark's in everything but their form.
That is the point: policies, verification and metrics see a `Chain` and nothing else.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from hspark.core import SOURCE_MODEL, Chain, RowState
from hspark.drafters.base import TargetInfo
from hspark.drafters.confidence import ProbabilityCurve
from hspark.drafters.dspark import DRAFTING, NOISE, committed_counts, counted
from hspark.drafters.limits import known_positions
from hspark.packing import PackedLinear
from hspark.policy.curves import whole
from hspark.sampling import (
    GREEDY_TEMPERATURE,
    STREAM_COUPLED,
    STREAM_DRAFT,
    SamplingMode,
    TokenCounts,
    argmax,
    gumbel_noise,
    process_logits,
    slot_key,
    target_log_probs,
)
from hspark.target import CausalTarget


class CausalLMDrafter:
    """Drafts `length` tokens, one forward of a small language model each.

    model: a transformers causal LM whose token ids mean the same as the target's; it is taken over (see CausalTarget).
    drafting, noise: as in `DSparkDrafter`. curve: acceptance from the drafter's own top probability; the default is the
    fit described in `ProbabilityCurve`, which puts acceptance above that probability. `ProbabilityCurve(0, 1)` takes
    the probability at its word, and `hspark.drafters.confidence.fit_curve` fits a curve to a record of this drafter.

    catch_up: tokens before the anchor that are (re)processed at each step; set by the step to the most that a step can
    commit. Positions of row r:  0 .. anchor - catch_up processed by earlier steps, the next catch_up ones up to the
    anchor processed now with the committed tokens, whatever drafts stood there; then the drafts. Where the model has
    fewer positions than the rows, its chains end with what its last position yields, and past that it drafts nothing.
    """

    name = "draft_model"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Any,
        *,
        length: int = 5,
        drafting: str = "greedy",
        noise: str = "coupled",
        curve: ProbabilityCurve | None = None,
    ) -> None:
        if drafting not in DRAFTING:
            raise ValueError(f"drafting={drafting!r} is not known; use one of {', '.join(DRAFTING)}")
        if noise not in NOISE:
            raise ValueError(f"noise={noise!r} is not known; use one of {', '.join(NOISE)}")
        self.model, self.width = model, whole("length", length, 1)
        self.drafting, self.noise = drafting, noise
        self.curve = ProbabilityCurve() if curve is None else curve
        self.catch_up = self.width + 1
        self.context_limit: int | None = None

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], *, dtype: Any = "auto", device: Any = "auto", **options: Any
    ) -> CausalLMDrafter:
        """A drafter from anything that `hspark.models.load_target` loads; `options` as in the constructor."""
        from hspark.models import load_target

        return cls(load_target(name_or_path, dtype, device).model, **options)

    def bind(self, target: TargetInfo, max_batch_size: int, max_length: int) -> None:
        """Moves the model to the target's device and allocates its key and value buffers."""
        # Where the target's layers were left to a compiler, so are the draft model's.
        lay_out = target.lm_head is None or isinstance(target.lm_head, PackedLinear)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        stated = isinstance(limit, int) and limit > 0  # some configurations write 0 or -1 for "any number"
        positions = known_positions(limit if stated else None, max_length, "draft model")
        self.lm = CausalTarget(self.model.to(target.device), max_batch_size, positions, lay_out=lay_out)
        self.target_vocab = target.vocab_size
        if abs(self.lm.vocab_size - target.vocab_size) > 0.05 * target.vocab_size:
            raise ValueError(
                f"the draft model has {self.lm.vocab_size} token ids and target {target.name!r} has "
                f"{target.vocab_size}; use a draft model with the target's tokenizer"
            )

    def observe(self, features: Tensor, row: Tensor, position: Tensor) -> None:
        """Hidden states are not used."""

    def prefill(self, tokens: Tensor, row: int, start: int) -> None:
        """Processes a chunk of a prompt, int64 [T], of one row at positions start.., up to the model's last one."""
        known = tokens[: max(self.lm.max_length - start, 0)]
        if len(known):
            self.lm.prefill(self._known(known), row, start)

    @torch.no_grad()
    def propose(self, rows: RowState, mode: SamplingMode) -> Chain:
        """One chain [R, width] per row, cut at the model's last position. NaN logits make the row abstain."""
        anchor = rows.length - 1
        counts = committed_counts(rows, self.target_vocab) if mode.penalties else None
        logits = self._catch_up(rows, anchor)
        sampled = self.drafting == "probabilistic" and mode.sampled
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        tops: list[Tensor] = []
        for slot in range(self.width):
            if slot:
                logits = self._forward(tokens[-1][:, None], anchor + slot, 1)
            logits = self._in_target_ids(logits)
            tops.append(logits.amax(dim=-1) - logits.logsumexp(dim=-1))
            token, law = self._choose(logits, rows, anchor, slot, mode, counts, sampled)
            if counts is not None:
                counts = counted(counts, token)
            tokens.append(token)
            laws.append(law)
        scores = torch.stack(tops, dim=1)
        greedy_rows = (rows.sampling.temperature <= GREEDY_TEMPERATURE)[:, None].expand(-1, self.width)
        # Slot k is drafted from position anchor + k.
        length = (self.lm.max_length - anchor).clamp(0, self.width)
        return Chain.build(
            torch.stack(tokens, dim=1),
            torch.where(scores.isnan().any(dim=1), 0, length),
            self.curve(scores).nan_to_num(),
            source=SOURCE_MODEL,
            point_mass=greedy_rows if sampled else None,
            log_probs=torch.stack(laws, dim=1) if sampled else None,
        )

    def _choose(
        self,
        logits: Tensor,
        rows: RowState,
        anchor: Tensor,
        slot: int,
        mode: SamplingMode,
        counts: TokenCounts | None,
        sampled: bool,
    ) -> tuple[Tensor, Tensor]:
        """The token [R] of one slot, and the law [R, V] that it was drawn from (the logits where it was not drawn)."""
        if not sampled:
            processed = process_logits(logits, rows.sampling, mode, counts)
            return argmax(processed.nan_to_num()), logits
        law = target_log_probs(logits, rows.sampling, mode, counts)
        if self.noise == "coupled":
            noise = gumbel_noise(rows.sampling.seed, anchor + 1 + slot, self.target_vocab, STREAM_COUPLED)
        else:
            noise = gumbel_noise(rows.sampling.seed, slot_key(anchor, slot), self.target_vocab, STREAM_DRAFT)
        return argmax((law + noise).nan_to_num(nan=0.0)), law

    def _catch_up(self, rows: RowState, anchor: Tensor) -> Tensor:
        """Processes the newest `catch_up` committed tokens of every row; returns the logits [R, V] after the anchor."""
        first = anchor - self.catch_up + 1
        position = first[:, None] + torch.arange(self.catch_up, device=anchor.device)
        return self._forward(rows.tokens.gather(1, position.clamp(min=0)), first, self.catch_up)

    def _forward(self, tokens: Tensor, first: Tensor, queries: int) -> Tensor:
        """Logits [R, V] after the last of `queries` tokens [R, Q] of each row at positions first [R] ..; positions
        before 0 or past the buffers go to the dump column."""
        count, limit = tokens.shape[0], self.lm.max_length
        row = torch.arange(count, device=tokens.device).repeat_interleave(queries)
        offset = torch.arange(queries, device=tokens.device).repeat(count)
        position = first[row] + offset
        valid = (position >= 0) & (position < limit)
        index = torch.arange(count * queries, device=tokens.device).view(count, queries)
        context = limit if self.context_limit is None else min(self.context_limit, limit)
        plan = self.lm.plan(row, offset, valid, index, first, context, full=True)
        last = index[:, -1]
        known = self._known(tokens.reshape(-1))
        logits, _ = self.lm.forward(known, position.clamp(0, limit - 1), plan, last)
        return logits.float()

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self.lm.vocab_size - 1)

    def _in_target_ids(self, logits: Tensor) -> Tensor:
        """Logits [R, V'] of the draft model over the target's V ids; ids that only one of them has are not drafted."""
        missing = self.target_vocab - logits.shape[1]
        if missing <= 0:
            return logits[:, : self.target_vocab]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
