"""Making a record table: both drafters run after every prefix of every recorded output.

The target reads each text once. The model drafter's keys and values of that text are shared by all its prefixes: a
block attends to what comes before its own anchor, so one forward drafts after many prefixes, and every chain is the one
that the drafter proposes in the engine after the same text (to the rounding of sums).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hspark.config import SamplingParams
from hspark.drafters.base import Drafter
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.ngram import NgramDrafter
from hspark.lab.digests import checkpoint_facts
from hspark.lab.outputs import RecordedOutput, check_ids
from hspark.lab.record_model import ModelRecorder, accepted_length
from hspark.lab.table import NO_LIMIT, RecordTable
from hspark.lab.table_files import TableWriter, fingerprint
from hspark.sampling import GREEDY_TEMPERATURE
from hspark.speculator import HybridSpeculator

Array = NDArray[Any]

# Compared tokens (prefixes x context x max_match) in one call of the matcher: bounds its memory to some tens of MB.
_CHUNK_COMPARISONS = 1 << 22


class _Job(NamedTuple):
    """One output to record: what it is, the noise seed it was sampled with (-1: none) and its length limit."""

    output: RecordedOutput
    seed: int
    limit: int

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.output, self.seed, self.limit)


def record(
    outputs: Sequence[RecordedOutput],
    directory: str | Path,
    *,
    ngram: NgramDrafter | None = None,
    model: Any | None = None,
    drafter: Drafter | None = None,
    name: str = "",
    facts: Mapping[str, Any] | None = None,
    stop_token_ids: Sequence[int] = (),
    max_new_tokens: int | Sequence[int] | None = None,
    seeds: Sequence[int | None] | None = None,
    blocks: int = 64,
    chunk: int = 512,
    shard_positions: int = 20_000,
    progress: Callable[[int], object] | None = None,
) -> RecordTable:
    """Drafts after every prefix of `outputs`, into the table at `directory`, and returns it.

    A table that is there already is continued after its last output; ValueError if it was made from other outputs or
    settings. To begin anew use another directory.

    ngram: the model-free drafter, `NgramDrafter()` if None; only its match settings matter.
    model, drafter: the target (a transformers causal LM, on its device) and its DSpark drafter: both or neither. The
        model is taken over as by `CausalTarget`, the drafter is not touched: a copy with its settings does the work.
        Draft models of another kind are refused.
    name: the target's, for the table's `info`. facts: more about it for `info`, such as `target_facts`; a table is
        continued with the same ones only.
    max_new_tokens: each output's length limit (one for all, or one each). None: the output's own length, or no limit
        where the output ends with one of stop_token_ids.
    seeds: noise seed of each output that was sampled with one; needed above temperature 0 with a drafter that drafts
        probabilistically, as its drafts are drawn with the same noise.
    blocks: prefixes drafted after at once. chunk: tokens of text that the target reads at once.
    shard_positions: positions after which progress is kept on disk.
    progress: called with the number of output tokens done since the last call, those found on disk included.
    """
    for label, value in (("blocks", blocks), ("chunk", chunk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{label}={value!r} is not usable; use an integer of at least 1")
    ngram = copy.copy(NgramDrafter() if ngram is None else ngram)
    ngram.context_limit = None  # an engine's bound on its rows says nothing about these texts
    jobs = _jobs(outputs, stop_token_ids, max_new_tokens, seeds)
    _check_drafter(model, drafter, jobs)
    writer = TableWriter(directory, _info(ngram, drafter, name, facts or {}), shard_positions=shard_positions)
    done = _check_done(writer, jobs)
    if progress is not None and done:
        progress(sum(len(job.output.output_token_ids) for job in jobs[:done]))
    left = jobs[done:]
    if left:
        recorder = None
        if isinstance(drafter, DSparkDrafter):
            recorder = ModelRecorder(model, drafter, _longest(left), name, blocks, chunk)
        for job in left:
            columns = {**_output_columns(job), **_free_columns(job, ngram)}
            seed = None if job.seed < 0 else job.seed
            columns |= _no_model_columns(job) if recorder is None else recorder.columns(job.output, seed)
            writer.add(columns, [job.output.task_id], [job.fingerprint])
            if progress is not None:
                progress(len(job.output.output_token_ids))
        writer.flush()
    return RecordTable.load(writer.directory)


def greedy_outputs(
    speculator: HybridSpeculator,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 256,
    task_ids: Sequence[str] | None = None,
    progress: bool = False,
) -> list[RecordedOutput]:
    """The target's answers at temperature 0 to `prompts` (as `HybridSpeculator.generate` takes them).

    ValueError if task_ids are not one per prompt; RuntimeError if a request fails.
    """
    if task_ids is not None and len(task_ids) != len(prompts):
        raise ValueError(f"task_ids has {len(task_ids)} entries for {len(prompts)} prompts; use one for each, or None")
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    answers = speculator.generate(prompts, params, progress=progress)
    recorded = []
    for index, answer in enumerate(answers):
        if answer.error is not None:
            raise RuntimeError(f"prompt {index} failed: {answer.error}")
        task_id = "" if task_ids is None else task_ids[index]
        recorded.append(RecordedOutput(tuple(answer.prompt_token_ids), tuple(answer.token_ids), 0.0, task_id))
    return recorded


# -- what is asked for -------------------------------------------------------------------------------------------


def _jobs(
    outputs: Sequence[RecordedOutput],
    stop_token_ids: Sequence[int],
    max_new_tokens: int | Sequence[int] | None,
    seeds: Sequence[int | None] | None,
) -> list[_Job]:
    count, stops = len(outputs), set(stop_token_ids)
    if not count:
        raise ValueError("outputs is empty; use at least one recorded output")
    lengths = [len(output.output_token_ids) for output in outputs]
    if max_new_tokens is None:
        ended = [output.output_token_ids[-1:] and output.output_token_ids[-1] in stops for output in outputs]
        limits = [NO_LIMIT if end else length for end, length in zip(ended, lengths, strict=True)]
    else:
        limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
    given = [None] * count if seeds is None else list(seeds)
    for label, values in (("max_new_tokens", limits), ("seeds", given)):
        if len(values) != count:
            raise ValueError(f"{label} has {len(values)} entries for {count} outputs; use one for each")
    for index, (limit, length) in enumerate(zip(limits, lengths, strict=True)):
        if isinstance(limit, bool) or not isinstance(limit, int) or not length <= limit <= NO_LIMIT:
            raise ValueError(
                f"max_new_tokens={limit!r} does not fit output {index}, which has {length} tokens; use at least that"
            )
    for index, seed in enumerate(given):
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
            raise ValueError(f"seeds[{index}]={seed!r} is not usable; use an integer from 0 to 2**63 - 1, or None")
    return [
        _Job(output, -1 if seed is None else seed, limit)
        for output, seed, limit in zip(outputs, given, limits, strict=True)
    ]


def _check_drafter(model: Any | None, drafter: Drafter | None, jobs: Sequence[_Job]) -> None:
    if (model is None) != (drafter is None):
        missing = "model" if model is None else "drafter"
        raise ValueError(f"{missing}=None, but the other is given; use a target and its DSpark drafter, or neither")
    if drafter is None:
        return
    if not isinstance(drafter, DSparkDrafter):
        raise ValueError(
            f"drafter={drafter!r} is not a DSparkDrafter; only DSpark drafters can be recorded, whose chains depend on "
            "the target's hidden states and not on earlier steps"
        )
    check_ids([job.output for job in jobs], model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr]
    if positions is not None and _longest(jobs) > positions:
        raise ValueError(
            f"outputs holds a text of {_longest(jobs)} tokens, and the target knows {positions} positions; leave it out"
        )
    if drafter.drafting == "probabilistic":
        for index, job in enumerate(jobs):
            if _sampled(job.output) and job.seed < 0:
                raise ValueError(
                    f"seeds has none for output {index}, which was sampled at temperature {job.output.temperature}; "
                    'give the seed it was sampled with, or use a drafter with drafting="greedy"'
                )


def _check_done(writer: TableWriter, jobs: Sequence[_Job]) -> int:
    """Outputs that are on disk; ValueError if they are not the first of `jobs`."""
    known, wanted = writer.fingerprints, [job.fingerprint for job in jobs]
    if len(known) > len(wanted) or known != wanted[: len(known)]:
        differing = next((i for i, (a, b) in enumerate(zip(known, wanted, strict=False)) if a != b), len(wanted))
        raise ValueError(
            f"directory={str(writer.directory)!r} holds {len(known)} outputs, and output {differing} is not the one "
            "given; use the same outputs in the same order, with more at the end, or another directory"
        )
    return len(known)


def _info(ngram: NgramDrafter, drafter: Drafter | None, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    info: dict[str, Any] = {
        "target": name,
        **facts,
        "model_width": 0,
        "free_width": ngram.width,
        "ngram": {key: getattr(ngram, key) for key in ("min_match", "max_match", "copy_cap", "periodic")},
        "drafter": None,
    }
    if isinstance(drafter, DSparkDrafter):
        info["model_width"] = drafter.width
        temperatures, biases = drafter.calibration.for_width(drafter.width)
        info["drafter"] = {
            **checkpoint_facts(getattr(drafter.source, "path", None)),
            "block_size": drafter.config.block_size,
            "num_layers": drafter.config.num_layers,
            "drafting": drafter.drafting,
            "noise": drafter.noise,
            "temperatures": temperatures,
            "biases": biases,
            "curve": [drafter.calibration.curve.intercept, drafter.calibration.curve.slope],
        }
    return info


# -- columns of one output ---------------------------------------------------------------------------------------


def _output_columns(job: _Job) -> dict[str, Array]:
    prompt, answer = job.output.prompt_token_ids, job.output.output_token_ids
    temperature = np.nan if job.output.temperature is None else job.output.temperature
    return {
        "prompt_length": np.array([len(prompt)]),
        "output_length": np.array([len(answer)]),
        "limit": np.array([job.limit]),
        "temperature": np.array([temperature]),
        "seed": np.array([job.seed]),
        "prompt_tokens": np.array(prompt),
        "token": np.array(answer, dtype=np.int32),
    }


def _free_columns(job: _Job, ngram: NgramDrafter) -> dict[str, Array]:
    """The n-gram drafter's chains and match features after every prefix of one output."""
    text, first = _text(job), len(job.output.prompt_token_ids)
    last = text.shape[0]
    size = max(1, _CHUNK_COMPARISONS // (ngram.max_match * last))
    parts: dict[str, list[Tensor]] = {name: [] for name in _FREE}
    for start in range(first, max(last, first + 1), size):
        length = torch.arange(start, min(start + size, last))
        found = ngram.match(text.expand(length.shape[0], -1), length)
        values = (
            *(found.tokens, found.length, accepted_length(found.tokens, found.length, text, length)),
            *(found.match_length, found.agreement, found.copy_length),
        )
        for name, value in zip(_FREE, values, strict=True):
            parts[name].append(value)
    return {name: torch.cat(values).numpy() for name, values in parts.items()}


_FREE = ("free_tokens", "free_length", "free_accepted", "match_length", "agreement", "copy_length")


def _no_model_columns(job: _Job) -> dict[str, Array]:
    count = len(job.output.output_token_ids)
    none = np.zeros(count, dtype=np.uint8)
    return {
        "model_tokens": np.zeros((count, 0), dtype=np.int32),
        "model_acceptance": np.zeros((count, 0), dtype=np.float32),
        "model_length": none,
        "model_accepted": none,
    }


def _text(job: _Job) -> Tensor:
    return torch.tensor([*job.output.prompt_token_ids, *job.output.output_token_ids], dtype=torch.int64)


def _longest(jobs: Sequence[_Job]) -> int:
    return max(len(job.output.prompt_token_ids) + len(job.output.output_token_ids) for job in jobs)


def _sampled(output: RecordedOutput) -> bool:
    return output.temperature is not None and output.temperature > GREEDY_TEMPERATURE
