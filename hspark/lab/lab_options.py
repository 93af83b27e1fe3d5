"""Options of `hspark lab`, and what they are called in Python."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hspark.lab.lab_record import MAX_NEW_TOKENS, RecordSettings, holds_outputs
from hspark.lab.studies import Lab, StudyOptions
from hspark.lab.table import RecordTable
from hspark.lab.workloads import load_workload
from hspark.options import add_target_options, parse_drafter
from hspark.policy import AcceptanceEstimator, load_cost
from hspark.policy.curves import whole

Made = TypeVar("Made")

# (option, attribute, value that is not worth repeating): the options of a study that its command line repeats.
_STUDY_WORDS: tuple[tuple[str, str, Any], ...] = (
    ("--workload", "workload", None),
    ("--train-table", "train_table", None),
    ("--sampled-table", "sampled_table", None),
    ("--estimator", "estimator", None),
    ("--cost", "cost", None),
    ("--overhead", "overhead", None),
    ("--bench", "bench", None),
    ("--tokenizer", "tokenizer", None),
    ("--batch-sizes", "batch_sizes", "4,32,128"),
    ("--sizing-delay", "sizing_delay", 2),
    ("--row-steps", "row_steps", 30_000),
    ("--orders", "orders", 5),
    ("--resamples", "resamples", 200),
)


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """The target, its drafter, and how outputs are generated."""
    add_target_options(parser)
    parser.add_argument("--target", dest="model", metavar="NAME", default=argparse.SUPPRESS, help="the same as --model")
    add = parser.add_argument_group("recording").add_argument
    add(
        "--drafter",
        metavar="NAME",
        default="auto",
        help="DSpark drafter: auto, none, a directory or hub id (default: auto)",
    )
    add("--drafting", default="greedy", help="greedy or probabilistic model drafts (default: greedy)")
    add("--max-new-tokens", type=int, metavar="N", help=f"of every request (default: {MAX_NEW_TOKENS})")
    add("--temperature", type=float, default=0.0, metavar="T", help="of every request; 0 is greedy (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="of the first request's noise (default: 0)")
    add("--limit", type=int, metavar="N", help="requests (default: all)")
    add("--batch-size", type=int, default=4, metavar="N", help="requests answered at once (default: 4)")
    add("--min-match", type=int, default=5, metavar="N", help="shortest n-gram match (default: 5, the paper's)")
    add(
        "--engine-cost", default="auto", metavar="PATH", help="step cost of the engine that answers (default: measured)"
    )


def record_settings(options: argparse.Namespace) -> RecordSettings:
    if options.engine_cost != "auto":
        _naming("engine_cost", lambda: load_cost(options.engine_cost))
    return RecordSettings(
        target=options.model,
        drafter=parse_drafter(options.drafter),
        drafting=options.drafting,
        dtype=options.dtype,
        device=options.device,
        temperature=options.temperature,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        limit=options.limit,
        batch_size=options.batch_size,
        cost=options.engine_cost,
        min_match=options.min_match,
    )


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """What studies are made with, beside the table."""
    add = parser.add_argument_group("studies").add_argument
    add(
        "--train-table", metavar="DIR", help="table of other prompts to fit the estimator on (default: folds by prompt)"
    )
    add("--sampled-table", metavar="DIR", help="table of the same target at temperature 1 (policies)")
    add("--estimator", metavar="NAME", help="a file that `hspark fit` saved, or a preset (default: fitted here)")
    add("--cost", metavar="PATH", help="cost file of the simulated hardware (default: the paper's prices of a slot)")
    add("--overhead", metavar="PATH", help="report of `hspark bench overhead --output` (never_choose)")
    add("--bench", metavar="PATH", help="report of `hspark bench --output` on the same requests (against_engine)")
    add("--tokenizer", metavar="NAME", help="whose tokenizer turns outputs into text (default: the table's target)")
    add("--batch-sizes", default="4,32,128", metavar="N,...", help="simulated batches, rising (default: 4,32,128)")
    add("--sizing-delay", type=int, default=2, metavar="STEPS", help="age of what budgets are sized from (default: 2)")
    add("--row-steps", type=int, default=30_000, metavar="N", help="length of a simulation (default: 30000)")
    add("--orders", type=int, default=5, metavar="N", help="orders of the requests, for ablations (default: 5)")
    add("--resamples", type=int, default=200, metavar="N", help="bootstrap draws over prompts (default: 200)")


def study_words(options: argparse.Namespace) -> list[str]:
    """The study options that differ from their defaults, as command-line words."""
    words = []
    for option, name, usual in _STUDY_WORDS:
        value = getattr(options, name)
        if value != usual:
            words += [option, str(value)]
    return words


def study_options(options: argparse.Namespace) -> StudyOptions:
    """Everything that the options name but the table. ValueError that names the option that is wrong."""
    for name, low in (("sizing_delay", 0), ("row_steps", 1), ("orders", 1), ("resamples", 0)):
        whole(name, getattr(options, name), low)
    return StudyOptions(
        train=_table("train_table", options.train_table),
        sampled=_table("sampled_table", options.sampled_table),
        estimator=None if options.estimator is None else AcceptanceEstimator.resolve(options.estimator, "")[0],
        cost=None if options.cost is None else load_cost(options.cost),
        programs=_programs(options.workload),
        overhead=_report("overhead", options.overhead, "hspark bench overhead --output"),
        bench=_report("bench", options.bench, "hspark bench --output"),
        batch_sizes=_sizes(options.batch_sizes),
        budget_delay=options.sizing_delay,
        row_steps=options.row_steps,
        seeds=options.orders,
        resamples=options.resamples,
    )


def make_lab(table: RecordTable, given: StudyOptions, tokenizer: str | None) -> Lab:
    """The table with what it is studied with. tokenizer: whose it is that makes text; None for the target's own."""
    if given.programs:
        given = replace(given, decode=_late_decoder(tokenizer or str(table.info.get("target", ""))))
    return Lab(table, given)


def check_file(name: str, path: str) -> None:
    if not Path(path).is_file():
        raise ValueError(f"{name}={path!r} does not exist; give a JSON-lines file, plain or .gz")


def _table(name: str, path: str | None) -> RecordTable | None:
    return None if path is None else _naming(name, lambda: RecordTable.load(path))


def _naming(name: str, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _programs(path: str | None) -> dict[str, str] | None:
    """{task_id: program} of a workload's edits; None where there is no workload, or recorded outputs in its place."""
    if path is None:
        return None
    check_file("workload", path)
    if holds_outputs(path):
        return None
    samples = load_workload(path)
    return {sample.task_id: sample.reference_input for sample in samples if sample.reference_input is not None} or None


def _late_decoder(name: str) -> Callable[[Sequence[int]], str]:
    """Text of token ids by the tokenizer of `name`, which is loaded when it is first needed."""
    found: list[Any] = []

    def decode(ids: Sequence[int]) -> str:
        if not found:
            from hspark.models.fetch import KNOWN_MODELS, fetch
            from hspark.models.pretrained import load_tokenizer

            path = Path(name).expanduser()
            source: Path | str = path if name and path.exists() else name
            if name in KNOWN_MODELS:
                source = fetch(KNOWN_MODELS[name])
            tokenizer, problem = load_tokenizer(source) if name else (None, "the table names no target")
            if tokenizer is None:
                raise ValueError(
                    f"tokenizer={name!r}: {problem}; use the name, directory or hub id of the table's target"
                )
            found.append(tokenizer)
        return str(found[0].decode(list(ids), skip_special_tokens=True))

    return decode


def _report(name: str, path: str | None, command: str) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}={path!r} cannot be read ({error}); use a file that `{command}` wrote") from error
    if not isinstance(record, dict):
        raise ValueError(f"{name}={path!r} is no report; use a file that `{command}` wrote")
    return record


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"batch_sizes={text!r}; use integers of at least 1, separated by commas, rising") from None
