"""The lossless suite: the table of what keeps the target's distribution, and the mistakes that must be caught.

check("rejection", "extension", drafting="probabilistic", greedy_target=False)     one cell of the table
check(MyVerifier(), MyPolicy())                     drafting and temperature of every kind, for code of your own
python -m hspark.verify.suite --examples 200 --json                       the whole table, and the controls
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hspark.policy import Policy, policy
from hspark.verify.controls import Control, controls
from hspark.verify.examples import SHAPES
from hspark.verify.lossless import check
from hspark.verify.report import BIAS, FALSE_ALARM, TOLERANCE, Report

# The table of the specification, section 7: (target at temperature 0, drafting, verifier).
MODES = (
    (True, "greedy", "rejection"),
    (True, "greedy", "coupled"),
    (True, "probabilistic", "rejection"),
    (True, "probabilistic", "coupled"),
    (False, "greedy", "rejection"),
    (False, "greedy", "coupled"),
    (False, "probabilistic", "rejection"),
    (False, "probabilistic", "coupled"),
)


def table_policies() -> tuple[Policy, ...]:
    """The policies of the table; `threshold` with a constant that the short chains of random worlds can exceed."""
    names = (
        "proposed",
        "expected_length",
        "no_contains",
        "ngram_first",
        "extension",
        "model_only",
        "ngram_only",
        "vanilla",
    )
    return (*(policy(name) for name in names), policy("threshold", score=1.0))


@dataclass(frozen=True)
class Cell:
    """One cell of the table: what is claimed, and what was found. sizing: "late" or "fresh"."""

    temperature: str
    drafting: str
    verify: str
    policy: str
    sizing: str
    claimed: bool
    report: Report

    @property
    def holds(self) -> bool:
        """A claimed cell is lossless in every example; of the others, some example is biased by more than 0.01."""
        if self.claimed:
            return self.report.lossless
        return (self.report.worst_total_variation or 0.0) > 0.01


def lossless_table(
    examples: int = 20,
    *,
    sampled: int = 1,
    samples: int = 20_000,
    seed: int = 0,
    progress: Callable[[], Any] | None = None,
) -> list[Cell]:
    """Checks every cell. progress: called after each."""
    cells = []
    settings = [(mode, chosen, False) for mode in MODES for chosen in table_policies()]
    settings += [((False, "probabilistic", "rejection"), chosen, True) for chosen in table_policies()]
    settings += [((False, "probabilistic", "coupled"), chosen, True) for chosen in table_policies()[:1]]
    for (greedy, drafting, verify), chosen, fresh in settings:
        claimed = chosen.is_lossless(drafting, verify, 0.0 if greedy else 1.0)
        if fresh:
            claimed = claimed and not (chosen.needs_model and verify == "rejection")
        options: dict[str, Any] = {"drafting": drafting, "examples": examples, "seed": seed, "fresh": fresh}
        if claimed:
            report = check(verify, chosen, greedy_target=greedy, sampled=sampled, samples=samples, **options)
        else:
            report = find_bias(verify, chosen, **options)
        sizing = "fresh" if fresh else "late"
        cells.append(Cell(report.temperature, drafting, verify, chosen.name, sizing, claimed, report))
        if progress is not None:
            progress()
    return cells


def find_bias(
    verifier: str, policy: Policy, *, examples: int, seed: int, bias: float = 0.01, limit: int = 1000, **options: Any
) -> Report:
    """Looks for a world with a total variation above `bias`: in `examples` worlds first, then in up to `limit` more.

    Nothing is sampled: a total variation is proof enough. The report is that of the worst batch of worlds.
    """
    options |= {"greedy_target": False, "sampled": 0}
    worst = check(verifier, policy, examples=examples, seed=seed, **options)
    for start in range(seed + examples, seed + examples + limit, 5):
        if (worst.worst_total_variation or 0.0) > bias:
            break
        found = check(verifier, policy, examples=5, seed=start, shapes=SHAPES[:1], **options)
        if (found.worst_total_variation or 0.0) > (worst.worst_total_variation or 0.0):
            worst = found
    return worst


def check_control(control: Control, **options: Any) -> Report:
    """`check` for a negative control, in the setting where its mistake shows."""
    setting: dict[str, Any] = {"drafting": control.drafting, "rule": control.rule, "draft_key": control.draft_key}
    setting["greedy_target"] = False
    if control.world is not None:
        setting["worlds"] = [control.world]
    return check(control.verifier, control.policy, **setting, **options)


def check_controls(
    examples: int = 7, *, samples: int = 10_000, seed: int = 0, progress: Callable[[], Any] | None = None
) -> list[Report]:
    """Every negative control, enumerated where it has a rule and sampled in every example; the policy field holds
    its name."""
    reports = []
    for control in controls():
        report = check_control(control, examples=examples, sampled=examples, samples=samples, seed=seed)
        reports.append(replace(report, verifier=control.name))
        if progress is not None:
            progress()
    return reports


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and the controls; exit status 1 if a claim fails or a control passes."""
    parser = argparse.ArgumentParser(
        prog="python -m hspark.verify.suite",
        description="Checks which combinations keep the target's distribution, and that wrong verifiers are caught.",
        epilog="example: python -m hspark.verify.suite --examples 200 --json > lossless.json",
    )
    parser.add_argument("--examples", type=int, default=20, help="random worlds per cell (default 20)")
    parser.add_argument("--sampled", type=int, default=1, help="of these, how many are sampled as well (default 1)")
    parser.add_argument("--samples", type=int, default=20_000, help="copies per sampled world (default 20000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first world (default 0)")
    parser.add_argument("--json", action="store_true", help="JSON for programs instead of a table")
    options = parser.parse_args(arguments)
    for name in ("examples", "sampled", "samples"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)} is out of range; use at least 1")
    from tqdm import tqdm

    total = (len(MODES) + 1) * len(table_policies()) + 1 + len(controls())
    with tqdm(total=total, file=sys.stderr, unit="cell") as bar:
        cells = lossless_table(
            options.examples, sampled=options.sampled, samples=options.samples, seed=options.seed, progress=bar.update
        )
        caught = check_controls(min(options.examples, 14), samples=10_000, seed=options.seed, progress=bar.update)
    right = all(cell.holds for cell in cells) and not any(report.lossless for report in caught)
    if options.json:
        record = {
            "examples_per_cell": options.examples,
            "tolerance": TOLERANCE,
            "false_alarm": FALSE_ALARM,
            "bias_of_miss_rate": BIAS,
            "cells": [{**asdict(cell), "holds": cell.holds} for cell in cells],
            "controls": [{**asdict(report), "rejected": not report.lossless} for report in caught],
            "holds": right,
        }
        print(json.dumps(record, indent=1))
    else:
        print_table(cells, caught)
    return 0 if right else 1


def print_table(cells: Sequence[Cell], caught: Sequence[Report]) -> None:
    names = ("drafting", "verify", "policy", "sizing", "claim")
    header = "".join(f"{name:{width}} " for name, width in zip(names, (13, 9, 15, 6, 8), strict=True))
    print(f"  T {header}{'worst TV':>9} {'worst p':>8}  result")
    for cell in cells:
        found, claim = cell.report, "lossless" if cell.claimed else "lossy"
        result = "holds" if cell.holds else "FAILS"
        print(
            f"{cell.temperature:>3} {cell.drafting:13} {cell.verify:9} {cell.policy:15} {cell.sizing:6} {claim:8} "
            f"{_figure(found.worst_total_variation):>9} {_figure(found.worst_p_value):>8}  {result}"
        )
    print("\nnegative controls (each must be rejected)")
    for report in caught:
        print(
            f"{report.verifier:30} {report.drafting:13} worst TV {_figure(report.worst_total_variation):>9}  "
            f"worst p {_figure(report.worst_p_value):>8}  {'PASSES' if report.lossless else 'rejected'}"
        )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
