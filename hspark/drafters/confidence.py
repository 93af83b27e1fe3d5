"""From a drafter's scores to acceptance: calibrated confidence, and a substitute for drafters without that head.

`acceptance` of a slot is the probability that its token is accepted given that all earlier ones were; `survival` is the
running product, the probability that the slot is accepted at all.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hspark.drafters.checkpoint_files import CheckpointError, read_object
from hspark.policy.curves import as_float
from hspark.policy.fitting import expected_calibration_error, newton

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

    def __post_init__(self) -> None:
        for name in ("intercept", "slope"):
            if as_float(getattr(self, name)) is None:
                raise ValueError(f"{name}={getattr(self, name)!r}; use a finite number")

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
        for name, low in (("temperatures", 0.0), ("biases", -math.inf)):
            given = getattr(self, name)
            numbers = [as_float(value) for value in given] if isinstance(given, list | tuple) else [None]
            if any(number is None or number <= low for number in numbers):
                above = "" if low else " above 0"
                raise ValueError(f"{name}={given!r}; use a list of finite numbers{above}")
            object.__setattr__(self, name, tuple(numbers))

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
        """The calibration in a checkpoint directory; the default one if there is none. CheckpointError if damaged."""
        path = Path(directory) / FILE_NAME
        if not path.exists():
            return Calibration()
        values = read_object(path)
        curve = values.pop("curve", {})
        try:
            if set(values) - {"temperatures", "biases"}:
                raise ValueError(f"it has the keys {sorted(values)}; use temperatures, biases and curve")
            if not isinstance(curve, dict) or set(curve) - {"intercept", "slope"}:
                raise ValueError(f"curve={curve!r}; use an object of intercept and slope")
            return Calibration(curve=ProbabilityCurve(**curve), **values)
        except ValueError as error:
            raise CheckpointError(f"{path}: not a calibration ({error})") from error


def log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p [...], for p kept within 1e-6 of 0 and 1."""
    log_prob = log_prob.clamp(math.log(1e-6), math.log1p(-1e-6))
    return log_prob - torch.log(-torch.expm1(log_prob))


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
            errors = [expected_calibration_error(before * (score / t).sigmoid(), outcome, bins=bins) for t in _GRID]
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


def _logistic(score: Tensor, outcome: Tensor, *, prior: Tensor, ridge: float) -> Tensor:
    """(intercept, slope) float64 [2] of outcomes [N] on scores [N], pulled towards `prior` [2]."""
    ones = torch.ones_like(score)
    return newton(torch.stack((ones, score), dim=1), ones, outcome, torch.full_like(prior, ridge), prior)


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
