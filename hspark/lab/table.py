"""The record table: both drafters' chains at every position of recorded outputs, and how far each would be accepted.

A chain depends on the text before it alone, and the text after it is on record, so one table makes every policy,
budget and estimator replayable without a model. Estimates of the model-free chain are not stored but the match features
they are made of; `RecordTable.free_chain` takes any estimator.

A table is a directory: `info.json` with what it was made from, and shards `outputs-<first>-<end>.npz` that hold whole
outputs, in order. A shard appears whole or not at all, so a killed run goes on where it was (`TableWriter`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hspark.core import SOURCE_FREE, SOURCE_MODEL, Chain
from hspark.lab.outputs import RecordedOutput
from hspark.lab.table_files import PER_OUTPUT, PER_POSITION, TableWriter, empty_columns, read_directory, read_shard

Array = NDArray[Any]
# (match_length [B], agreement [B], copy_length [B]) -> acceptance of each position, float32 [B, L].
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]

NO_LIMIT = 2**31 - 1  # in `limit`: the output ended by itself, nothing says where it would have been cut


@dataclass(frozen=True)
class RecordTable:
    """N positions of M outputs. Position i of an output is the prefix of its prompt and its first i output tokens.

    info: what the table was made from (target, drafters and their settings), JSON-ready; `model_width` K and
        `free_width` L among it. K is 0 without a model drafter.
    task_ids: M names.  prompt_length, output_length: int32 [M].  prompt_tokens: int32 [sum of prompt_length].
    limit: int32 [M] output tokens at which the request would have ended by its own length limit; chains are cut to
        leave room for the step's own token before it. NO_LIMIT where that is not known and did not matter.
    temperature: float32 [M], NaN if not recorded.  seed: int64 [M], -1 if none.
    token: int32 [N] the output token that followed.
    model_tokens: int32 [N, K].  model_length: uint8 [N].  model_acceptance: float32 [N, K] conditional, calibrated.
    free_tokens: int32 [N, L].  free_length: int16 [N], 0 without a match.  match_length: int16, agreement: uint8,
        copy_length: int32, each [N]: the match features n, a, m (`NgramMatch`).
    model_accepted (uint8 [N]), free_accepted (int16 [N]): leading draft tokens that equal the tokens that followed, up
        to the end of the output. At temperature 0, and under coupled verification with the recorded seed, that is what
        the target accepts. A step delivers at most `remaining - 1` of them beside its own token.
    """

    info: dict[str, Any]
    task_ids: tuple[str, ...]
    prompt_length: Array
    output_length: Array
    limit: Array
    temperature: Array
    seed: Array
    prompt_tokens: Array
    token: Array
    model_tokens: Array
    model_acceptance: Array
    model_length: Array
    model_accepted: Array
    free_tokens: Array
    free_length: Array
    free_accepted: Array
    match_length: Array
    agreement: Array
    copy_length: Array

    # -- sizes and places ----------------------------------------------------------------------------------------

    @property
    def outputs(self) -> int:
        """M."""
        return len(self.task_ids)

    @property
    def positions(self) -> int:
        """N."""
        return len(self.token)

    @property
    def model_width(self) -> int:
        return int(self.model_tokens.shape[1])

    @property
    def free_width(self) -> int:
        return int(self.free_tokens.shape[1])

    @cached_property
    def start(self) -> Array:
        """int64 [M + 1]: output m has the positions start[m] .. start[m + 1] - 1."""
        return np.concatenate([[0], np.cumsum(self.output_length, dtype=np.int64)])

    @cached_property
    def output(self) -> Array:
        """int64 [N]: the output that each position belongs to."""
        return np.repeat(np.arange(self.outputs), self.output_length)

    @cached_property
    def position(self) -> Array:
        """int64 [N]: output tokens before each position, 0 for the prompt alone."""
        return np.arange(self.positions) - self.start[self.output]

    @cached_property
    def remaining(self) -> Array:
        """int64 [N]: output tokens from each position to the end of its output, at least 1."""
        return self.output_length[self.output] - self.position

    def graded(self, source: str) -> Array:
        """int64 [N]: draft slots with a label ("model" or "free"): slot k has one iff the slots before it were accepted
        and the output has a token there; its label is whether k < accepted."""
        if source not in ("model", "free"):
            raise ValueError(f"source={source!r} is unknown; use 'model' or 'free'")
        length, accepted = (getattr(self, f"{source}_{name}").astype(np.int64) for name in ("length", "accepted"))
        return np.minimum(accepted + 1, np.minimum(length, self.remaining))

    # -- chains --------------------------------------------------------------------------------------------------

    def model_chain(self, acceptance: Array | None = None) -> Chain:
        """The model drafter's chains at all positions, [N, K]. acceptance: float [N, K] in place of the recorded one
        (another calibration, say)."""
        values = self.model_acceptance if acceptance is None else _shaped("acceptance", acceptance, self.model_tokens)
        return _chain(self.model_tokens, self.model_length, torch.from_numpy(values), SOURCE_MODEL)

    def free_chain(self, estimator: Estimator | Array) -> Chain:
        """The model-free chains at all positions, [N, L].

        estimator: an `AcceptanceEstimator` (or any function of the match features) for L positions, or conditional
        acceptances float [N, L] themselves. ValueError for another width.
        """
        if isinstance(estimator, np.ndarray):
            values = torch.from_numpy(_shaped("estimator", estimator, self.free_tokens))
        else:
            widen = getattr(estimator, "with_width", None)
            values = (estimator if widen is None else widen(self.free_width))(*self.features())
            if values.shape != self.free_tokens.shape:
                raise ValueError(
                    f"estimator gave shape {tuple(values.shape)}; use one for {self.free_width} positions, which gives "
                    f"{self.free_tokens.shape}"
                )
        return _chain(self.free_tokens, self.free_length, values, SOURCE_FREE)

    def features(self) -> tuple[Tensor, Tensor, Tensor]:
        """match_length, agreement, copy_length, each int64 [N]: what an estimator takes."""
        names = ("match_length", "agreement", "copy_length")
        match_length, agreement, copy_length = (torch.from_numpy(getattr(self, n).astype(np.int64)) for n in names)
        return match_length, agreement, copy_length

    # -- parts ---------------------------------------------------------------------------------------------------

    def recorded(self) -> list[RecordedOutput]:
        """The outputs that the table was made from."""
        ends = np.cumsum(self.prompt_length, dtype=np.int64)
        return [
            RecordedOutput(
                prompt_token_ids=tuple(self.prompt_tokens[ends[m] - self.prompt_length[m] : ends[m]].tolist()),
                output_token_ids=tuple(self.token[self.start[m] : self.start[m + 1]].tolist()),
                temperature=None if np.isnan(self.temperature[m]) else float(self.temperature[m]),
                task_id=self.task_ids[m],
            )
            for m in range(self.outputs)
        ]

    def select(self, outputs: Sequence[int] | Array) -> RecordTable:
        """The table of some of the outputs, in the given order (repeats allowed). ValueError for an unknown one."""
        chosen = np.asarray(outputs, dtype=np.int64).reshape(-1)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.outputs):
            raise ValueError(f"outputs={outputs!r} is out of range; use numbers from 0 to {self.outputs - 1}")
        rows = _spans(self.start[chosen], self.output_length[chosen])
        prompt_ends = np.cumsum(self.prompt_length, dtype=np.int64)
        prompts = _spans((prompt_ends - self.prompt_length)[chosen], self.prompt_length[chosen])
        parts: dict[str, Any] = {name: getattr(self, name)[chosen] for name in PER_OUTPUT}
        parts |= {name: getattr(self, name)[rows] for name in PER_POSITION}
        parts |= {"prompt_tokens": self.prompt_tokens[prompts]}
        return RecordTable(info=self.info, task_ids=tuple(self.task_ids[m] for m in chosen), **parts)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the whole table into a new or empty directory; ValueError if one with outputs is there."""
        writer = TableWriter(directory, self.info)
        if writer.outputs:
            raise ValueError(f"directory={str(directory)!r} holds a table already; use another directory")
        names = (*PER_OUTPUT, *PER_POSITION, "prompt_tokens")
        writer.add({name: getattr(self, name) for name in names}, self.task_ids, [""] * self.outputs)
        writer.flush()
        return writer.directory

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> RecordTable:
        """The table in `directory`, as far as it is written. ValueError that says what is wrong with it otherwise."""
        info, shards = read_directory(Path(directory))
        columns: dict[str, list[Array]] = {name: [] for name in (*PER_OUTPUT, *PER_POSITION, "prompt_tokens")}
        task_ids: list[str] = []
        for path in shards:
            shard = read_shard(path)
            task_ids += shard["task_ids"].tolist()
            for name, parts in columns.items():
                parts.append(shard[name])
        empty = empty_columns(info)
        joined = {name: np.concatenate([empty[name], *parts]) for name, parts in columns.items()}
        return cls(info=info, task_ids=tuple(task_ids), **joined)


def _chain(tokens: Array, length: Array, acceptance: Tensor, source: int) -> Chain:
    lengths = torch.from_numpy(length.astype(np.int64))
    return Chain.build(torch.from_numpy(tokens.astype(np.int64)), lengths, acceptance, source=source)


def _shaped(name: str, values: Array, like: Array) -> Array:
    if values.shape != like.shape:
        raise ValueError(f"{name} has shape {values.shape}; use {like.shape}, positions by draft slots")
    return values.astype(np.float32)


def _spans(first: Array, length: Array) -> Array:
    """int64: first[0] .. first[0] + length[0] - 1, then the same for first[1], and so on."""
    ends = np.cumsum(length, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first - (ends - length), length)
