"""From a drafter's scores to acceptance: calibrated confidence, and a substitute for drafters without that head.

`acceptance` of a slot is the probability that its token is accepted given that all earlier ones were; `survival` is the
running product, the probability that the slot is accepted at all.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE_NAME = "confidence.json"
# Temperatures tried by the fit: evenly spaced logarithms, 1 among them.
_GRID = [math.exp(x / 100) for x in range(-230, 231)]


@dataclass(frozen=True)
class ProbabilityCurve:
    """Acceptance of a drafter without a confidence head: sigmoid(intercept + slope * logit(top probability)).

    "Top probability" is the drafter's own probability of its best token at temperature 1. The default was fitted on
    held-out greedy outputs of SmolLM2-135M, with a small drafter whose Markov and confidence heads were switched off:
    drafters of this kind are right more often than they say, because a greedy target takes the likelier token every
    time and because a slot only counts once its predecessors were right. It lowered the calibration error of acceptance
    from 0.10 (taking the probability at its word) to 0.06. `fit_curve` fits a drafter's own.
    """

    intercept: float = 1.1
    slope: float = 1.0

    def __call__(self, log_prob: Tensor) -> Tensor:
        """log_prob [...]: natural logarithm of the top probability -> acceptance [...], float32."""
        return (self.intercept + self.slope * log_odds(log_prob.float())).sigmoid()


@dataclass(frozen=True)
class Calibration:
    """What turns a drafter's scores into acceptance; stored as `confidence.json` beside the checkpoint.

    temperatures, biases: one per draft position; acceptance is sigmoid(confidence logit / temperature + bias). Empty: 1
        and 0 everywhere. Positions past the last use the last.
    curve: for drafters without a confidence head.
    """

    temperatures: tuple[float, ...] = ()
    curve: ProbabilityCurve = field(default_factory=ProbabilityCurve)
    biases: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if any(not isinstance(t, int | float) or not 0 < t < math.inf for t in self.temperatures):
            raise ValueError(f"temperatures={self.temperatures!r}; use finite numbers above 0")
        if any(not isinstance(b, int | float) or not math.isfinite(b) for b in self.biases):
            raise ValueError(f"biases={self.biases!r}; use finite numbers")
        if not all(math.isfinite(x) for x in (self.curve.intercept, self.curve.slope)):
            raise ValueError(f"curve={self.curve!r}; use finite numbers")

    def for_width(self, width: int) -> tuple[list[float], list[float]]:
        """The temperatures and the biases of `width` positions."""
        last = range(width)
        temperatures, biases = self.temperatures or (1.0,), self.biases or (0.0,)
        return (
            [temperatures[min(position, len(temperatures) - 1)] for position in last],
            [biases[min(position, len(biases) - 1)] for position in last],
        )

    def acceptance(self, confidence_logits: Tensor) -> Tensor:
        """Confidence logits [..., K] -> acceptance [..., K], float32."""
        logits = confidence_logits.float()
        temperatures, biases = (torch.tensor(x, device=logits.device) for x in self.for_width(logits.shape[-1]))
        return (logits / temperatures + biases).sigmoid()

    def save(self, directory: str | Path) -> Path:
        """Writes `confidence.json` into a checkpoint directory and returns its path."""
        path = Path(directory) / FILE_NAME
        curve = {"intercept": self.curve.intercept, "slope": self.curve.slope}
        values = {"temperatures": list(self.temperatures), "biases": list(self.biases), "curve": curve}
        path.write_text(json.dumps(values, indent=2) + "\n")
        return path

    @staticmethod
    def load_beside(directory: str | Path) -> Calibration:
        """The calibration in a checkpoint directory; the default one if there is none. ValueError if it is damaged."""
        path = Path(directory) / FILE_NAME
        if not path.exists():
            return Calibration()
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"holds {type(values).__name__}")
            unknown = set(values) - {"temperatures", "biases", "curve"}
            if unknown:
                raise ValueError(f"unknown keys {sorted(unknown)}")
            curve = ProbabilityCurve(**values.get("curve", {}))
            return Calibration(tuple(values.get("temperatures", ())), curve, tuple(values.get("biases", ())))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}: not a calibration ({error}); expected keys temperatures, biases and curve"
            ) from error


def log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p [...], for p kept within 1e-6 of 0 and 1."""
    log_prob = log_prob.clamp(math.log(1e-6), math.log1p(-1e-6))
    return log_prob - torch.log(-torch.expm1(log_prob))


def survival_ece(predicted: Tensor, survived: Tensor, bins: int = 15) -> float:
    """Expected calibration error of predictions [N] in [0, 1] against outcomes [N] (0 or 1), over equal-width bins.

    The mean over samples of |mean prediction - mean outcome| of the bin that the sample falls in.
    """
    predicted, survived = predicted.double(), survived.double()
    bin_of = (predicted * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of, predicted - survived)
    return float(gap.abs().sum() / max(len(predicted), 1))


def fit_temperatures(
    confidence_logits: Tensor, accepted: Tensor, verified: Tensor | None = None, bins: int = 15
) -> tuple[float, ...]:
    """Sequential temperature scaling: one temperature per position, left to right.

    The temperature at position k minimises the calibration error of the survival (the running product), with the
    earlier temperatures fixed. confidence_logits: [N, K] of N recorded chains. accepted: int [N] draft tokens accepted.
    verified: int [N] slots that were verified (default: all K). A chain counts at position k if that slot was verified.
    (A chain cut before it is left out even where an earlier rejection decides its fate: of the chains cut there, only
    the failures would be known.) Record with every slot verified where possible: slots that a scheduler dropped for
    their low confidence are missing from the fit.
    """
    logits, accepted, verified = _check_record(confidence_logits, accepted, verified)
    survival = torch.ones(logits.shape[0], dtype=torch.float64)
    temperatures: list[float] = []
    for position in range(logits.shape[1]):
        known = verified > position
        best = temperatures[-1] if temperatures else 1.0
        if bool(known.any()):
            before, score = survival[known], logits[known, position]
            outcome = accepted[known] > position
            errors = [survival_ece(before * (score / t).sigmoid(), outcome, bins) for t in _GRID]
            # Among equals the temperature closest to 1 changes least.
            best = min(zip(errors, _GRID, strict=True), key=lambda pair: (round(pair[0], 9), abs(math.log(pair[1]))))[1]
        temperatures.append(best)
        survival = survival * (logits[:, position] / best).sigmoid()
    return tuple(temperatures)


def fit_platt(
    confidence_logits: Tensor, accepted: Tensor, verified: Tensor | None = None, ridge: float = 1.0
) -> Calibration:
    """Platt scaling of every position (Platt 1999): a temperature and a bias, by logistic regression.

    Arguments as in `fit_temperatures`. A bias also moves estimates of one half, which a temperature cannot. Position k
    counts where it was verified and all earlier ones were accepted; the ridge, in chains, pulls slope (1 / temperature)
    and bias towards those of the position before, the first towards 1 and 0. Slopes stay at 0.05 or more.
    """
    logits, accepted, verified = _check_record(confidence_logits, accepted, verified)
    fits = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for position in range(logits.shape[1]):
        known = (accepted >= position) & (verified > position)
        outcome = (accepted > position)[known].double()
        fits.append(_logistic(logits[known, position], outcome, prior=fits[-1], ridge=ridge))
    pairs = [(1 / max(float(slope), 0.05), float(bias)) for bias, slope in fits[1:]]
    return Calibration(tuple(t for t, _ in pairs), biases=tuple(b for _, b in pairs))


def fit_curve(
    log_prob: Tensor, accepted: Tensor, verified: Tensor | None = None, ridge: float = 1e-3
) -> ProbabilityCurve:
    """The curve of a drafter without a confidence head, by logistic regression.

    log_prob: [N, K] log top probabilities of N recorded chains; accepted, verified: as in `fit_temperatures`. Position
    k counts where it was verified and all earlier ones were accepted. The ridge pulls towards the default curve.
    """
    log_prob, accepted, verified = _check_record(log_prob, accepted, verified)
    position = torch.arange(log_prob.shape[1])
    graded = (position <= accepted[:, None]) & (position < verified[:, None])
    if not bool(graded.any()):
        return ProbabilityCurve()
    outcome = (position < accepted[:, None])[graded].double()
    default = ProbabilityCurve()
    prior = torch.tensor([default.intercept, default.slope], dtype=torch.float64)
    intercept, slope = _logistic(log_odds(log_prob[graded]), outcome, prior=prior, ridge=ridge)
    return ProbabilityCurve(float(intercept), float(slope))


def _logistic(score: Tensor, outcome: Tensor, *, prior: Tensor, ridge: float, steps: int = 50) -> Tensor:
    """(intercept, slope) float64 [2] of outcomes [N] on scores [N], pulled towards `prior` [2]; Newton's method."""
    features = torch.stack((torch.ones_like(score), score), dim=1)
    weights = prior.clone()
    for _ in range(steps):
        estimate = (features @ weights).sigmoid()
        gradient = features.T @ (estimate - outcome) + ridge * (weights - prior)
        curvature = features.T @ (features * (estimate * (1 - estimate))[:, None]) + ridge * torch.eye(2).double()
        change = torch.linalg.solve(curvature, gradient)
        weights = weights - change.clamp(-2.0, 2.0)
        if float(change.abs().max()) < 1e-10:
            break
    return weights


def _check_record(scores: Tensor, accepted: Tensor, verified: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if scores.dim() != 2 or not torch.isfinite(scores).all():
        raise ValueError(f"scores of shape {list(scores.shape)}; use finite numbers [N, K], one row per recorded chain")
    width = scores.shape[1]
    verified = torch.full_like(accepted, width) if verified is None else verified
    if accepted.shape != scores.shape[:1] or verified.shape != accepted.shape:
        raise ValueError(
            f"accepted {list(accepted.shape)} and verified {list(verified.shape)}; use one count for each of the "
            f"{scores.shape[0]} chains"
        )
    if bool((accepted > verified).any()) or bool((verified > width).any()) or bool((accepted < 0).any()):
        raise ValueError(f"counts are out of range; use 0 <= accepted <= verified <= {width}")
    return scores.double().cpu(), accepted.long().cpu(), verified.long().cpu()
