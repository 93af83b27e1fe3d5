"""Acceptance labels without a model: replaying the n-gram drafter over recorded outputs (section 4.2 of the paper).

A chain depends on the text before it alone, and the text after it is on record, so for every prefix of an output the
accepted length is known exactly. At temperature 0 it is the one that the target would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hspark.drafters.ngram import NgramDrafter
from hspark.lab.outputs import RecordedOutput
from hspark.policy.fitting import GradedSteps

Ints = NDArray[np.int64]

VISITS = ("positions", "steps")

# Compared tokens (prefixes x context x max_match) in one call of the matcher: bounds its memory to some tens of MB.
_CHUNK_COMPARISONS = 1 << 22


class NgramReplay(NamedTuple):
    """One entry per visited prefix with a match, N of them, in the order of the outputs. All int64 [N].

    output:   index of the recorded output.  position: output tokens before this prefix's draft.
    match_length, agreement, copy_length: the match features (`NgramMatch`).
    drafted:  draft tokens.
    graded:   positions with a label: draft position k is graded iff positions before k were accepted and the output
              has a token there.
    accepted: draft tokens that were right, up to the first wrong one: `graded` or `graded - 1`.
    visited, tokens: prefixes visited, with or without a match, and output tokens replayed (plain numbers).
    """

    output: Ints
    position: Ints
    match_length: Ints
    agreement: Ints
    copy_length: Ints
    drafted: Ints
    graded: Ints
    accepted: Ints
    visited: int
    tokens: int

    def graded_steps(self) -> GradedSteps:
        """The records that `AcceptanceEstimator.fit` takes."""
        return GradedSteps(*(torch.from_numpy(getattr(self, name)) for name in GradedSteps._fields))

    @property
    def accepted_per_visit(self) -> float:
        """Mean accepted draft tokens over all visited prefixes, those without a match included."""
        return float(self.accepted.sum()) / max(self.visited, 1)


def replay_ngram(
    outputs: Sequence[RecordedOutput],
    drafter: NgramDrafter | None = None,
    *,
    visit: str = "positions",
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] | None = None,
) -> NgramReplay:
    """Drafts after every prefix of every output and compares with what followed.

    drafter: `NgramDrafter()` if None; only its match settings matter.
    visit: "positions" for every prefix, from the prompt alone to the output without its last token. "steps" for those
    that an engine that verifies every draft would reach: each step moves on by its accepted tokens and one more.
    progress: called with the number of output tokens done since the last call.
    """
    if visit not in VISITS:
        raise ValueError(f"visit={visit!r} is unknown; use one of {', '.join(map(repr, VISITS))}")
    drafter = NgramDrafter() if drafter is None else drafter
    columns: list[Ints] = []
    visited = 0
    for index, output in enumerate(outputs):
        table = _replay_output(output, drafter, device)
        if visit == "steps":
            table = table[:, _steps(table[-1])]
        visited += table.shape[1]
        matched = table[:, table[1] > 0]
        columns.append(np.concatenate([np.full((1, matched.shape[1]), index, dtype=np.int64), matched]))
        if progress is not None:
            progress(len(output.output_token_ids))
    fields = np.concatenate(columns, axis=1) if columns else np.zeros((8, 0), dtype=np.int64)
    tokens = sum(len(output.output_token_ids) for output in outputs)
    owner, position, length, agreement, copy_length, drafted, graded, accepted = fields
    return NgramReplay(
        owner, position, length, agreement, copy_length, drafted, graded, accepted, visited=visited, tokens=tokens
    )


def _replay_output(output: RecordedOutput, drafter: NgramDrafter, device: torch.device | str) -> Ints:
    """[7, O] for an output of O tokens: position and the fields of `NgramReplay` after it, one column per prefix."""
    text = torch.tensor([*output.prompt_token_ids, *output.output_token_ids], dtype=torch.int64, device=device)
    first, last = len(output.prompt_token_ids), text.shape[0]
    chunk = max(1, _CHUNK_COMPARISONS // (drafter.max_match * last))
    tables = [np.zeros((7, 0), dtype=np.int64)]
    for start in range(first, last, chunk):
        length = torch.arange(start, min(start + chunk, last), device=device)
        tables.append(_replay_prefixes(text, length, first, drafter).cpu().numpy())
    return np.concatenate(tables, axis=1)


def _replay_prefixes(text: Tensor, length: Tensor, first: int, drafter: NgramDrafter) -> Tensor:
    """[7, N] for the prefixes text[:length[i]] of text [S]; length: int64 [N]; `first`: tokens of the prompt."""
    found = drafter.match(text.expand(length.shape[0], -1), length)
    index = length[:, None] + torch.arange(drafter.width, device=text.device)
    recorded = (index < text.shape[0]) & (index < (length + found.length)[:, None])
    right = recorded & (found.tokens == text[index.clamp(max=text.shape[0] - 1)])
    accepted = right.long().cumprod(dim=1).sum(dim=1)
    graded = (accepted + 1).minimum(recorded.sum(dim=1))
    features = (found.match_length, found.agreement, found.copy_length)
    return torch.stack([length - first, *features, found.length, graded, accepted])


def _steps(accepted: Ints) -> list[int]:
    """The prefixes that verification visits when the draft after prefix i has accepted[i] tokens accepted."""
    visited, position = [], 0
    while position < len(accepted):
        visited.append(position)
        position += int(accepted[position]) + 1
    return visited
