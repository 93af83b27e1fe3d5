"""From a workload, or outputs that are there already, to a record table; a killed run goes on where it was."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from hspark.config import SamplingParams
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.known import known_drafter
from hspark.drafters.ngram import NgramDrafter
from hspark.drafters.opening import open_drafter
from hspark.lab.bench import encode_samples
from hspark.lab.digests import target_facts
from hspark.lab.outputs import RecordedOutput, check_ids, load_tokenize, read_lines, read_outputs
from hspark.lab.record import record
from hspark.lab.runs import BenchPrompt
from hspark.lab.table import RecordTable
from hspark.lab.workloads import load_workload
from hspark.models import LoadedTarget, load_target
from hspark.policy import load_cost
from hspark.sampling import GREEDY_TEMPERATURE
from hspark.speculator import HybridSpeculator

# Outputs are kept on disk each time that so many batches are done.
_BATCHES_KEPT = 4
MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class RecordSettings:
    """How outputs are generated and recorded.

    target, dtype, device: as for `load_target`. drafter: "auto" (the one known for the target), None, a directory or
    hub id of a DSpark drafter. drafting: "greedy" or "probabilistic". temperature, seed: of the requests; request i has
    seed + i. max_new_tokens: None is 256. limit: requests, None for all. batch_size: rows of the engine that generates.
    cost: its step cost, "auto" (measured) or a file. min_match: shortest match that the n-gram drafter takes (the
    paper's 5).
    """

    target: str
    drafter: str | None = "auto"
    drafting: str = "greedy"
    dtype: str = "auto"
    device: str = "auto"
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int | None = None
    limit: int | None = None
    batch_size: int = 4
    cost: str = "auto"
    min_match: int = 5

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} is out of range; use an integer of at least 1")
        NgramDrafter(min_match=self.min_match)
        if self.cost != "auto":
            load_cost(self.cost)
        self.params(0)

    @property
    def sampled(self) -> bool:
        return self.temperature > GREEDY_TEMPERATURE

    @property
    def most_tokens(self) -> int:
        return MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.most_tokens, temperature=self.temperature, seed=self.seed + index)

    def open_drafter(self) -> DSparkDrafter | None:
        """The drafter, checked; its weights are read later."""
        name = known_drafter(self.target) if self.drafter == "auto" else self.drafter
        if name is None:
            return None
        opened = open_drafter(name, self.dtype, self.device, drafting=self.drafting, noise="coupled")
        if not isinstance(opened, DSparkDrafter):
            raise ValueError(
                f"drafter={name!r} is not a DSpark drafter, and only those can be recorded; use one, or none"
            )
        return opened


def record_file(
    path: str | Path, directory: str | Path, settings: RecordSettings, note: Callable[[str], object] | None = None
) -> RecordTable:
    """The record table, in `directory`, of a workload file, or of a file of recorded outputs.

    A file whose first line has "output_token_ids" holds recorded outputs (see `read_outputs`); those at another
    temperature than the settings' are passed over. Otherwise it is a workload (`load_workload`), which the target
    answers first; its answers are kept in `directory`/outputs.jsonl. Run again, it goes on after the last one kept.
    note: told, as a sentence, what of the file was left out. ValueError for a file or a setting that does not fit.
    """
    directory = Path(directory)
    drafter = settings.open_drafter()
    if holds_outputs(path):
        outputs, seeds, limits = _recorded(path, settings, note), None, None
        target = load_target(settings.target, settings.dtype, settings.device)
        check_ids(outputs, cast(Any, target.model).get_input_embeddings().weight.shape[0])
        facts = target_facts(target.model)
    else:
        samples = load_workload(path, settings.limit)
        target = load_target(settings.target, settings.dtype, settings.device)
        prompts = encode_samples(samples, target)
        facts = target_facts(target.model)
        target, outputs = _answers(target, prompts, directory / "outputs.jsonl", settings, facts, drafter)
        seeds = [settings.seed + index for index in range(len(outputs))] if settings.sampled else None
        limits = settings.most_tokens
    total = sum(len(output.output_token_ids) for output in outputs)
    with tqdm(total=total, desc="record", unit="tok", unit_scale=True, disable=None) as bar:
        return record(
            outputs,
            directory,
            ngram=NgramDrafter(min_match=settings.min_match),
            model=None if drafter is None else target.model,
            drafter=drafter,
            name=settings.target,
            facts=facts,
            stop_token_ids=target.eos_token_ids,
            max_new_tokens=limits,
            seeds=seeds,
            progress=bar.update,
        )


def holds_outputs(path: str | Path) -> bool:
    """Whether a JSON-lines file begins with a recorded output; what else is wrong with it is left to its reader."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"file {str(path)!r} does not exist; give a workload or recorded outputs (.jsonl or .jsonl.gz)"
        )
    try:
        first = json.loads(next((line for _, line in read_lines(path)), "{}"))
    except ValueError:
        return False
    return isinstance(first, dict) and "output_token_ids" in first


def _recorded(path: str | Path, settings: RecordSettings, note: Callable[[str], object] | None) -> list[RecordedOutput]:
    for name, usual in (("max_new_tokens", None), ("seed", 0), ("batch_size", 4)):
        if (value := getattr(settings, name)) != usual:
            raise ValueError(f"{name}={value} with recorded outputs, which are not generated again; leave it")
    tokenize: Callable[[str], list[int]] | None = None

    def tokenize_late(prompt: str) -> list[int]:
        nonlocal tokenize
        tokenize = tokenize or load_tokenize(settings.target)
        return tokenize(prompt)

    outputs = read_outputs(path, tokenize_late)
    wanted = settings.temperature if settings.sampled else 0.0
    kept = [each for each in outputs if abs((each.temperature or 0.0) - wanted) <= GREEDY_TEMPERATURE]
    if not kept:
        raise ValueError(f"{path} holds no output at temperature={wanted}; use the temperature that its outputs have")
    if len(kept) < len(outputs) and note is not None:
        note(f"left out {len(outputs) - len(kept)} of {len(outputs)} outputs, at another temperature than {wanted:g}")
    kept = kept[: settings.limit]
    if not any(output.output_token_ids for output in kept):
        raise ValueError(f"{path} holds no output with a token; use outputs of at least one token")
    return kept


# -- answering a workload ----------------------------------------------------------------------------------------


def _answers(
    target: LoadedTarget,
    prompts: Sequence[BenchPrompt],
    path: Path,
    settings: RecordSettings,
    facts: dict[str, str],
    drafter: DSparkDrafter | None,
) -> tuple[LoadedTarget, list[RecordedOutput]]:
    """The outputs of all prompts, and the target (loaded anew if an engine had it)."""
    asked = _asked(settings, facts)
    outputs = _kept(path, prompts, asked)
    if len(outputs) == len(prompts):
        return target, outputs
    path.parent.mkdir(parents=True, exist_ok=True)
    room = max(len(prompt.token_ids) for prompt in prompts) + settings.most_tokens
    speculator: Any = HybridSpeculator(
        target.model,
        target.tokenizer,
        name=target.name,
        eos_token_ids=target.eos_token_ids,
        drafter=copy.copy(drafter),
        cost=settings.cost,
        policy="ngram_only" if drafter is None else "proposed",
        drafting=settings.drafting,
        max_batch_size=settings.batch_size,
        max_length=room,
    )
    size = _BATCHES_KEPT * settings.batch_size
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=len(prompts), initial=len(outputs), desc="generate", unit="output", disable=None) as bar,
    ):
        while len(outputs) < len(prompts):
            first = len(outputs)
            part = prompts[first : first + size]
            params = [settings.params(first + index) for index in range(len(part))]
            for prompt, answer in zip(part, speculator.generate([p.token_ids for p in part], params), strict=True):
                if answer.error is not None:
                    raise RuntimeError(f"prompt {prompt.task_id!r} failed: {answer.error}")
                outputs.append(
                    RecordedOutput(
                        tuple(prompt.token_ids), tuple(answer.token_ids), settings.temperature, prompt.task_id
                    )
                )
                file.write(json.dumps(_line(outputs[-1], asked, answer.text)) + "\n")
                bar.update(1)
            file.flush()
    # The engine has changed the model's layers; recording takes a fresh one.
    del speculator, target
    gc.collect()
    return load_target(settings.target, settings.dtype, settings.device, progress=False), outputs


def _asked(settings: RecordSettings, facts: dict[str, str]) -> dict[str, Any]:
    """What answers depend on beside the prompt."""
    return {
        "temperature": settings.temperature,
        "seed": settings.seed,
        "max_new_tokens": settings.most_tokens,
        "target": Path(settings.target).name,
        **facts,
    }


def _line(output: RecordedOutput, asked: dict[str, Any], text: str | None) -> dict[str, Any]:
    return {
        "task_id": output.task_id,
        **asked,
        "prompt_token_ids": output.prompt_token_ids,
        "output_token_ids": output.output_token_ids,
        "text": text,
    }


def _kept(path: Path, prompts: Sequence[BenchPrompt], asked: dict[str, Any]) -> list[RecordedOutput]:
    """The outputs on disk; a line that was cut short is dropped. ValueError if they answer something else.

    Lines of earlier versions do not say which target they are of; what a line does say has to be what is asked.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines := lines[:-1]), encoding="utf-8")
    outputs = []
    for number, line in enumerate(lines):
        found = json.loads(line)
        made = {name: found[name] for name in asked if name in found}
        same = number < len(prompts) and found["prompt_token_ids"] == list(prompts[number].token_ids)
        if made != {name: asked[name] for name in made} or not same:
            raise ValueError(
                f"out: {path} holds outputs of other requests (line {number + 1}, made with {made}); use the same "
                "workload and settings, or another directory"
            )
        ids = tuple(found["prompt_token_ids"]), tuple(found["output_token_ids"])
        outputs.append(RecordedOutput(*ids, asked["temperature"], found["task_id"]))
    return outputs
