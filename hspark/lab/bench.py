"""The benchmark: arms x batch sizes x repeats over the same prompts, interleaved, on one set of weights.

The prompts are cut into groups; within a group every arm runs before the next group begins, in an order that rotates,
so that a slow spell of the machine hits all arms alike. Loading, cost measurement and warm-up are outside the clock.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hspark.config import SamplingParams
from hspark.drafters.base import Drafter
from hspark.lab.arms import Arm, ArmSpec, PeerArm, SpeculatorArm, plain_copy
from hspark.lab.bench_report import BatchSummary, BenchReport, summarise
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.differences import compare
from hspark.lab.machine import load_average, machine_facts
from hspark.lab.observer import Observer
from hspark.lab.runs import BatchRuns, BenchPrompt, GroupRun
from hspark.lab.workloads import Sample
from hspark.models import LoadedTarget
from hspark.policy import CostModel, Policy
from hspark.speculator import HybridSpeculator
from hspark.target import CausalTarget

# Makes an arm that no name in the settings stands for, given the builder and the batch size.
ExtraArm = Callable[["ArmBuilder", int], Arm]

WARMUP_TOKENS = 8
_ROUND = 64


def encode_samples(samples: Sequence[Sample], target: LoadedTarget) -> list[BenchPrompt]:
    """The samples as token ids, through the target's chat template where it has one."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"model {target.name!r} has no tokenizer, and a workload is text; use a model with one")
    prompts = []
    for sample in samples:
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(sample.messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("\n\n".join(message["content"] for message in sample.messages))["input_ids"]
        prompts.append(BenchPrompt(sample.task_id, "chat" if sample.reference_input is None else "edit", list(ids)))
    return prompts


def make_groups(prompts: Sequence[BenchPrompt], size: int) -> list[list[int]]:
    """Indices of the prompts, cut into groups of at most `size`, each of one kind."""
    groups = []
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        members = [index for index, prompt in enumerate(prompts) if prompt.kind == kind]
        groups += [members[start : start + size] for start in range(0, len(members), size)]
    return groups


def run_bench(
    target: LoadedTarget,
    prompts: Sequence[BenchPrompt],
    settings: BenchSettings,
    *,
    workload: str = "",
    drafter: Drafter | None = None,
    observer: Observer | None = None,
    extra_arms: Mapping[str, ExtraArm] | None = None,
    baseline: str = "vanilla",
) -> BenchReport:
    """Runs every arm over every prompt at every batch size, and sums up.

    target: its model is taken over. workload: the name for the header. drafter: what `settings.open_drafter` gave, if
    it was called before. extra_arms: arms beside those of the settings, by name, made for every batch size. baseline:
    the arm whose speed the others are compared with; texts are always held against vanilla's.
    An interrupt (Ctrl-C) ends it early: what every arm has run is reported, with a note; the rest is left out.
    ValueError, before any work, for prompts that do not fit the model.
    """
    prompts, observer = list(prompts), observer or Observer()
    capacity = row_capacity(target, prompts, settings.max_new_tokens)
    header = _header(target, prompts, settings, workload)
    begun = time.perf_counter()
    builder = ArmBuilder(target, settings, capacity, drafter or settings.open_drafter(target.dtype, target.device))
    batches: list[BatchSummary] = []
    for size in settings.batch_sizes:
        arms = builder.arms(size, extra_arms or {})
        batch, failed, whole = _run_batch(arms, prompts, settings, size, observer, {"vanilla", baseline})
        if not batch.groups and not batches:
            raise KeyboardInterrupt
        header["notes"] += failed
        if batch.groups:
            compare(batch, prompts, settings.params, settings.comparable, builder.plain, target.tokenizer)
            batches.append(summarise(batch, prompts, baseline))
        if not whole:
            break
    header["seconds"] = round(time.perf_counter() - begun, 1)
    header["machine"]["load_average_after"] = load_average()
    header["estimator"], header["costs"] = builder.estimator_note, builder.cost_records
    header["weight_bytes"], header["kv_bytes_per_token"] = builder.weight_bytes, builder.kv_bytes_per_token
    return BenchReport(header, batches)


def row_capacity(target: LoadedTarget, prompts: Sequence[BenchPrompt], max_new_tokens: int) -> int:
    """Tokens that a row must hold. ValueError for a prompt without tokens, or one that leaves too little room."""
    if not prompts:
        raise ValueError("the workload is empty; use at least one request")
    config: Any = target.model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    for prompt in prompts:
        if not prompt.token_ids:
            raise ValueError(f"request {prompt.task_id!r} has an empty prompt; use at least one token")
        if limit is not None and len(prompt.token_ids) + max_new_tokens > limit:
            raise ValueError(
                f"request {prompt.task_id!r} has {len(prompt.token_ids)} prompt tokens, which with max_new_tokens="
                f"{max_new_tokens} exceed the model's {limit} positions; lower max_new_tokens or leave it out"
            )
    most = max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens
    rounded = -(-most // _ROUND) * _ROUND
    return rounded if limit is None else min(rounded, limit)


class ArmBuilder:
    """Makes the arms of one batch size after another: one set of weights, and one cost for arms that draft alike.

    target: its model is taken over by the first arm that is a speculator. capacity: tokens that a row holds.
    plain: the model as transformers made it, with the same weights, for arms that are none.
    """

    def __init__(self, target: LoadedTarget, settings: BenchSettings, capacity: int, drafter: Drafter | None) -> None:
        self.target, self.settings, self.capacity, self.drafter = target, settings, capacity, drafter
        self.plain = plain_copy(target.model)
        self.estimator_note = ""
        self.cost_records: list[dict[str, Any]] = []
        self.weight_bytes = weight_bytes(target.model)
        self.kv_bytes_per_token = 0
        self._costs: dict[tuple[int, tuple[str, ...]], CostModel] = {}

    def arms(self, batch_size: int, extra: Mapping[str, ExtraArm]) -> dict[str, Arm]:
        """The arms of the settings, and the extra ones after them."""
        arms: dict[str, Arm] = {}
        for spec in self.settings.specs:
            if not spec.is_peer:
                arms[spec.name] = SpeculatorArm(spec, self.speculator(spec, batch_size))
            elif batch_size == 1:
                arms[spec.name] = PeerArm(spec, self.plain, self.target.eos_token_ids)
        return arms | {name: make(self, batch_size) for name, make in extra.items()}

    def speculator(self, spec: ArmSpec, batch_size: int, policy: Policy | None = None) -> HybridSpeculator:
        """The speculator of an arm. policy: another one in place of the spec's, at the same cost of a step."""
        settings, target = self.settings, self.target
        # A drafter holds the buffers of the engine that it is bound to, so each arm has its own.
        drafter = copy.copy(self.drafter) if spec.needs_model else None
        key = (batch_size, spec.drafter_names(None if drafter is None else drafter.name))
        speculator = HybridSpeculator(
            target.model,
            target.tokenizer,
            name=target.name,
            eos_token_ids=target.eos_token_ids,
            drafter=drafter,
            estimator=settings.estimator,
            cost=self._costs.get(key, settings.cost),
            policy=policy or spec.policy,
            budget=spec.budget,
            max_batch_size=batch_size,
            max_length=self.capacity,
            **settings.speculator_settings(),
        )
        self.estimator_note = speculator.estimator_note
        self.kv_bytes_per_token = kv_bytes_per_token(speculator.engine.target)
        if key[1] and key not in self._costs:
            self._costs[key] = speculator.cost
            record = {"batch_size": batch_size, "drafters": list(key[1]), **_cost_record(speculator.cost)}
            self.cost_records.append(record)
        return speculator


def _cost_record(cost: CostModel) -> dict[str, Any]:
    """A cost model as the file that it saves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cost.json"
        cost.save(path)
        return json.loads(path.read_text())


def weight_bytes(model: Any) -> int:
    """Bytes of weights that one forward reads: all but an input embedding that is no output embedding as well."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    return sum(each.numel() * each.element_size() for each in model.parameters() if tied or each is not table)


def kv_bytes_per_token(target: CausalTarget) -> int:
    """Bytes of keys and values that a token of context adds, over all layers that keep their own."""
    own = [shape for shape in target.buffers.shapes if shape.shares_with is None]
    return sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in own) * target.dtype.itemsize


def _run_batch(
    arms: dict[str, Arm],
    prompts: list[BenchPrompt],
    settings: BenchSettings,
    size: int,
    observer: Observer,
    needed: set[str],
) -> tuple[BatchRuns, list[str], bool]:
    """All runs of one batch size, notes for the reader, and whether they are all that was wanted.

    An arm that raises is left out with a note, and the others go on. needed: arms without which there is nothing to
    compare; their errors end the benchmark. An interrupt ends it with the groups that every arm has run, maybe none.
    """
    groups = make_groups(prompts, settings.group_size or (1 if size == 1 else 2 * size))
    ids = [[prompts[index].token_ids for index in group] for group in groups]
    params = [[settings.params(index) for index in group] for group in groups]
    for arm in arms.values():
        arm.run(ids[0], [_warmup(own) for own in params[0]])
    runs: dict[str, list[list[GroupRun]]] = {name: [[] for _ in range(settings.repeats)] for name in arms}
    names, failed, whole = list(arms), dict[str, str](), True
    try:
        for repeat in range(settings.repeats):
            for number, group in enumerate(groups):
                first = (number + repeat) % len(names)
                for name in names[first:] + names[:first]:
                    observer.begin(name, size, [prompts[index] for index in group])
                    try:
                        run = arms[name].run(ids[number], params[number], partial(observer.step, name))
                    except Exception as error:
                        if name in needed:
                            raise
                        failed[name] = f"{name} failed on group {number} and is left out: {error!r}"
                        del runs[name]
                        continue
                    runs[name][repeat].append(run)
                    observer.end(name, run)
                names = [name for name in names if name not in failed]
    except KeyboardInterrupt:
        whole = False
        groups = _complete(runs, groups)
        done, repeats = sum(map(len, groups)), len(next(iter(runs.values())))
        failed[""] = (
            f"interrupted: of batch size {size} are reported {done} of {len(prompts)} requests and {repeats} of "
            f"{settings.repeats} repeats, what every arm had run"
        )
    kinds = [prompts[group[0]].kind for group in groups]
    return BatchRuns(size, groups, kinds, runs), list(failed.values()), whole


def _complete(runs: dict[str, list[list[GroupRun]]], groups: list[list[int]]) -> list[list[int]]:
    """Cuts runs, in place, to the repeats and groups that every arm has run; returns these groups."""
    repeats = min(sum(len(repeat) == len(groups) for repeat in own) for own in runs.values())
    count = len(groups) if repeats else min(len(own[0]) for own in runs.values())
    for own in runs.values():
        own[:] = [repeat[:count] for repeat in own[: max(repeats, 1)]]
    return groups[:count]


def _warmup(params: SamplingParams) -> SamplingParams:
    return replace(params, max_new_tokens=min(WARMUP_TOKENS, params.max_new_tokens), ignore_eos=True)


def _header(target: LoadedTarget, prompts: list[BenchPrompt], settings: BenchSettings, workload: str) -> dict[str, Any]:
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    notes = []
    if settings.drafter is None and (names := [spec.name for spec in settings.specs if spec.needs_model]):
        notes.append(f"without a model drafter {', '.join(names)} can only draft by n-gram")
    if any(spec.is_peer for spec in settings.specs) and settings.batch_sizes != (1,):
        notes.append("transformers' generate is measured at batch size 1 only")
    if not settings.params(0).greedy and settings.verify != "coupled":
        notes.append("rejection sampling preserves the distribution, not the text: outputs are not compared")
    plain = {field.name: getattr(settings, field.name) for field in fields(settings)}
    plain["cost"] = settings.cost if isinstance(settings.cost, str) else repr(settings.cost)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(target.device),
        "model": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "workload": {
            "name": workload,
            "requests": len(prompts),
            "kinds": {kind: sum(prompt.kind == kind for prompt in prompts) for kind in kinds},
            "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        },
        "settings": plain,
        "notes": notes,
    }
