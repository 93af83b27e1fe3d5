"""How well acceptance is known beforehand: calibration of the estimator and of the model drafter's confidence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hspark.lab.studies.fits import Grades, bins, losses
from hspark.lab.studies.lab import Lab
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.studies.published import published
from hspark.lab.studies.statistics import interval
from hspark.lab.study import Plot, Series, Study, Table
from hspark.policy import expected_calibration_error

OWN = "own fit"


def calibration(estimate: Any, label: Any) -> float:
    """ECE over grades [G], 15 bins."""
    return expected_calibration_error(torch.from_numpy(estimate), torch.from_numpy(label))


def estimator(lab: Lab) -> Study:
    grades = lab.grades
    try:
        presets = lab.presets
    except LeftOutError:
        presets = {}
    named = {OWN: lab.own} | {f"published fit for {name}": each for name, each in presets.items()}
    loss = {name: interval(lab.log_loss(each)) for name, each in named.items()}
    error = {name: calibration(grades.of(each), grades.label) for name, each in named.items()}
    score_rows: list[list[Any]] = [[name, *loss[name], error[name]] for name in named]
    lines = {"n-gram estimator": bins(grades.of(lab.own), grades.label)}
    data: dict[str, Any] = {"graded_slots": len(grades.row), "matched_positions": int(lab.matched.sum()), "ece": error}
    confidence = None
    if lab.has_model:
        own = Grades(lab.table, "model")
        if len(own.row):
            estimate = own.of(lab.table.model_acceptance)
            lines["model drafter's confidence"] = bins(estimate, own.label)
            confidence = calibration(estimate, own.label)
            data |= {"confidence_ece": confidence, "confidence_graded_slots": len(own.row)}
            data["confidence_log_loss_per_slot"] = float(losses(estimate, own.label).mean())
    others = [value for name, value in error.items() if name != OWN]
    finding = f"The estimator's calibration error is {error[OWN]:.3f} over {len(grades.row)} graded slots"
    if others:
        finding += f"; with published coefficients of other models it is {min(others):.3f} to {max(others):.3f}"
    finding += "."
    if confidence is not None:
        finding += f" The model drafter's own confidence is off by {confidence:.3f} on the same measure."
    return Study(
        name="estimator",
        title="",
        source="",
        question="Do the acceptance estimates mean what they say, and whose coefficients are good enough?",
        finding=finding,
        tables=[
            _scores(lab, score_rows),
            Table(
                "Reliability",
                ["estimates of", "graded slots", "mean estimate", "share accepted"],
                [[name, *row] for name, line in lines.items() for row in line],
                "Fifteen equal intervals of the estimate; empty ones are left out.",
            ),
        ],
        plots=[_reliability(lines), _errors(error)],
        data=data,
    )


def _scores(lab: Lab, rows: list[list[Any]]) -> Table:
    paper = published()["calibration_error"]
    return Table(
        "Estimators of n-gram drafts on these outputs",
        ["coefficients", "log-loss (nats per matched step)", "95% low", "95% high", "ECE"],
        rows,
        f"{lab.own_note} The paper's own fit has ECE {paper['SPEED-Bench, held out']} on held-out SPEED-Bench and "
        f"{paper['EditBench']} on EditBench.",
    )


def _reliability(lines: dict[str, list[tuple[int, float, float]]]) -> Plot:
    series = [Series(name, [row[1] for row in line], [row[2] for row in line]) for name, line in lines.items()]
    series.append(Series("perfect", [0.0, 1.0], [0.0, 1.0]))
    return Plot("Reliability: what was estimated and what happened", "mean estimate", "share accepted", series)


def _errors(error: dict[str, float]) -> Plot:
    paper = published()["calibration_error"]
    ours = Series("on this table", list(error), list(error.values()))
    theirs = Series("paper, Qwen3-4B on EditBench", [OWN], [paper["EditBench"]], published=True)
    title = "Expected calibration error of n-gram estimates"
    return Plot(title, "coefficients", "expected calibration error", [ours, theirs], kind="bar")


def gap(estimates: Any, reference: Any, lab: Lab) -> Any:
    """Log-loss per matched step over that of the reference, [1 + R]: a difference, paired by draw."""
    return np.asarray(lab.log_loss(estimates) - lab.log_loss(reference))
