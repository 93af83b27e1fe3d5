"""Estimates of the model-free chains for a table: fitted, with a feature left out, or published; and their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hspark.lab.table import RecordTable
from hspark.policy import AcceptanceEstimator, Coefficients, GradedSteps
from hspark.policy.fitting import count_cells, design_matrix, fit, newton

Array = NDArray[Any]

# What can be taken out of equation 1, in the words of the paper's figure 6. "first-token terms": one coefficient for
# the first and the later positions; "position intercepts": one intercept for all positions.
REMOVABLE = (
    "copy length",
    "first-token terms",
    "match length",
    "position intercepts",
    "full-match bonus",
    "agreement",
)
_RIDGE, _INTERCEPT_RIDGE = 1.0, 1e-3
# Columns after the intercepts, in the order of `fitting`'s design: delta, then first and rest of w, l and kappa.
_WEIGHTS = ("delta", "w_first", "w_rest", "l_first", "l_rest", "kappa_first", "kappa_rest")
_DROPPED = {"copy length": "kappa", "match length": "w", "full-match bonus": "l", "agreement": "delta"}


def table_limits(table: RecordTable) -> dict[str, Any]:
    """The limits of the n-gram drafter that was recorded, as estimators take them."""
    return {name: int(table.info["ngram"][name]) for name in ("min_match", "max_match", "copy_cap")}


def graded_steps(table: RecordTable) -> GradedSteps:
    """Every position of the table, those without a match included, as `fit` takes them."""
    match_length, agreement, copy_length = table.features()
    accepted = torch.from_numpy(table.free_accepted.astype(np.int64))
    graded = torch.from_numpy(table.graded("free"))
    matched = torch.from_numpy(table.free_length > 0)
    return GradedSteps(torch.where(matched, match_length, 0), agreement, copy_length, accepted, graded)


def fit_table(table: RecordTable, level: int = 6, without: str | None = None) -> AcceptanceEstimator:
    """Equation 1 fitted to all positions of a table; `without` takes one of REMOVABLE out of the full equation."""
    if without is not None:
        return _fit_without(table, without)
    return fit(graded_steps(table), level, positions=table.free_width, **table_limits(table))


def _fit_without(table: RecordTable, feature: str) -> AcceptanceEstimator:
    """As level 6 of `fit`, in the coordinates that are left: theta = mix.T @ (the smaller solution)."""
    width, limits = table.free_width, table_limits(table)
    blank = AcceptanceEstimator(Coefficients((0.0,) * width), **limits)
    cells = count_cells(graded_steps(table), blank)
    if not float(cells.graded.sum()):
        raise ValueError("the table holds no graded position of a match; record more outputs")
    columns, _ = design_matrix(cells, 6, blank)
    mix = _mixing(feature, width)
    intercepts = int((mix[:, :width].sum(dim=1) > 0).sum())
    penalty = torch.full((mix.shape[0],), _RIDGE, dtype=torch.float64)
    penalty[:intercepts] = _INTERCEPT_RIDGE
    theta = (mix.t() @ newton(columns @ mix.t(), cells.graded, cells.accepted, penalty)).tolist()
    known = torch.bincount(cells.position, minlength=width) > 0
    beta = theta[:width]
    for position in range(1, width):
        if not known[position]:
            beta[position] = beta[position - 1]
    weights = dict(zip(_WEIGHTS, theta[width:], strict=True))
    provenance = {"source": "fit", "level": 6, "without": feature}
    return AcceptanceEstimator(Coefficients(tuple(beta), **weights), provenance=provenance, **limits)


def _mixing(feature: str, width: int) -> torch.Tensor:
    """float64 [fewer, width + 7]: which coefficients of the full equation each remaining one stands for."""
    if feature not in REMOVABLE:
        raise ValueError(f"feature={feature!r} is unknown; use one of {', '.join(map(repr, REMOVABLE))}")
    rows = [[position] for position in range(width)]
    if feature == "position intercepts":
        rows = [list(range(width))]
    place = {name: width + index for index, name in enumerate(_WEIGHTS)}
    if feature == "first-token terms":
        rows += [[place["delta"]], *([place[f"{name}_first"], place[f"{name}_rest"]] for name in ("w", "l", "kappa"))]
    else:
        dropped = _DROPPED.get(feature, "none")
        rows += [[at] for name, at in place.items() if name.split("_")[0] != dropped]
    mix = torch.zeros(len(rows), width + len(_WEIGHTS), dtype=torch.float64)
    for row, places in enumerate(rows):
        mix[row, places] = 1.0
    return mix


def acceptance(estimator: AcceptanceEstimator, table: RecordTable) -> Array:
    """float32 [N, L]: the estimates at all positions of a table; without meaning where nothing matched."""
    return estimator.with_width(table.free_width)(*table.features()).numpy()


class Grades:
    """The graded slots of one drafter's chains in a table: G of them, in the order of positions.

    row: int64 [G] position in the table. slot: int64 [G]. label: bool [G] accepted. output: int64 [G].
    """

    def __init__(self, table: RecordTable, source: str) -> None:
        accepted = getattr(table, f"{source}_accepted").astype(np.int64)
        width = table.model_width if source == "model" else table.free_width
        self.row, self.slot = np.nonzero(np.arange(width) < table.graded(source)[:, None])
        self.label = self.slot < accepted[self.row]
        self.output = table.output[self.row]

    def of(self, values: Array) -> Array:
        """float64 [G] of values [N, W]."""
        return np.asarray(values[self.row, self.slot], dtype=np.float64)


def losses(estimate: Array, label: Array) -> Array:
    """Negative log-likelihood in nats of each grade."""
    chance = np.clip(np.where(label, estimate, 1 - estimate), 1e-12, 1.0)
    return -np.log(chance)


def bins(estimate: Array, label: Array, count: int = 15) -> list[tuple[int, float, float]]:
    """(grades, mean estimate, share accepted) of equal intervals of [0, 1]; empty ones are left out."""
    bucket = np.minimum((estimate * count).astype(np.int64), count - 1)
    table = []
    for index in np.unique(bucket):
        inside = bucket == index
        table.append((int(inside.sum()), float(estimate[inside].mean()), float(label[inside].mean())))
    return table
