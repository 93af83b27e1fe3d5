"""Calibration of acceptance: temperatures fitted one position after the other, and the curve of headless drafters."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hspark.drafters.checkpoint_files import CheckpointError
from hspark.drafters.confidence import (
    Calibration,
    ProbabilityCurve,
    fit_curve,
    fit_platt,
    fit_temperatures,
    log_odds,
)
from hspark.drafters.dspark import DSparkDrafter
from hspark.policy import expected_calibration_error
from tests.drafters.dspark_cases import GREEDY, bound, feed, random_model, rows_of, save_model, tiny_config

TEXT = [1, 5, 9, 13, 2]


def record(true_temperatures: list[float], chains: int = 40000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Confidence logits [N, K] whose sigmoid at the true temperatures is the acceptance, and accepted counts [N]."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(chains, len(true_temperatures), generator=generator) + 1.0
    chance = (logits / torch.tensor(true_temperatures)).sigmoid()
    hit = torch.rand(logits.shape, generator=generator) < chance
    return logits, hit.cumprod(dim=1).sum(dim=1)


def errors(logits: Tensor, accepted: Tensor, temperatures: tuple[float, ...]) -> list[float]:
    survival = (logits / torch.tensor(temperatures)).sigmoid().cumprod(dim=1)
    return [expected_calibration_error(survival[:, k], accepted > k) for k in range(logits.shape[1])]


def test_fitted_temperatures_recover_the_true_ones_and_generalise() -> None:
    true = [1.7, 0.6, 2.5, 1.0]
    fitted = fit_temperatures(*record(true))
    for got, wanted in zip(fitted, true, strict=True):
        assert abs(math.log(got / wanted)) < 0.15
    held_out = record(true, seed=1)
    before, after = errors(*held_out, (1.0,) * 4), errors(*held_out, fitted)
    assert max(after) < 0.012
    assert all(a < b for a, b in zip(after[:3], before[:3], strict=True))


def test_the_fit_is_sequential() -> None:
    """Earlier temperatures do not depend on later positions."""
    logits, accepted = record([1.7, 0.6, 2.5], chains=4000)
    whole = fit_temperatures(logits, accepted)
    for width in (1, 2):
        assert fit_temperatures(logits[:, :width], accepted.clamp(max=width)) == whole[:width]


def test_slots_that_were_not_verified_do_not_count() -> None:
    """Chains cut at random before verification give the same answer as whole ones, up to noise."""
    true = [1.7, 0.6, 2.5]
    logits, accepted = record(true)
    verified = torch.randint(0, 4, accepted.shape, generator=torch.Generator().manual_seed(3))
    cut = fit_temperatures(logits, accepted.minimum(verified), verified)
    for got, wanted in zip(cut, true, strict=True):
        assert abs(math.log(got / wanted)) < 0.25


def test_positions_without_a_record_keep_the_temperature_before_them() -> None:
    logits, accepted = record([2.0, 1.0], chains=4000)
    fitted = fit_temperatures(logits, accepted.clamp(max=1), torch.ones_like(accepted))
    assert fitted == fit_temperatures(logits[:, :1], accepted.clamp(max=1)) * 2
    assert fitted[0] != 1.0


def test_platt_scaling_recovers_slopes_and_biases_and_generalises() -> None:
    """Each position has its own; chains cut before verification give the same up to noise. Temperatures can't."""
    slopes, biases = torch.tensor([0.6, 1.5, 0.9]), torch.tensor([-0.8, 0.5, -0.2])

    def biased(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        logits = 2.0 * torch.randn(40000, 3, generator=generator) + 0.5
        hit = torch.rand(logits.shape, generator=generator) < (slopes * logits + biases).sigmoid()
        return logits, hit.cumprod(dim=1).sum(dim=1)

    logits, accepted = biased(0)
    verified = torch.randint(0, 4, accepted.shape, generator=torch.Generator().manual_seed(3))
    whole = fit_platt(logits, accepted)
    for fitted, tolerance in ((whole, 0.06), (fit_platt(logits, accepted.minimum(verified), verified), 0.15)):
        torch.testing.assert_close(1 / torch.tensor(fitted.temperatures), slopes, rtol=0, atol=tolerance)
        torch.testing.assert_close(torch.tensor(fitted.biases), biases, rtol=0, atol=tolerance)
    logits, accepted = biased(1)

    def error(calibration: Calibration) -> float:
        survival = calibration.acceptance(logits).cumprod(dim=1)
        return max(expected_calibration_error(survival[:, k], accepted > k) for k in range(3))

    assert error(whole) < 0.012
    assert error(Calibration(fit_temperatures(*biased(0)))) > 0.05


@given(st.integers(0, 40), st.integers(0, 2))
def test_platt_scaling_of_little_evidence_stays_usable(chains: int, mode: int) -> None:
    """No record, only acceptances, only rejections, or scores that mislead: temperatures stay finite and above 0."""
    logits = torch.linspace(-9, 9, max(chains * 3, 1))[: chains * 3].reshape(chains, 3)
    accepted = torch.full((chains,), 3 if mode == 0 else 0) if mode < 2 else (logits[:, 0] < 0) * 3
    calibration = fit_platt(logits, accepted)
    assert len(calibration.temperatures) == len(calibration.biases) == 3
    assert all(0 < t <= 20.0 for t in calibration.temperatures)
    if chains == 0:
        assert calibration == Calibration((1.0,) * 3, biases=(0.0,) * 3)


def test_platt_scaling_without_a_record_keeps_the_position_before() -> None:
    logits, accepted = record([2.0, 1.0], chains=4000)
    fitted = fit_platt(logits, accepted.clamp(max=1), torch.ones_like(accepted))
    assert fitted.temperatures[1] == pytest.approx(fitted.temperatures[0])
    assert fitted.biases[1] == pytest.approx(fitted.biases[0])
    assert fitted.temperatures[0] != 1.0


def test_a_curve_recovers_its_coefficients() -> None:
    generator = torch.Generator().manual_seed(0)
    log_prob = torch.rand(30000, 4, generator=generator).clamp(1e-4, 1 - 1e-4).log()
    true = ProbabilityCurve(-0.4, 0.7)
    hit = torch.rand(log_prob.shape, generator=generator) < true(log_prob)
    curve = fit_curve(log_prob, hit.cumprod(dim=1).sum(dim=1))
    assert curve.intercept == pytest.approx(-0.4, abs=0.05)
    assert curve.slope == pytest.approx(0.7, abs=0.05)


@given(st.integers(0, 40), st.integers(0, 2))
def test_a_curve_of_little_evidence_stays_finite(chains: int, mode: int) -> None:
    """No record, only acceptances, or only rejections: the ridge keeps the coefficients finite."""
    log_prob = torch.linspace(-3, -0.01, max(chains * 3, 1))[: chains * 3].reshape(chains, 3)
    accepted = torch.full((chains,), 3 if mode == 0 else 0) if mode < 2 else torch.arange(chains) % 4
    curve = fit_curve(log_prob, accepted)
    assert math.isfinite(curve.intercept)
    assert math.isfinite(curve.slope)
    if chains == 0:
        assert curve == ProbabilityCurve()


def test_the_curve_is_the_sigmoid_of_a_shifted_logit() -> None:
    log_prob = torch.tensor([-20.0, -1.0, -0.1, -1e-3])
    torch.testing.assert_close(ProbabilityCurve(0.0, 1.0)(log_prob), log_prob.exp(), rtol=1e-4, atol=2e-6)
    default = ProbabilityCurve()
    odds = math.exp(1.1) * 0.5 / (1 - 0.5)  # the default multiplies the odds of acceptance by exp(1.1), about 3
    assert float(default(torch.tensor(math.log(0.5)))) == pytest.approx(odds / (1 + odds))
    assert bool(log_odds(torch.tensor([0.0, -1e9])).isfinite().all())


@pytest.mark.parametrize(
    ("scores", "accepted", "verified", "message"),
    [
        (torch.zeros(3), torch.zeros(3), None, r"scores of shape \[3\]"),
        (torch.full((2, 3), math.nan), torch.zeros(2), None, "finite"),
        (torch.zeros(2, 3), torch.zeros(3), None, "one count for each of the 2 chains"),
        (torch.zeros(2, 3), torch.tensor([0, 4]), None, "0 <= accepted <= verified <= 3"),
        (torch.zeros(2, 3), torch.tensor([0, 2]), torch.tensor([1, 1]), "0 <= accepted <= verified <= 3"),
    ],
)
def test_bad_records_are_refused(scores: Tensor, accepted: Tensor, verified: Tensor | None, message: str) -> None:
    for fit in (fit_temperatures, fit_platt, fit_curve):
        with pytest.raises(ValueError, match=message):
            fit(scores, accepted, verified)


# ---- beside a checkpoint ---------------------------------------------------------------------------------------------


def acceptance(source: object, **options: object) -> Tensor:
    drafter: DSparkDrafter = bound(source, **options)  # type: ignore[arg-type]
    feed(drafter, 0, TEXT[:-1])
    return drafter.propose(rows_of([TEXT]), GREEDY).acceptance[0]


def test_a_saved_calibration_is_applied(tmp_path: Path) -> None:
    model = random_model(tiny_config())
    path = save_model(model, tmp_path)
    plain = acceptance(path)
    calibration = Calibration(temperatures=(2.0, 0.5, 3.0), biases=(-1.0, 0.25))
    assert calibration.save(path).name == "confidence.json"
    assert Calibration.load_beside(path) == calibration
    # Positions past the last temperature, or bias, use the last.
    biases = torch.tensor([-1.0, 0.25, 0.25, 0.25, 0.25])
    expected = (torch.logit(plain) / torch.tensor([2.0, 0.5, 3.0, 3.0, 3.0]) + biases).sigmoid()
    torch.testing.assert_close(calibration.acceptance(torch.logit(plain)), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(acceptance(path), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(acceptance(path, length=2), expected[:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(acceptance(path, calibration=Calibration()), plain)


def test_a_saved_curve_is_applied_to_a_drafter_without_the_head(tmp_path: Path) -> None:
    headless = {"confidence_head": False, "confidence_with_markov": False}
    path = save_model(random_model(tiny_config(**headless)), tmp_path)
    plain = acceptance(path, calibration=Calibration(curve=ProbabilityCurve(0.0, 1.0)))
    Calibration(curve=ProbabilityCurve(-0.5, 0.8)).save(path)
    torch.testing.assert_close(acceptance(path), (-0.5 + 0.8 * torch.logit(plain)).sigmoid(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"temperatures": [0]}', '{"temperatures": [1, "x"]}', '{"temperature": [1]}', '{"curve": {"slop": 1}}',
     '{"temperatures": [NaN]}', '{"biases": [Infinity]}', '{"biases": ["x"]}', '{"biases": 1}',
     '{"temperatures": [true]}', '{"temperatures": "12"}', '{"temperatures": null}', '{"curve": 5}',
     '{"curve": {"slope": true}}', '{"curve": {"slope": null}}', '{"biases": [1' + "0" * 400 + "]}", "[" * 100000],
)  # fmt: skip
def test_a_damaged_calibration_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = save_model(random_model(tiny_config()), tmp_path)
    (path / "confidence.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"confidence\.json: (not a calibration|not valid JSON|holds list)"):
        DSparkDrafter.from_pretrained(path)


def test_values_made_by_hand_are_checked() -> None:
    with pytest.raises(ValueError, match="slope='x'; use a finite number"):
        ProbabilityCurve(slope="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"temperatures=\(0,\); use a list of finite numbers above 0"):
        Calibration((0,))


def test_saved_calibrations_are_plain_json(tmp_path: Path) -> None:
    Calibration((1.5,)).save(tmp_path)
    values = json.loads((tmp_path / "confidence.json").read_text())
    assert values == {"temperatures": [1.5], "biases": [], "curve": {"intercept": 1.1, "slope": 1.0}}
