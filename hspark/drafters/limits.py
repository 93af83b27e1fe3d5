"""What a checkpoint's drafter is worth asking for: how many draft tokens, and out of which part of the vocabulary.

A young drafter is seldom right in its last slots, and seldom knows rare tokens; both cost time at every step. Neither
limit changes what the network computes for the tokens that remain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hspark.drafters.dspark_model import DSparkModel

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
        """The limits in a checkpoint directory, none if there is no such file. ValueError if it does not fit."""
        path = Path(directory) / FILE_NAME
        if not path.exists():
            return DraftLimits()
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or set(values) - {"length", "vocabulary"}:
                raise ValueError("not an object of length and vocabulary")
            length = values.get("length")
            if length is not None and (type(length) is not int or not 1 <= length <= width):
                raise ValueError(f"length is {length!r}, blocks yield 1 to {width}")
            ids = values.get("vocabulary")
            return DraftLimits(length, None if ids is None else checked_vocabulary(ids, vocab_size))
        except ValueError as error:
            raise ValueError(f"{path}: not the limits of this drafter ({error})") from error


def checked_vocabulary(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """`ids` as ascending, distinct target ids; ValueError otherwise."""
    ascending = all(a < b for a, b in pairwise(ids))
    if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids) or not ascending:
        raise ValueError(f"vocabulary of {len(ids)} ids is not usable; use ascending ids from 0 to {vocab_size - 1}")
    return tuple(ids)


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
