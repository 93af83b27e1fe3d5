"""`hspark fit`: the acceptance estimator of one's own target, from its recorded outputs (section 4.2 of the paper)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hspark.drafters.ngram import NgramDrafter
from hspark.lab.outputs import RecordedOutput, load_tokenize, read_outputs, split_by_prompt
from hspark.lab.replay import VISITS, NgramReplay, replay_ngram
from hspark.models import resolve_device
from hspark.options import Parser, check_output_file
from hspark.policy.estimator import AcceptanceEstimator
from hspark.policy.fitting import LEVELS, GradedSteps, calibration_error, log_loss_per_step
from hspark.sampling import GREEDY_TEMPERATURE

_EXAMPLE = """
example:
  hspark fit outputs.jsonl --tokenizer smollm2-135m --save estimator.json

The saved file is the estimator= of HybridSpeculator.from_pretrained. Each line of the outputs file is a JSON object
with output_token_ids and either prompt_token_ids or prompt (one user message, which goes through the tokenizer's chat
template); task_id and temperature are optional.
"""


@dataclass(frozen=True)
class Counts:
    """What was replayed. visited: prefixes, with a match or without. accepted_per_visit counts draft tokens."""

    prompts: int
    outputs: int
    output_tokens: int
    visited: int
    matched_steps: int
    full_matches: int
    graded_positions: int
    accepted_positions: int
    accepted_per_visit: float

    @staticmethod
    def of(outputs: Sequence[RecordedOutput], replay: NgramReplay, max_match: int) -> Counts:
        return Counts(
            prompts=len({output.prompt_token_ids for output in outputs}),
            outputs=len(outputs),
            output_tokens=replay.tokens,
            visited=replay.visited,
            matched_steps=len(replay.output),
            full_matches=int((replay.match_length == max_match).sum()),
            graded_positions=int(replay.graded.sum()),
            accepted_positions=int(replay.accepted.sum()),
            accepted_per_visit=round(replay.accepted_per_visit, 4),
        )


@dataclass(frozen=True)
class Score:
    """An estimator on one set of steps: log-loss in nats per matched step, and ECE over graded positions."""

    name: str
    log_loss_per_step: float
    calibration_error: float


@dataclass(frozen=True)
class Bin:
    """Graded positions whose estimate lies in [low, high): how many, the mean estimate, and the share accepted."""

    low: float
    high: float
    positions: int
    estimated: float
    accepted: float


@dataclass(frozen=True)
class FitReport:
    """A fitted estimator and how it does on `scored_on`: "held out" prompts, or "fitted" where none were held out.

    scores: the fit, the ladder's rungs, and the shipped presets, all on those same steps.
    """

    estimator: AcceptanceEstimator
    fitted: Counts
    held_out: Counts | None
    scored_on: str
    scores: list[Score]
    reliability: list[Bin]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        record = {name: value for name, value in asdict(self).items() if name != "estimator"}
        return {"estimator": self.estimator.to_record(), **record}


def fit_outputs(
    outputs: Sequence[RecordedOutput],
    drafter: NgramDrafter | None = None,
    *,
    level: int = 6,
    visit: str = "positions",
    holdout: float = 0.2,
    seed: int = 0,
    ladder: bool = False,
    provenance: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] | None = None,
) -> FitReport:
    """Replays the n-gram drafter over `outputs`, fits equation 1 on part of the prompts, and scores it on the rest.

    drafter: its match settings are the ones fitted for; `NgramDrafter()` if None. level: rung of the ladder.
    visit: see `replay_ngram`. holdout, seed: see `split_by_prompt`. ladder: also fit and score every other rung.
    provenance: kept with the coefficients, beside the settings, counts and scores of this fit. progress: called with
    output tokens replayed. ValueError where nothing matched.
    """
    drafter = NgramDrafter() if drafter is None else drafter
    kept, held = split_by_prompt(outputs, holdout, seed)
    limits = _limits(drafter)

    def replayed(part: Sequence[RecordedOutput]) -> tuple[GradedSteps, Counts]:
        replay = replay_ngram(part, drafter, visit=visit, device=device, progress=progress)
        return replay.graded_steps(), Counts.of(part, replay, drafter.max_match)

    def fit(rung: int) -> AcceptanceEstimator:
        return AcceptanceEstimator.fit(steps, rung, positions=drafter.width, **limits)

    steps, fitted = replayed(kept)
    judged, held_out = replayed(held) if held else (steps, None)
    estimator = fit(level)
    others = {f"ladder {rung} ({terms})": fit(rung) for rung, terms in LEVELS.items() if ladder and rung != level}
    presets = {name: AcceptanceEstimator.preset(name) for name in AcceptanceEstimator.preset_names()}
    shipped = {name: preset for name, preset in presets.items() if "/" not in name and _limits(preset) == limits}
    scored = {"this fit": estimator} | others | shipped
    scores = [
        Score(name, log_loss_per_step(each, judged), calibration_error(each, judged)) for name, each in scored.items()
    ]
    facts = {"visit": visit, "periodic": drafter.periodic, "holdout": holdout, "split_seed": seed, **asdict(fitted)}
    if held_out is not None:
        facts["held_out"] = asdict(held_out) | asdict(scores[0])
        del facts["held_out"]["name"]
    estimator = AcceptanceEstimator(
        estimator.coefficients,
        min_match=drafter.min_match,
        max_match=drafter.max_match,
        copy_cap=drafter.copy_cap,
        provenance=estimator.provenance | facts | (provenance or {}),
    )
    scored_on = "fitted" if held_out is None else "held out"
    return FitReport(estimator, fitted, held_out, scored_on, scores, reliability(estimator, judged))


def _limits(of: AcceptanceEstimator | NgramDrafter) -> dict[str, int]:
    return {"min_match": of.min_match, "max_match": of.max_match, "copy_cap": of.copy_cap}


def reliability(estimator: AcceptanceEstimator, steps: GradedSteps, bins: int = 15) -> list[Bin]:
    """The reliability table behind the calibration error: equal intervals of [0, 1], empty ones left out."""
    matched = steps.match_length >= estimator.min_match
    steps = GradedSteps(*(column[matched] for column in steps))
    position = torch.arange(estimator.width)
    graded = position < steps.graded[:, None]
    exact = estimator.to("cpu", torch.float64)
    estimate = exact(steps.match_length, steps.agreement, steps.copy_length)[graded]
    accepted = (position < steps.accepted[:, None])[graded].double()
    bucket = (estimate * bins).long().clamp(max=bins - 1)
    table = []
    for index in range(bins):
        inside = bucket == index
        if count := int(inside.sum()):
            means = float(estimate[inside].mean()), float(accepted[inside].mean())
            table.append(Bin(index / bins, (index + 1) / bins, count, *means))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hspark fit",
        description="Fit the n-gram acceptance estimator to a target's recorded outputs.",
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add("outputs", metavar="FILE", help="JSON-lines file of recorded outputs, plain or .gz")
    add("--tokenizer", metavar="NAME", help="whose tokenizer and chat template turn prompts into ids, where needed")
    add("--target", metavar="NAME", default="", help="name of the target, kept with the coefficients")
    add("--save", metavar="PATH", help="write the estimator here; any estimator option takes the path")
    add("--level", type=int, default=6, choices=list(LEVELS), help="terms of the equation (default: 6, all of it)")
    add("--ladder", action="store_true", help="also fit and score the other levels")
    add("--visit", choices=VISITS, default="positions", help="replay at every position, or along an engine's steps")
    add("--holdout", type=float, default=0.2, help="share of the prompts kept for scoring (default: 0.2)")
    add("--seed", type=int, default=0, help="which prompts are held out (default: 0)")
    add("--all-temperatures", action="store_true", help="use sampled outputs too; by default only those at T = 0")
    add("--length", type=int, default=15, help="draft tokens (default: 15)")
    add("--min-match", type=int, default=5, help="shortest match (default: 5)")
    add("--max-match", type=int, default=15, help="length of a full match (default: 15)")
    add("--copy-cap", type=int, default=256, help="where the copy length stops counting (default: 256)")
    add("--no-periodic", action="store_true", help="end drafts at the newest token instead of going on periodically")
    add("--device", default="cpu", help="where matches are found (default: cpu)")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `hspark fit`; argv without the program's name. Returns the exit status; raises ValueError."""
    options = _parser().parse_args(argv)
    outputs, passed_over = _load(options)
    report = _run(options, outputs)
    # The file comes last: if it cannot be written after all, the coefficients have been printed.
    if options.json:
        print(json.dumps(report.to_dict() | {"sampled_outputs_left_out": passed_over, "saved": options.save}))
    else:
        _print(report, passed_over)
    if options.save:
        report.estimator.save(options.save)
        if not options.json:
            print(f"\nsaved to {options.save}; use it with estimator={options.save!r}")
    return 0


def _load(options: argparse.Namespace) -> tuple[list[RecordedOutput], int]:
    """The outputs to use, and how many sampled ones were left out."""
    if not Path(options.outputs).is_file():
        raise ValueError(f"outputs={options.outputs!r} is not a file; use recorded outputs (JSON lines, plain or .gz)")
    resolve_device(options.device)
    _drafter(options)
    split_by_prompt([], options.holdout)
    check_output_file("save", options.save)
    outputs = read_outputs(options.outputs, load_tokenize(options.tokenizer) if options.tokenizer else None)
    if options.all_temperatures:
        return outputs, 0
    greedy = [each for each in outputs if each.temperature is None or each.temperature <= GREEDY_TEMPERATURE]
    if not greedy:
        raise ValueError(
            f"outputs={options.outputs!r} holds sampled outputs only, whose labels are noisy; use outputs at "
            "temperature 0, or --all-temperatures"
        )
    return greedy, len(outputs) - len(greedy)


def _drafter(options: argparse.Namespace) -> NgramDrafter:
    return NgramDrafter(
        length=options.length,
        min_match=options.min_match,
        max_match=options.max_match,
        copy_cap=options.copy_cap,
        periodic=not options.no_periodic,
    )


def _run(options: argparse.Namespace, outputs: list[RecordedOutput]) -> FitReport:
    provenance = {"source": "hspark fit", "target": options.target, "data": Path(options.outputs).name}
    total = sum(len(output.output_token_ids) for output in outputs)
    with tqdm(total=total, desc="replay", unit="tok", unit_scale=True, disable=None) as bar:
        return fit_outputs(
            outputs,
            _drafter(options),
            level=options.level,
            visit=options.visit,
            holdout=options.holdout,
            seed=options.seed,
            ladder=options.ladder,
            provenance=provenance,
            device=resolve_device(options.device),
            progress=bar.update,
        )


def _print(report: FitReport, passed_over: int) -> None:
    if passed_over:
        print(f"left out {passed_over} outputs sampled above temperature 0 (--all-temperatures uses them)")
    for title, counts in (("fitted on", report.fitted), ("held out", report.held_out)):
        if counts is not None:
            print(
                f"{title}: {counts.outputs} outputs, {counts.output_tokens} tokens, {counts.matched_steps} of "
                f"{counts.visited} prefixes matched, {counts.accepted_per_visit:.2f} draft tokens accepted per prefix"
            )
    print(f"\non the {report.scored_on} prompts{'':27}log-loss per matched step   ECE")
    for score in report.scores:
        print(f"  {score.name:50}{score.log_loss_per_step:12.4f}{score.calibration_error:16.4f}")
    print("\nreliability: estimate   accepted   positions")
    for row in report.reliability:
        print(f"             {row.estimated:8.3f}   {row.accepted:8.3f}   {row.positions:9d}")
    print("\ncoefficients:")
    for name, value in asdict(report.estimator.coefficients).items():
        numbers = value if isinstance(value, tuple) else (value,)
        print(f"  {name:12}{' '.join(f'{number:.3f}' for number in numbers)}")
