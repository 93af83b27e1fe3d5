"""Fitting the acceptance estimator to replayed outputs, and measuring it (the paper, section 4.2, appendices D and E).

A step of a replay is one n-gram match with its features, and what the target then wrote. Position k of its chain is
*graded* iff all positions before it were accepted and the output reaches that far; its label is whether it was
accepted. So a step comes down to two counts: positions graded, and positions accepted, equal or one less.

Equation 1 is linear in a few features with few values, so steps are first counted into cells of equal features. The fit
then costs the same for a thousand outputs as for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot, softplus

from hspark.policy.curves import seconds as non_negative
from hspark.policy.curves import whole
from hspark.policy.estimator import AcceptanceEstimator, Coefficients

LEVELS = {
    1: "one shared beta",
    2: "beta_k",
    3: "beta_k, w",
    4: "beta_k, kappa",
    5: "beta_k, kappa, delta",
    6: "all of equation 1",
}


class GradedSteps(NamedTuple):
    """N replayed steps, each field int64 [N].

    match_length: n. agreement: a, 0 or 1. copy_length: m. accepted: draft tokens that the target wrote as well, before
    the first difference. graded: positions with a label; accepted + 1, or accepted where the chain or the output ended
    without a difference. Steps with n below the estimator's min_match have no match and count for nothing.
    """

    match_length: Tensor
    agreement: Tensor
    copy_length: Tensor
    accepted: Tensor
    graded: Tensor

    @staticmethod
    def of(records: GradedSteps | Mapping[str, Any]) -> GradedSteps:
        """Checked steps from a GradedSteps or a mapping of its field names to arrays of equal length."""
        given = records._asdict() if isinstance(records, GradedSteps) else dict(records)
        if set(given) != set(GradedSteps._fields):
            raise ValueError(f"records has the fields {sorted(given)}; use exactly {list(GradedSteps._fields)}")
        columns = {name: torch.as_tensor(value).detach().cpu() for name, value in given.items()}
        count = columns["match_length"].numel()
        for name, column in columns.items():
            if column.dim() != 1 or column.numel() != count or column.is_floating_point():
                raise ValueError(
                    f"records.{name} has shape {tuple(column.shape)} and type {column.dtype}; "
                    f"use whole numbers of shape [{count}], one per step"
                )
        steps = GradedSteps(**{name: column.to(torch.int64) for name, column in columns.items()})
        short = steps.graded - steps.accepted
        wrong = (steps.accepted < 0) | (short < 0) | (short > 1) | (steps.agreement < 0) | (steps.agreement > 1)
        if bool(wrong.any()):
            bad = {name: int(column[wrong][0]) for name, column in steps._asdict().items()}
            raise ValueError(
                f"records holds the step {bad}; use agreement 0 or 1, and 0 <= accepted <= graded <= accepted + 1"
            )
        return steps


def fit(
    records: GradedSteps | Mapping[str, Any],
    level: int = 6,
    *,
    ridge: float = 1.0,
    intercept_ridge: float = 1e-3,
    positions: int = 15,
    min_match: int = 5,
    max_match: int = 15,
    copy_cap: int = 256,
    provenance: Mapping[str, Any] | None = None,
) -> AcceptanceEstimator:
    """Ridge-penalised logistic regression of equation 1 by Newton's method, in float64.

    records: graded steps, see GradedSteps. level: rung of the ladder of appendix E, see LEVELS; terms that a rung omits
    are 0, and in 3 to 5 each feature has one coefficient for the first and the later positions.
    ridge, intercept_ridge: lambda in the penalty lambda / 2 * (sum of squares), of the weights and of the intercepts;
    the latter only keeps a position that was always accepted (or never) finite. positions: L, intercepts fitted; grades
    beyond are left out. A position without a single grade takes the intercept of the last one that has some.
    min_match, max_match, copy_cap: limits of the drafter that was replayed. provenance: kept with the coefficients,
    beside the counts and settings of this fit.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is unknown; use one of {LEVELS}")
    non_negative("ridge", ridge, positive=False)
    non_negative("intercept_ridge", intercept_ridge, positive=True)
    whole("positions", positions, 1)
    blank = Coefficients((0.0,) * positions)
    estimator = AcceptanceEstimator(blank, min_match=min_match, max_match=max_match, copy_cap=copy_cap)
    steps = GradedSteps.of(records)
    cells = count_cells(steps, estimator)
    graded, accepted = float(cells.graded.sum()), float(cells.accepted.sum())
    if graded == 0:
        raise ValueError(
            f"records holds no graded position of a match of at least {min_match} tokens; replay more outputs"
        )
    columns, intercepts = design_matrix(cells, level, estimator)
    penalty = torch.full((columns.shape[1],), float(ridge), dtype=torch.float64)
    penalty[:intercepts] = intercept_ridge
    theta = newton(columns, cells.graded, cells.accepted, penalty)
    known = torch.bincount(cells.position, minlength=positions) > 0
    estimator = estimator._copy(coefficients=_coefficients(theta, level, positions, known))
    matched = steps.match_length >= min_match
    counts = {
        "level": level,
        "ridge": ridge,
        "intercept_ridge": intercept_ridge,
        "matched_steps": int(matched.sum()),
        "full_matches": int((steps.match_length >= max_match).sum()),
        "graded_positions": int(graded),
        "accepted_positions": int(accepted),
        "positions_with_data": int(known.sum()),
        "log_loss_per_step": log_loss_per_step(estimator, steps),
        "calibration_error": calibration_error(estimator, steps),
    }
    return estimator._copy(provenance={"source": "fit", **counts, **(provenance or {})})


class Cells(NamedTuple):
    """C cells of equal features: position int64 [C] from 0, the features of equation 1, and the counts, float64 [C]."""

    position: Tensor
    match_length: Tensor
    agreement: Tensor
    copy_length: Tensor
    graded: Tensor
    accepted: Tensor


def count_cells(steps: GradedSteps, limits: AcceptanceEstimator) -> Cells:
    """Counts grades per (match length or copy length, agreement, position)."""
    short, width = limits.max_match - limits.min_match, limits.width
    kinds = short + limits.copy_cap - limits.max_match + 1  # lengths below a full match, then copy lengths of full ones
    matched = steps.match_length >= limits.min_match
    length, agreement, copied, accepted, graded = (column[matched] for column in steps)
    full = length >= limits.max_match
    copied = copied.clamp(limits.max_match, limits.copy_cap)
    kind = torch.where(full, short + copied - limits.max_match, length - limits.min_match)
    cell = kind * 2 + agreement

    def reaching(depth: Tensor) -> Tensor:
        """float64 [2 * kinds, L]: how many steps of each cell have a depth of at least k = 1..L."""
        code = cell * (width + 1) + depth.clamp(max=width)
        exact = torch.bincount(code, minlength=2 * kinds * (width + 1)).view(2 * kinds, width + 1)
        return exact.flip(1).cumsum(1).flip(1)[:, 1:].double()

    graded_count, accepted_count = reaching(graded), reaching(accepted)
    where, position = (graded_count > 0).nonzero(as_tuple=True)
    kind = where // 2
    return Cells(
        position=position,
        match_length=torch.where(kind < short, kind + limits.min_match, limits.max_match),
        agreement=where % 2,
        copy_length=torch.where(kind < short, limits.max_match, kind - short + limits.max_match),
        graded=graded_count[where, position],
        accepted=accepted_count[where, position],
    )


def design_matrix(cells: Cells, level: int, limits: AcceptanceEstimator) -> tuple[Tensor, int]:
    """Design matrix [C, P] of a rung of the ladder, and how many of its first columns are intercepts."""
    first = (cells.position == 0).double()
    full = (cells.match_length >= limits.max_match).double()
    beyond = (cells.match_length - limits.min_match).double()
    log_copy = full * (cells.copy_length.double() / limits.max_match).log()
    agreement = cells.agreement.double()
    if level == 1:
        return torch.ones_like(first)[:, None], 1
    intercepts = one_hot(cells.position, limits.width).double()
    by_level: dict[int, list[Tensor]] = {
        2: [],
        3: [beyond],
        4: [log_copy],
        5: [log_copy, agreement],
        6: [agreement, *(part * column for column in (beyond, full, log_copy) for part in (first, 1 - first))],
    }
    return torch.cat([intercepts, *(column[:, None] for column in by_level[level])], dim=1), limits.width


def _coefficients(theta: Tensor, level: int, positions: int, known: Tensor) -> Coefficients:
    """The coefficients of equation 1 from the solution of a rung; `known` [L] marks positions that have grades."""
    values = theta.tolist()
    if level == 1:
        return Coefficients((values[0],) * positions)
    beta, weights = values[:positions], values[positions:]
    for position in range(1, positions):
        if not known[position]:
            beta[position] = beta[position - 1]
    names: dict[int, list[tuple[str, ...]]] = {
        2: [],
        3: [("w_first", "w_rest")],
        4: [("kappa_first", "kappa_rest")],
        5: [("kappa_first", "kappa_rest"), ("delta",)],
        6: [("delta",), *((f"{name}_{part}",) for name in ("w", "l", "kappa") for part in ("first", "rest"))],
    }
    shared = {name: weight for group, weight in zip(names[level], weights, strict=True) for name in group}
    return Coefficients(tuple(beta), **shared)


def newton(columns: Tensor, graded: Tensor, accepted: Tensor, penalty: Tensor, prior: Tensor | None = None) -> Tensor:
    """The minimum [P] of the penalised log-loss of logistic regression, all of it float64.

    columns: [C, P]. graded, accepted: counts [C]. penalty: [P], lambda in lambda / 2 * (weight - prior)^2; prior: [P],
    None for 0. The objective is strictly convex, so Newton steps, halved until they improve it enough, reach the one
    minimum.
    """
    prior = torch.zeros(columns.shape[1], dtype=torch.float64) if prior is None else prior
    rejected = graded - accepted

    def objective(theta: Tensor) -> Tensor:
        logits = columns @ theta  # both sums are of positive terms, so nothing cancels where all or none is accepted
        loss = (rejected * softplus(logits) + accepted * softplus(-logits)).sum()
        return loss + 0.5 * (penalty * (theta - prior) ** 2).sum()

    theta = prior
    value = objective(theta)
    for _ in range(200):
        logits = columns @ theta
        chance = logits.sigmoid()
        gradient = columns.t() @ (rejected * chance - accepted * (-logits).sigmoid()) + penalty * (theta - prior)
        curvature = columns.t() @ ((graded * chance * (-logits).sigmoid())[:, None] * columns) + penalty.diag()
        # A weight whose feature never varies has no curvature without a penalty; lstsq leaves it at its prior.
        step = torch.linalg.lstsq(curvature, gradient[:, None], driver="gelsd").solution[:, 0]
        decrease = float(gradient @ step)
        if decrease <= 1e-14 * (1.0 + abs(float(value))):
            return theta - step  # so near the minimum that comparing objectives would only compare rounding
        size = 1.0
        while size > 1e-10 and objective(theta - size * step) > value - 1e-4 * size * decrease:
            size /= 2
        theta = theta - size * step
        value = objective(theta)
    raise ValueError("the fit did not converge in 200 Newton steps; use a larger ridge or intercept_ridge")


def _grades(estimator: AcceptanceEstimator, records: GradedSteps | Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Logits and labels of all graded positions, float64 [M], and the number of matched steps."""
    steps = GradedSteps.of(records)
    matched = steps.match_length >= estimator.min_match
    steps = GradedSteps(*(column[matched] for column in steps))
    exact = estimator.to("cpu", torch.float64)
    logits = exact.logits(steps.match_length, steps.agreement, steps.copy_length)
    position = torch.arange(estimator.width)
    graded = position < steps.graded[:, None]
    if not bool(graded.any()):
        raise ValueError("records holds no graded position; replay more outputs")
    return logits[graded], (position < steps.accepted[:, None])[graded].double(), int(matched.sum())


def log_loss_per_step(estimator: AcceptanceEstimator, records: GradedSteps | Mapping[str, Any]) -> float:
    """Negative log-likelihood (nats) of all graded positions, divided by the number of matched steps."""
    logits, labels, count = _grades(estimator, records)
    return -float((labels * logsigmoid(logits) + (1 - labels) * logsigmoid(-logits)).sum()) / count


def calibration_error(
    estimator: AcceptanceEstimator, records: GradedSteps | Mapping[str, Any], *, bins: int = 15
) -> float:
    """Expected calibration error of the estimator's acceptance over all graded positions."""
    logits, labels, _ = _grades(estimator, records)
    return expected_calibration_error(logits.sigmoid(), labels, bins=bins)


def expected_calibration_error(probability: Tensor, outcome: Tensor, *, bins: int = 15) -> float:
    """ECE of Guo et al. (2017): mean over bins, by their share, of |mean outcome - mean probability|.

    probability: float [M] in [0, 1]. outcome: 0/1 or bool [M]. bins: equal intervals of [0, 1],
    each with its lower end and the last with both.
    """
    whole("bins", bins, 1)
    probability, outcome = probability.detach().cpu().double(), outcome.detach().cpu().double()
    if probability.dim() != 1 or probability.shape != outcome.shape or not probability.numel():
        raise ValueError(
            f"probability of shape {tuple(probability.shape)} and outcome of shape {tuple(outcome.shape)} "
            "do not fit together; use two vectors of one length, at least 1"
        )
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError("probability has entries outside [0, 1]; use probabilities, not logits")
    bucket = (probability * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, bucket, outcome - probability)
    return float(gap.abs().sum()) / probability.numel()
