"""What a drafter is worth asking for: how many draft tokens, out of which part of the vocabulary, up to which position.

A young drafter is seldom right in its last slots, and seldom knows rare tokens; both cost time at every step. No limit
changes what the network computes for the tokens that remain.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from hspark.drafters.checkpoint_files import CheckpointError, read_object
from hspark.drafters.dspark_model import DSparkModel
from hspark.policy.curves import whole

logger = logging.getLogger(__name__)

FILE_NAME = "drafting.json"


@dataclass(frozen=True)
class DraftLimits:
    """length: draft tokens per step; None for all of a block. vocabulary: ascending target ids; None for all."""

    length: int | None = None
    vocabulary: tuple[int, ...] | None = None

    def save(self, directory: str | Path) -> Path:
        """Writes `drafting.json` into a checkpoint directory and returns its path."""
        path = Path(directory) / FILE_NAME
        ids = None if self.vocabulary is None else list(self.vocabulary)
        path.write_text(json.dumps({"length": self.length, "vocabulary": ids}) + "\n")
        return path

    @staticmethod
    def load_beside(directory: str | Path, width: int, vocab_size: int) -> DraftLimits:
        """The limits in a checkpoint directory, none if there is no such file. CheckpointError if it does not fit."""
        path = Path(directory) / FILE_NAME
        if not path.exists():
            return DraftLimits()
        values = read_object(path)
        length, ids = values.get("length"), values.get("vocabulary")
        try:
            if set(values) - {"length", "vocabulary"}:
                raise ValueError(f"it has the keys {sorted(values)}; use length and vocabulary")
            return DraftLimits(
                None if length is None else whole("length", length, 1, width),
                None if ids is None else checked_vocabulary(ids, vocab_size),
            )
        except ValueError as error:
            raise CheckpointError(f"{path}: not the limits of this drafter ({error})") from error


def checked_vocabulary(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """`ids` as ascending, distinct target ids; ValueError otherwise."""
    try:
        chosen = tuple(whole("id", i, 0, vocab_size - 1) for i in ids)
    except (TypeError, ValueError):
        chosen = ()
    if not chosen or any(a >= b for a, b in pairwise(chosen)):
        raise ValueError(
            f"vocabulary={reprlib.repr(ids)} is not usable; use ascending ids from 0 to {vocab_size - 1}, at least one"
        )
    return chosen


def known_positions(limit: int | None, max_length: int, drafter: str) -> int:
    """Positions of a row of `max_length` that a drafter of `limit` (None: any) knows, with a warning if fewer."""
    if limit is None or limit >= max_length:
        return max_length
    logger.warning(
        "the %s drafter knows %d positions and the target's rows have %d: it drafts nothing that needs position %d",
        drafter,
        limit,
        max_length,
        limit,
    )
    return limit


def reduce_vocabulary(model: DSparkModel, ids: Sequence[int]) -> DSparkModel:
    """Makes a network draft only the target ids `ids`, in place: the rows of its output tables are selected.

    The input side knows all tokens as before. ValueError for a network whose vocabulary is reduced already.
    """
    config = model.config
    if config.reduced:
        raise ValueError(f"vocabulary: this drafter already drafts {config.drafts} of {config.vocab_size} tokens only")
    if model.lm_head is None:
        raise ValueError("lm_head is missing: call share_tables with the target's table first")
    device = model.fc.weight.device
    chosen = torch.tensor(checked_vocabulary(ids, config.vocab_size), device=device)
    model.config = config.replace(draft_vocab_size=len(chosen))
    model.register_buffer("d2t", chosen - torch.arange(len(chosen), device=device))
    model.register_buffer(
        "t2d", torch.zeros(config.vocab_size, dtype=torch.bool, device=device).index_fill(0, chosen, True)
    )
    model.lm_head = _rows(model.lm_head.weight, chosen)
    if model.markov_head is not None:
        model.markov_head.markov_w2 = _rows(model.markov_head.markov_w2.weight, chosen)
    return model


def _rows(table: Tensor, chosen: Tensor) -> nn.Linear:
    """A frozen output table of some rows of `table` [V, H]."""
    linear = nn.Linear(table.shape[1], len(chosen), bias=False, device="meta")
    linear.weight = nn.Parameter(table.detach()[chosen], requires_grad=False)
    return linear
