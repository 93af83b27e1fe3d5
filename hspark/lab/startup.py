"""What an arm needs from nothing: seconds from the start of a process to its first token, and peak memory.

One process holds many arms' weights and imports, so neither can be told apart there. Here every arm runs alone in a
fresh process: `python -m hspark.lab.startup` takes a job as JSON on standard input and prints what it measured.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_CRASHED = "its process ended with status"


@dataclass(frozen=True)
class StartJob:
    """What one process does. kind: "hspark", "transformers" or "llama.cpp".

    model, dtype, device, threads: as on the command line, with what "auto" stands for. prompt: token ids. new_tokens:
    output tokens. capacity: tokens that a row holds. settings: further arguments of HybridSpeculator.from_pretrained
    ("hspark"). lookup: draft tokens of prompt lookup, or None. assistant: of assisted generation. gguf: the file that
    llama.cpp reads.
    """

    kind: str
    model: str
    dtype: str
    device: str
    prompt: list[int]
    new_tokens: int
    capacity: int
    threads: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    lookup: int | None = None
    assistant: str | None = None
    gguf: str | None = None


@dataclass(frozen=True)
class StartUp:
    """seconds: from the start of the process to the first token. loading_seconds: the part after Python's imports.

    peak_bytes: most memory of the process, until `new_tokens` were decoded; device_peak_bytes: most memory allocated on
    an accelerator (None: there is none, or another library allocates it). error: why there are no figures.
    """

    seconds: float | None = None
    loading_seconds: float | None = None
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    error: str | None = None


def measure_start(job: StartJob) -> StartUp:
    """Runs the job in a process of its own."""
    record = json.dumps({**asdict(job), "begun": time.time()})
    command = [sys.executable, "-m", "hspark.lab.startup"]
    done = subprocess.run(command, input=record, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return StartUp(error=f"{_CRASHED} {done.returncode}: {lines[-1] if lines else 'no message'}")
    return StartUp(**json.loads(done.stdout.splitlines()[-1]))


def run_job(job: StartJob, begun: float) -> StartUp:
    """Does the job in this process. begun: `time.time()` when the process was started."""
    runners = {"hspark": _run_speculator, "transformers": _run_transformers, "llama.cpp": _run_llama}
    if job.kind not in runners:
        raise ValueError(f"kind={job.kind!r} is unknown; use one of {', '.join(map(repr, runners))}")
    on_device = False
    if job.kind == "llama.cpp":  # without torch, whose imports and memory are none of its own
        importlib.import_module("llama_cpp")
    else:
        importlib.import_module("hspark.speculator" if job.kind == "hspark" else "hspark.lab.arms")
        on_device = _prepare_torch(job)
    imported = time.time()
    first = runners[job.kind](job)
    return StartUp(
        seconds=first - begun,
        loading_seconds=first - imported,
        peak_bytes=peak_memory(),
        device_peak_bytes=_device_peak() if on_device else None,
    )


def _prepare_torch(job: StartJob) -> bool:
    """Sets the threads; returns whether the job's device has memory of its own."""
    from hspark.models import resolve_device
    from hspark.options import set_threads

    set_threads(job.threads)
    return resolve_device(job.device).type == "cuda"


def _device_peak() -> int:
    import torch

    return torch.cuda.max_memory_allocated()


def peak_memory() -> int | None:
    """Bytes of memory that this process held at most so far, mapped files included; None where the system hides it."""
    if sys.platform == "linux":  # the usage record of `resource` would include the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def _run_speculator(job: StartJob) -> float:
    """Each of these decodes the job's prompt and returns `time.time()` at the first token."""
    from hspark import HybridSpeculator, SamplingParams

    speculator = HybridSpeculator.from_pretrained(
        job.model,
        dtype=job.dtype,
        device=job.device,
        max_batch_size=1,
        max_length=job.capacity,
        progress=False,
        **job.settings,
    )
    first = None
    for chunk in speculator.stream(job.prompt, SamplingParams(max_new_tokens=job.new_tokens, ignore_eos=True)):
        if first is None and chunk.token_ids:
            first = time.time()
    if first is None:
        raise RuntimeError("no token was decoded")
    return first


def _run_transformers(job: StartJob) -> float:
    from hspark.lab.arms import ArmSpec, PeerArm
    from hspark.models import load_target

    target = load_target(job.model, job.dtype, job.device, progress=False)
    assistant = None
    if job.assistant is not None:
        assistant = load_target(job.assistant, job.dtype, job.device, progress=False).model
    arm = PeerArm(ArmSpec(job.kind, None, lookup_tokens=job.lookup), target.model, (), assistant)
    return _first_token(arm, job)


def _run_llama(job: StartJob) -> float:
    from hspark.lab.llama import open_llama

    threads = job.threads or os.cpu_count() or 1
    llama, _ = open_llama(
        Path(job.gguf or ""),
        job.capacity,
        job.dtype,
        threads,
        on_cpu=job.device == "cpu",
        lookup=job.lookup is not None,
    )
    tokens = llama.generate(list(job.prompt), temp=0.0, repeat_penalty=1.0)
    next(tokens)
    first = time.time()
    for _ in range(job.new_tokens - 1):
        next(tokens)
    return first


def _first_token(arm: Any, job: StartJob) -> float:
    from hspark.config import SamplingParams

    begun = time.time()
    run = arm.run([job.prompt], [SamplingParams(max_new_tokens=job.new_tokens, ignore_eos=True)])
    return begun + run.prefill_seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Reads a job from standard input, prints the StartUp as the last line."""
    record = json.loads(sys.stdin.read())
    begun = record.pop("begun")
    print(json.dumps(asdict(run_job(StartJob(**record), begun))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
