"""`hspark bench`: the benchmark from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hspark.cli import INTERRUPTED
from hspark.drafters.known import known_drafter
from hspark.lab.arms import parse_arm
from hspark.lab.bench import encode_samples, run_bench
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.bench_text import render
from hspark.lab.builtin_workload import builtin_workload
from hspark.lab.observer import ProgressBar
from hspark.lab.workloads import Sample, load_workload
from hspark.models import load_target
from hspark.options import (
    Parser,
    add_drafting_options,
    add_target_options,
    check_output_file,
    drafting_settings,
    set_threads,
)

_BUILTIN_SIZE = 24
_EXAMPLE = """
examples:
  hspark bench --limit 8 --max-new-tokens 128
  hspark bench edits.jsonl --arms ngram_only,ngram_only:all,transformers,transformers-lookup --batch-sizes 1,4 --json

Arms are policies (vanilla, ngram_only, model_only, proposed, ...), policies with a budget (ngram_only:all, proposed:8),
and transformers' own generate, plain (transformers) or with 10 tokens of prompt lookup (transformers-lookup).
Each line of a workload file is a JSON object with instruction and input (an edit), turns (a conversation; its first
turn is asked) or prompt. Without a file: edits of functions of Python's standard library, and questions.
Ctrl-C ends a benchmark early: what every arm has run by then is reported, with exit status 130.

`hspark bench peers` sets hspark beside transformers and llama.cpp, `hspark bench scale` shows how the parts of a step
grow, and `hspark bench overhead` what share of a step they take; each has --help. (A file of such a name: ./peers.)
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hspark bench",
        description="Measure arms against each other on the same prompts, and compare their outputs token by token.",
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add_workload_options(parser)
    add("--arms", metavar="A,B,...", help="default: vanilla,ngram_only and, with a model drafter, model_only,proposed")
    add("--baseline", default="vanilla", metavar="ARM", help="the arm that speed-ups are over (default: vanilla)")
    add("--batch-sizes", default="1", metavar="N,...", help="requests decoded at once (default: 1)")
    add("--group-size", type=int, metavar="N", help="prompts that each arm runs at a time (default: 1, or 2 batches)")
    add("--temperature", type=float, default=0.0, metavar="T", help="of every request; 0 is greedy (default: 0)")
    add_report_options(parser)
    add_target_options(parser)
    add_drafting_options(parser)
    return parser


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """What is decoded, and how often."""
    add = parser.add_argument
    add("workload", nargs="?", metavar="FILE", help="JSON-lines workload, plain or .gz (default: the built-in one)")
    add("--repeats", type=int, default=1, metavar="N", help="runs of everything (default: 1)")
    add("--limit", type=int, metavar="N", help=f"requests (default: all of a file, {_BUILTIN_SIZE} built-in ones)")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="of every request (default: 256)")
    add("--seed", type=int, default=0, metavar="N", help="of the noise, and of the built-in workload (default: 0)")
    add("--ignore-eos", action="store_true", help="do not end at end-of-sequence tokens")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as JSON instead of tables")
    add("--output", metavar="PATH", help="also write the report as JSON to this file")


def show(record: dict[str, Any], text: str, options: argparse.Namespace) -> None:
    """Prints and writes a report as `add_report_options` asks for it; what fails of the two costs not the other."""
    line = json.dumps(record)
    try:
        print(line if options.json else text, flush=True)
    finally:
        if options.output:
            Path(options.output).write_text(line + "\n", encoding="utf-8")


def exit_status(header: Mapping[str, Any]) -> int:
    """Of a command whose report has this header: 0, or that of an interrupt where one cut the benchmark short."""
    return INTERRUPTED if any(note.startswith("interrupted: ") for note in header["notes"]) else 0


def _peers(argv: Sequence[str]) -> int:
    from hspark.lab.peers_command import main

    return main(argv)


def _scale(argv: Sequence[str]) -> int:
    from hspark.lab.scale_command import main

    return main(argv)


def _overhead(argv: Sequence[str]) -> int:
    from hspark.lab.overhead_command import main

    return main(argv)


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"peers": _peers, "scale": _scale, "overhead": _overhead}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `hspark bench`; argv without the program's name. Returns the exit status; raises ValueError."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in SUBCOMMANDS:
        return SUBCOMMANDS[argv[0]](argv[1:])
    options = _parser().parse_args(argv)
    set_threads(options.threads)
    check_output_file("output", options.output)
    settings = _settings(options)
    check_baseline(options.baseline, settings)
    samples, name = load_samples(options)
    drafter = settings.open_drafter(options.dtype, options.device)
    target = load_target(options.model, options.dtype, options.device)
    prompts = encode_samples(samples, target)
    bar = ProgressBar(settings, len(prompts))
    with bar.bar:
        report = run_bench(
            target, prompts, settings, workload=name, drafter=drafter, observer=bar, baseline=options.baseline
        )
    show(report.to_dict(), render(report), options)
    return exit_status(report.header)


def _settings(options: argparse.Namespace) -> BenchSettings:
    drafting = bench_drafting(options)
    arms = default_arms(drafting["drafter"]) if options.arms is None else _split(options.arms)
    return BenchSettings(
        arms=arms,
        batch_sizes=tuple(_integer("batch_sizes", part) for part in _split(options.batch_sizes)),
        repeats=options.repeats,
        group_size=options.group_size,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        **drafting,
    )


def check_baseline(baseline: str, settings: BenchSettings) -> None:
    if baseline not in settings.arms:
        raise ValueError(f"baseline={baseline!r} is not among the arms; use one of {', '.join(settings.arms)}")
    if parse_arm(baseline).is_peer and settings.batch_sizes != (1,):
        raise ValueError(f"baseline={baseline!r} runs at batch size 1 only; use batch_sizes 1, or another baseline")


def bench_drafting(options: argparse.Namespace) -> dict[str, Any]:
    """The drafting options as BenchSettings takes them, with the drafter that "auto" stands for."""
    drafting = drafting_settings(options)
    if drafting["drafter"] == "auto":
        drafting["drafter"] = known_drafter(options.model)
    return drafting


def default_arms(drafter: str | None) -> tuple[str, ...]:
    """All that can be compared: the model drafter's arms only where there is one."""
    return ("vanilla", "ngram_only") if drafter is None else ("vanilla", "ngram_only", "model_only", "proposed")


def load_samples(options: argparse.Namespace) -> tuple[list[Sample], str]:
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"limit={options.limit} is out of range; use an integer of at least 1")
    if options.workload is None:
        return builtin_workload(_BUILTIN_SIZE if options.limit is None else options.limit, options.seed), "built-in"
    return load_workload(options.workload, options.limit), Path(options.workload).name


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} holds {text!r}; use integers of at least 1, separated by commas") from None
