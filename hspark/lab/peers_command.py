"""`hspark bench peers`: the comparison with other engines from the command line."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from hspark.lab.bench import encode_samples, row_capacity
from hspark.lab.bench_command import (
    add_report_options,
    add_workload_options,
    bench_drafting,
    exit_status,
    load_samples,
    show,
)
from hspark.lab.gguf_copy import FLOAT_TYPES, float_copy
from hspark.lab.llama import missing_llama
from hspark.lab.observer import ProgressBar
from hspark.lab.peers import ASSISTED, LLAMA, Peers, check_assistant, peer_settings, run_peers, start_jobs
from hspark.lab.peers_text import render_peers
from hspark.lab.startup import StartJob, StartUp, measure_start
from hspark.models import LoadedTarget, load_target, resolve_dtype
from hspark.models.fetch import is_gguf
from hspark.options import Parser, add_drafting_options, add_target_options, check_output_file, set_threads

_EXAMPLE = """
examples:
  hspark bench peers --limit 8 --max-new-tokens 128
  hspark bench peers edits.jsonl --limit 12 --dtype bfloat16 --output peers.json

Arms: transformers' generate, plain, with prompt lookup and, with --assistant, assisted; llama.cpp, plain and with its
prompt lookup (pip install 'hspark[peers]'); hspark's vanilla, ngram_only and, with a model drafter, model_only and
proposed. All greedy, one request at a time, on the same token ids and the same weights: for a model that comes from a
.gguf file, llama.cpp reads a copy of it with the weights unpacked to --dtype (on some processors its kernels are faster
for float16: --llama-dtype); for others give such a file with --gguf.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hspark bench peers",
        description="Measure hspark beside transformers and llama.cpp: same prompts, same weights, one run.",
        epilog=_EXAMPLE,
    )
    add_workload_options(parser)
    add = parser.add_argument
    add("--assistant", metavar="NAME", help="assistant model for transformers: hub id, directory or .gguf file")
    add("--gguf", metavar="PATH", help="the target's weights in --dtype for llama.cpp (default: made from its .gguf)")
    add("--llama-dtype", metavar="TYPE", help="type of llama.cpp's weights, made from its .gguf (default: --dtype)")
    add("--no-startup", action="store_true", help="leave out start-up time and peak memory")
    add_report_options(parser)
    add_target_options(parser)
    add_drafting_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Entry of `hspark bench peers`. Returns the exit status; raises ValueError."""
    options = _parser().parse_args(argv)
    set_threads(options.threads)
    check_output_file("output", options.output)
    if options.gguf and not Path(options.gguf).is_file():
        raise ValueError(f"gguf={options.gguf!r} is no file; use a .gguf file of the target's weights")
    if options.llama_dtype is not None and options.llama_dtype not in FLOAT_TYPES:
        raise ValueError(f"llama_dtype={options.llama_dtype!r} is unknown; use one of {', '.join(FLOAT_TYPES)}")
    settings = peer_settings(
        repeats=options.repeats,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        **bench_drafting(options),
    )
    samples, name = load_samples(options)
    drafter = settings.open_drafter(options.dtype, options.device)
    target = load_target(options.model, options.dtype, options.device)
    prompts = encode_samples(samples, target)
    capacity = row_capacity(target, prompts, settings.max_new_tokens)
    peers = find_peers(options, target)
    starts: dict[str, StartUp] = {}
    if not options.no_startup:
        longest = max((prompt.token_ids for prompt in prompts), key=len)
        dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
        jobs = start_jobs(options.model, dtype, device, torch.get_num_threads(), longest, capacity, settings, peers)
        del target, peers  # each process needs the memory for weights of its own
        gc.collect()
        starts = _starts(jobs)
        target = load_target(options.model, options.dtype, options.device)
        peers = find_peers(options, target)
    extra = (peers.assistant is not None) + 2 * (peers.llama_file is not None)
    bar = ProgressBar(settings, len(prompts), extra)
    with bar.bar:
        report = run_peers(
            target, prompts, settings, peers, workload=name, drafter=drafter, starts=starts, observer=bar
        )
    show(report.to_dict(), render_peers(report), options)
    return exit_status(report.bench.header)


def find_peers(options: argparse.Namespace, target: LoadedTarget) -> Peers:
    """Loads the assistant and makes llama.cpp's file, where they are to be had."""
    missing: dict[str, str] = {}
    dtype = None if options.llama_dtype is None else resolve_dtype(options.llama_dtype, target.device)
    assistant = llama_file = None
    if options.assistant is None:
        missing[ASSISTED] = "no --assistant was given"
    else:
        loaded = load_target(options.assistant, target.dtype, target.device)
        check_assistant(loaded, target)
        assistant = loaded.model
    if (why := missing_llama()) is not None:
        missing[LLAMA] = why
    elif options.gguf:
        llama_file = Path(options.gguf)
    elif target.path is None or not is_gguf(target.path):
        missing[LLAMA] = f"{target.name} was not loaded from a .gguf file; give one of the same weights with --gguf"
    else:
        try:
            llama_file = float_copy(target.path, target.dtype if dtype is None else dtype)
        except (ValueError, OSError, NotImplementedError) as error:  # the last is gguf's, for types it cannot unpack
            missing[LLAMA] = f"no float copy of {target.path.name} could be made: {error}"
    return Peers(assistant, options.assistant, llama_file, missing)


def _starts(jobs: dict[str, StartJob]) -> dict[str, StartUp]:
    """Every arm once, in a process of its own, one after the other."""
    starts = {}
    with tqdm(jobs.items(), unit="start", disable=None, leave=False) as bar:
        for name, job in bar:
            bar.set_description(f"start-up, {name}")
            starts[name] = measure_start(job)
    return starts
