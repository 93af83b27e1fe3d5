"""`hspark demo`: a real model edits real programs, first to be watched, then in numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hspark.drafters.known import known_drafter
from hspark.lab.bench import encode_samples, run_bench
from hspark.lab.bench_command import default_arms
from hspark.lab.bench_report import BenchReport
from hspark.lab.bench_settings import BenchSettings
from hspark.lab.bench_text import SPEED, Column, number, render_header, same_text, table
from hspark.lab.builtin_workload import builtin_workload
from hspark.lab.observer import Observer
from hspark.lab.runs import BenchPrompt, GroupRun
from hspark.lab.workloads import Sample
from hspark.models import load_target
from hspark.options import Parser, add_target_options, parse_drafter, set_threads
from hspark.request import Request
from hspark.terminal import Painter, dim, legend, wants_colour

_EXAMPLE = """
examples:
  hspark demo
  hspark demo --limit 2 --max-new-tokens 64 --json
"""


_WHY = {True: "a model drafter was not wanted", False: "no model drafter is known for this target"}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hspark demo",
        description="A small model edits functions of Python's standard library and answers a question: first its "
        "tokens as they come, coloured by who proposed them, then plain against speculative decoding.",
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add("--limit", type=int, default=5, metavar="N", help="requests; every fourth is a question (default: 5)")
    add("--max-new-tokens", type=int, default=160, metavar="N", help="of every request (default: 160)")
    add(
        "--drafter",
        metavar="NAME",
        default="auto",
        help="model drafter: auto, none, a directory or hub id (default: auto)",
    )
    add("--seed", type=int, default=0, metavar="N", help="which functions and edits (default: 0)")
    add("--color", choices=["auto", "always", "never"], default="auto", help="colour tokens by source (default: auto)")
    add("--json", action="store_true", help="print only the measurements, as JSON")
    add_target_options(parser)
    return parser


class Screen(Observer):
    """Shows one arm's outputs as they come, and what the other arms took for the same prompt."""

    def __init__(self, arm: str, samples: Sequence[Sample], tokenizer: Any, colour: bool) -> None:
        self.arm, self.tokenizer, self.colour = arm, tokenizer, colour
        self.samples = {sample.task_id: sample for sample in samples}
        self.done: list[str] = []
        self._task, self._place = "", 0

    def begin(self, arm: str, batch_size: int, prompts: Sequence[BenchPrompt]) -> None:
        if prompts[0].task_id != self._task:
            self._task = prompts[0].task_id
            self._place += 1
            request = self.samples[self._task].messages[-1]["content"].splitlines()[0]
            print(f"\n[{self._place}/{len(self.samples)}] {self._task}\n{request}\n", flush=True)
        self._painter = Painter(sys.stdout, self.tokenizer, self.colour)
        self._tokens = self._characters = 0

    def step(self, arm: str, requests: list[Request]) -> None:
        if arm != self.arm:
            return
        request, text = requests[0], requests[0].text or ""
        fresh = slice(self._tokens, None)
        self._painter.write(text[self._characters :], request.token_ids[fresh], request.sources[fresh])
        self._tokens, self._characters = len(request.token_ids), len(text)

    def end(self, arm: str, run: GroupRun) -> None:
        speed = f"{arm}: {run.tokens} tokens in {run.seconds:.1f} s, {run.tokens / run.seconds:.1f} tokens/s"
        print(("\n" if arm == self.arm else "") + dim(speed, self.colour), flush=True)


_DEMO: list[Column] = [
    *SPEED[:2],
    ("speed-up", lambda arm: f"{arm.speedup.value:.2f}x"),
    ("tokens/step", lambda arm: number(arm.acceptance_length)),
    ("text", same_text),
]


def render(report: BenchReport, why: str) -> str:
    """The closing table, and what stands against it."""
    batch = report.batches[0]
    kinds = list(batch.arms[0].by_kind)
    lines = [table(_DEMO, batch.arms), ""]
    for arm in batch.arms[1:]:
        lines.append(f"{arm.name}: " + ", ".join(f"{arm.by_kind[kind].value:.2f}x on {kind}" for kind in kinds))
    for difference in batch.differences:
        tie = {True: "a near-tie of the target", False: "no tie", None: "not examined"}[difference.near_tie]
        lines.append(
            f"{difference.arm} leaves vanilla's text in {difference.task_id} at token {difference.position}: {tie}"
        )
    return "\n".join([*lines, why] if why else lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `hspark demo`; argv without the program's name. Returns the exit status; raises ValueError."""
    options = _parser().parse_args(argv)
    if options.limit < 1:
        raise ValueError(f"limit={options.limit} is out of range; use an integer of at least 1")
    set_threads(options.threads)
    drafter = known_drafter(options.model) if options.drafter == "auto" else parse_drafter(options.drafter)
    arms = default_arms(drafter)
    settings = BenchSettings(arms=arms, max_new_tokens=options.max_new_tokens, drafter=drafter)
    samples = builtin_workload(options.limit, options.seed)
    opened = settings.open_drafter(options.dtype, options.device)
    target = load_target(options.model, options.dtype, options.device)
    prompts = encode_samples(samples, target)
    if options.json:
        print(json.dumps(run_bench(target, prompts, settings, workload="built-in", drafter=opened).to_dict()))
        return 0
    colour = wants_colour(sys.stdout, options.color)
    print(f"{target.name} edits functions of Python's standard library. Measuring the cost of a step ...", flush=True)
    if colour:
        print(f"Colours: {legend()}.")
    screen = Screen(arms[-1], samples, target.tokenizer, colour)
    report = run_bench(target, prompts, settings, workload="built-in", drafter=opened, observer=screen)
    why = "" if drafter else f"{_WHY[options.drafter == 'none']}, so there is no hybrid arm: n-gram drafts only"
    print("\n" + "\n\n".join([render_header(report.header), render(report, why)]))
    return 0
