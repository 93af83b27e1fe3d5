"""hspark beside what a user would take instead: the benchmark with a fixed set of arms, and more columns.

All arms decode the same token ids greedily at batch size 1, on the same weights in the same type, interleaved by
prompt. Start-up and peak memory come from a fresh process per arm (see `startup.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hspark.drafters.base import Drafter
from hspark.lab.arms import Arm, ArmSpec, PeerArm, parse_arm
from hspark.lab.bench import ArmBuilder, ExtraArm, run_bench
from hspark.lab.bench_report import ArmSummary, BenchReport
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.llama import LOOKUP_TOKENS, LlamaArm
from hspark.lab.machine import copy_bandwidth
from hspark.lab.observer import Observer
from hspark.lab.runs import BenchPrompt
from hspark.lab.startup import StartJob, StartUp
from hspark.models import LoadedTarget

BASELINE = "transformers"
ASSISTED, LLAMA, LLAMA_LOOKUP = "transformers-assistant", "llama.cpp", "llama.cpp-lookup"
OWN_ARMS, MODEL_ARMS = ("vanilla", "ngram_only"), ("model_only", "proposed")


@dataclass(frozen=True)
class Peers:
    """Which peers there are beside transformers' plain generate and its prompt lookup.

    assistant: a causal LM with the target's token ids, and its name. llama_file: a .gguf file of the target's weights
    in the target's type. missing: peers that are left out, by name, and why.
    """

    assistant: Any | None = None
    assistant_name: str | None = None
    llama_file: Path | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PeerRow:
    """One arm. floor_seconds: the least time of a forward, which reads all weights, and keys and values of the mean
    context, at the measured copy bandwidth. over_floor: decoding time per forward over that; drafting counts as time,
    not as floor. start: None where it was not measured."""

    arm: ArmSummary
    mean_context: float
    floor_seconds: float
    over_floor: float | None
    start: StartUp | None


@dataclass(frozen=True)
class PeersReport:
    """bandwidth: bytes copied per second, read and written together. missing: arms left out, and why."""

    bench: BenchReport
    rows: list[PeerRow]
    bandwidth: float
    missing: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form: that of the benchmark, with the further columns by arm."""
        columns = {row.arm.name: {k: v for k, v in asdict(row).items() if k != "arm"} for row in self.rows}
        return {**self.bench.to_dict(), "bandwidth": self.bandwidth, "missing": self.missing, "peers": columns}


def peer_settings(**settings: Any) -> BenchSettings:
    """The settings of the benchmark with the arms that need nothing but the target and the model drafter, if any."""
    own = OWN_ARMS if settings.get("drafter") is None else OWN_ARMS + MODEL_ARMS
    return BenchSettings(arms=(BASELINE, "transformers-lookup", *own), batch_sizes=(1,), **settings)


def check_assistant(assistant: LoadedTarget, target: LoadedTarget) -> None:
    sizes = [int(each.model.get_output_embeddings().weight.shape[0]) for each in (assistant, target)]  # type: ignore[operator]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"assistant={assistant.name!r} has {sizes[0]} token ids and the target {target.name!r} has {sizes[1]}; "
            "use a model with the target's tokenizer"
        )


def run_peers(
    target: LoadedTarget,
    prompts: Sequence[BenchPrompt],
    settings: BenchSettings,
    peers: Peers,
    *,
    workload: str = "",
    drafter: Drafter | None = None,
    starts: Mapping[str, StartUp] | None = None,
    bandwidth: float | None = None,
    observer: Observer | None = None,
) -> PeersReport:
    """Runs all arms over all prompts. settings: from `peer_settings`. starts: from `measure_start`, by arm.

    bandwidth: bytes per second; None measures it. The other arguments as for `run_bench`.
    """
    bandwidth = copy_bandwidth(target.device) if bandwidth is None else bandwidth
    missing = dict(peers.missing)
    extra: dict[str, ExtraArm] = {}
    if peers.assistant is not None:
        extra[ASSISTED] = partial(_assisted, assistant=peers.assistant)
    if peers.llama_file is not None:
        extra[LLAMA] = partial(_llama, path=peers.llama_file, lookup=False)
        extra[LLAMA_LOOKUP] = partial(_llama, path=peers.llama_file, lookup=True)
    bench = run_bench(
        target,
        prompts,
        settings,
        workload=workload,
        drafter=drafter,
        observer=observer,
        extra_arms=extra,
        baseline=BASELINE,
    )
    rows = [_row(arm, bench, prompts, bandwidth, (starts or {}).get(arm.name)) for arm in bench.batches[0].arms]
    return PeersReport(bench, rows, bandwidth, missing)


def _assisted(builder: ArmBuilder, batch_size: int, assistant: Any) -> Arm:
    return PeerArm(ArmSpec(ASSISTED, None), builder.plain, builder.target.eos_token_ids, assistant)


def _llama(builder: ArmBuilder, batch_size: int, path: Path, lookup: bool) -> Arm:
    target = builder.target
    return LlamaArm.open(
        path,
        builder.capacity,
        str(target.dtype).removeprefix("torch."),
        torch.get_num_threads(),
        target.eos_token_ids,
        on_cpu=target.device.type == "cpu",
        lookup=lookup,
    )


def _row(
    arm: ArmSummary, bench: BenchReport, prompts: Sequence[BenchPrompt], bandwidth: float, start: StartUp | None
) -> PeerRow:
    batch, header = bench.batches[0], bench.header
    lengths = {prompt.task_id: len(prompt.token_ids) for prompt in prompts}
    total = weighted = 0.0
    for runs in batch.runs["runs"][arm.name]:
        for group, run in zip(batch.runs["groups"], runs, strict=True):
            share = run["tokens"] / len(group)
            for task in group:
                total, weighted = total + share, weighted + share * (lengths[task] + share / 2)
    context = weighted / total if total else 0.0
    floor = (header["weight_bytes"] + header["kv_bytes_per_token"] * context) / bandwidth
    over = None if arm.forward_seconds is None else arm.forward_seconds / floor
    return PeerRow(arm, context, floor, over, start)


def start_jobs(
    model: str,
    dtype: str,
    device: str,
    threads: int | None,
    prompt: list[int],
    capacity: int,
    settings: BenchSettings,
    peers: Peers,
) -> dict[str, StartJob]:
    """A start-up job for every arm. prompt: the longest, as it decides the peak of memory; the rest as in StartJob."""
    new_tokens = min(32, settings.max_new_tokens)
    make = partial(
        StartJob,
        model=model,
        dtype=dtype,
        device=device,
        threads=threads,
        prompt=prompt,
        capacity=capacity,
        new_tokens=new_tokens,
    )
    jobs: dict[str, StartJob] = {}
    for spec in map(parse_arm, settings.arms):
        if spec.is_peer:
            jobs[spec.name] = make("transformers", lookup=spec.lookup_tokens)
            continue
        options = {
            "policy": spec.policy,
            "budget": spec.budget,
            "drafter": settings.drafter if spec.needs_model else None,
            "estimator": settings.estimator,
            "cost": settings.cost,
            **settings.speculator_settings(),
        }
        jobs[spec.name] = make("hspark", settings=options)
    if peers.assistant_name is not None:
        jobs[ASSISTED] = make("transformers", assistant=peers.assistant_name)
    if peers.llama_file is not None:
        jobs[LLAMA] = make("llama.cpp", gguf=str(peers.llama_file))
        jobs[LLAMA_LOOKUP] = make("llama.cpp", gguf=str(peers.llama_file), lookup=LOOKUP_TOKENS)
    return jobs
