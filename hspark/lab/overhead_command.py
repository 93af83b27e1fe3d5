"""`hspark bench overhead`: what the hybrid's own work costs, from the command line."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hspark.drafters.base import Drafter
from hspark.lab.bench import encode_samples, run_bench
from hspark.lab.bench_command import (
    add_report_options,
    add_workload_options,
    bench_drafting,
    exit_status,
    load_samples,
    show,
)
from hspark.lab.bench_report import BenchReport, Ratio
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.bench_text import SPEED, ratio, render_header, table, verdicts
from hspark.lab.observer import ProgressBar
from hspark.lab.overhead import BASELINE, NEVER, StepShares, measure_shares, never_choose_arm
from hspark.lab.runs import BenchPrompt
from hspark.models import LoadedTarget, load_target, resolve_device
from hspark.options import Parser, add_drafting_options, add_target_options, check_output_file, set_threads
from hspark.policy import policy_names
from hspark.speculator import HybridSpeculator

# Tokens of output that a row has room for: a round of steps in which every draft is accepted.
_ROOM = 512
_EXAMPLE = """
examples:
  hspark bench overhead
  hspark bench overhead edits.jsonl --limit 16 --max-new-tokens 128 --batch-size 4 --context 1024 --output overhead.json
  hspark bench overhead edits.jsonl --policy vanilla --drafter none --batch-size 1 --context 512

Two measurements. Shares: the parts of a decode step of --policy, all rows running, each row beginning with the
workload's text cut to --context tokens, and the step against the target's linear layers alone. Never chosen: model_only
against a policy that runs both drafters and the whole choice and always keeps the model's chain, interleaved over the
workload.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hspark bench overhead",
        description="Measure each part's share of a decode step, and what a drafter costs that is never chosen.",
        epilog=_EXAMPLE,
    )
    add_workload_options(parser)
    add = parser.add_argument
    add("--batch-size", type=int, default=4, metavar="N", help="rows, all running (default: 4)")
    add(
        "--context",
        type=int,
        default=1024,
        metavar="N",
        help="tokens of each row's prompt, for the shares (default: 1024)",
    )
    add("--steps", type=int, default=64, metavar="N", help="steps at least, for the shares (default: 64)")
    add(
        "--policy",
        choices=policy_names(),
        help="for the shares (default: proposed, or ngram_only without a model drafter)",
    )
    add_report_options(parser)
    add_target_options(parser)
    add_drafting_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Entry of `hspark bench overhead`. Returns the exit status; raises ValueError."""
    options = _parser().parse_args(argv)
    set_threads(options.threads)
    check_output_file("output", options.output)
    for name in ("batch_size", "context", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} is out of range; use an integer of at least 1")
    settings = _settings(options)
    if options.policy == "model_only" and settings.drafter is None:
        raise ValueError("policy='model_only' needs a model drafter; give --drafter, or another policy")
    samples, name = load_samples(options)
    drafter = settings.open_drafter(options.dtype, options.device)
    target = load_target(options.model, options.dtype, options.device)
    prompts = encode_samples(samples, target)
    capacity = check_context(options.context, target)
    report = None
    if settings.drafter is not None:
        bar = ProgressBar(settings, len(prompts), extra_arms=1)
        with bar.bar:
            report = run_bench(
                target,
                prompts,
                settings,
                workload=name,
                drafter=drafter,
                observer=bar,
                extra_arms={NEVER: never_choose_arm},
                baseline=BASELINE,
            )
    shares = run_shares(target, prompts, settings, options, capacity, drafter)
    record = {"shares": asdict(shares), "bench": None if report is None else report.to_dict()}
    never = None if report is None else report.batches[0].arm(NEVER).decode_speedup
    record["never_choose"] = None if never is None else asdict(never)
    show(record, render_overhead(shares, report, never), options)
    return 0 if report is None else exit_status(report.header)


def _settings(options: argparse.Namespace) -> BenchSettings:
    whole = options.compile == "step" or (options.compile == "on" and resolve_device(options.device).type != "cpu")
    if whole:
        raise ValueError(f"compile={options.compile!r}: the parts of a compiled step cannot be told apart; use 'off'")
    drafting = bench_drafting(options)
    return BenchSettings(
        arms=("vanilla", "ngram_only") if drafting["drafter"] is None else ("vanilla", BASELINE),
        batch_sizes=(options.batch_size,),
        repeats=options.repeats,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        **drafting,
    )


def check_context(context: int, target: LoadedTarget) -> int:
    """Tokens that a row must hold for the shares. ValueError for a context that leaves too little room."""
    config: Any = target.model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and context + _ROOM > limit:
        raise ValueError(
            f"context={context} is too long for the model's {limit} positions, of which {_ROOM} are kept for the "
            f"output; use at most {limit - _ROOM}"
        )
    return context + _ROOM


def run_shares(
    target: LoadedTarget,
    prompts: list[BenchPrompt],
    settings: BenchSettings,
    options: argparse.Namespace,
    capacity: int,
    drafter: Drafter | None,
) -> StepShares:
    """The shares, with every prompt filled up to the context from the other prompts."""
    texts = fill([prompt.token_ids for prompt in prompts], options.context)
    speculator = HybridSpeculator(
        target.model,
        target.tokenizer,
        name=target.name,
        eos_token_ids=target.eos_token_ids,
        drafter=copy.copy(drafter),
        estimator=settings.estimator,
        cost=settings.cost,
        policy=options.policy or ("ngram_only" if drafter is None else "proposed"),
        max_batch_size=options.batch_size,
        max_length=capacity,
        **settings.speculator_settings(),
    )
    return measure_shares(speculator.engine, texts, options.steps)


def fill(prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Each prompt preceded by as much of the others, in their order, as makes `length` tokens; cut at its beginning."""
    filled = []
    for index in range(len(prompts)):
        text: list[int] = []
        turn = index
        while len(text) < length:
            text = list(prompts[turn % len(prompts)]) + text
            turn -= 1
        filled.append(text[len(text) - length :])
    return filled


def render_overhead(shares: StepShares, report: BenchReport | None, never: Ratio | None) -> str:
    columns = [
        ("part of a step", lambda each: each.part),
        ("ms", lambda each: f"{each.seconds * 1e3:.3f}"),
        ("share", lambda each: f"{each.share * 100:.2f} %"),
    ]
    parts = [
        f"one decode step: {shares.batch_size} rows, {shares.context:.0f} tokens of context each, {shares.tokens:.1f} "
        f"tokens emitted and {shares.slots:.1f} drafts verified; {shares.seconds * 1e3:.2f} ms; medians of "
        f"{shares.steps} steps",
        table(columns, shares.parts),
        f"all but the forwards of target and model drafter: {shares.hybrid_share * 100:.2f} % of a step",
        f"the target's linear layers alone, on as many tokens: {shares.linear_seconds * 1e3:.2f} ms, of which the step "
        f"takes {shares.seconds / shares.linear_seconds:.2f} times as much",
    ]
    if report is None or never is None:
        return "\n\n".join([*parts, "never chosen: not measured, as there is no model drafter to choose instead"])
    batch = report.batches[0]
    parts += [
        render_header(report.header),
        table(SPEED, batch.arms),
        f"an n-gram drafter that runs and is never chosen: {ratio(never)} of {BASELINE}'s decoding speed "
        f"({(1 - never.value) * 100:.1f} % overhead)",
        "\n".join(verdicts(batch)),
    ]
    return "\n\n".join(parts)
