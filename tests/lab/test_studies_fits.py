"""Estimators that studies fit: never to an output's own prompt, and with or without a feature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hspark.lab.studies import Lab, StudyOptions
from hspark.lab.studies.fits import REMOVABLE, fit_table, graded_steps
from hspark.policy import AcceptanceEstimator
from tests.lab.made_studies import lab
from tests.lab.made_table import made_table


def test_an_output_is_never_estimated_from_its_own_prompt() -> None:
    whole = lab()
    fold = whole.folds == whole.folds[0]
    assert 0 < fold.sum() < len(fold)
    others = fit_table(whole.table.select(np.flatnonzero(~fold)))
    inside = fold[whole.table.output]
    expected = others(*whole.table.features()).numpy()
    np.testing.assert_allclose(whole.own[inside], expected[inside], rtol=1e-5)
    assert not np.allclose(whole.own[~inside], expected[~inside])


def test_a_training_table_takes_the_place_of_folds() -> None:
    train = made_table(10, seed=9)
    own = Lab(made_table(), StudyOptions(train=train))
    np.testing.assert_allclose(own.refit(3), fit_table(train, 3)(*own.table.features()).numpy())
    given = Lab(made_table(), StudyOptions(estimator=AcceptanceEstimator.preset("qwen3-4b")))
    np.testing.assert_allclose(given.own, AcceptanceEstimator.preset("qwen3-4b")(*own.table.features()).numpy())


def test_outputs_of_one_prompt_share_a_group() -> None:
    table = made_table()
    own = Lab(table.select([0, 1, 0, 2]))
    assert own.prompts.tolist() == [0, 1, 0, 2]
    assert own.prompt_count == 3
    assert own.folds[0] == own.folds[2]


@pytest.mark.parametrize("feature", REMOVABLE)
def test_a_fit_without_a_feature_solves_the_equations_of_the_other_columns(feature: str) -> None:
    """At the minimum of the penalised log-loss, X.T (estimate - label) + ridge * weights is 0, column by column."""
    table = made_table()
    fitted = fit_table(table, without=feature)
    columns, errors = [], []
    for n, a, m, accepted, graded in zip(*(column.tolist() for column in graded_steps(table)), strict=True):
        if n >= 5:
            exact = fitted.to("cpu", torch.float64)
            estimate = exact(torch.tensor([n]), torch.tensor([a]), torch.tensor([m]))[0].tolist()
            for k in range(min(graded, 15)):
                columns.append(list(_columns(feature, n, a, m, k).values()))
                errors.append(estimate[k] - float(k < accepted))
    weights = [getattr(fitted.coefficients, name, 0.0) for name in _columns(feature, 5, 0, 0, 0)]
    ridge = np.array([0.0 if isinstance(weight, tuple) else weight for weight in weights])
    assert np.array(columns).T @ np.array(errors) + ridge == pytest.approx(np.zeros(len(ridge)), abs=0.05)
    zero = {"copy length": "kappa", "match length": "w", "full-match bonus": "l"}
    if feature in zero:
        assert getattr(fitted.coefficients, f"{zero[feature]}_rest") == 0.0
    assert (fitted.coefficients.delta == 0.0) == (feature == "agreement")
    assert (len(set(fitted.coefficients.beta)) == 1) == (feature == "position intercepts")
    assert (fitted.coefficients.w_first == fitted.coefficients.w_rest) == (
        feature in ("first-token terms", "match length")
    )


def _columns(feature: str, n: int, a: int, m: int, k: int) -> dict[str, float]:
    """What equation 1 multiplies with its coefficients at draft position k (from 0), without those of a feature."""
    names = {"match length": "w", "full-match bonus": "l", "copy length": "kappa"}
    full = float(n >= 15)
    values = {"w": float(n - 5), "l": full, "kappa": full * math.log(max(min(m, 256), 15) / 15)}
    intercepts = ["beta"] if feature == "position intercepts" else [f"beta {place}" for place in range(15)]
    found = {name: float(name in ("beta", f"beta {k}")) for name in intercepts}
    if feature != "agreement":
        found["delta"] = float(a)
    for name, value in values.items():
        if name == names.get(feature):
            continue
        if feature == "first-token terms":
            found[f"{name}_first"] = value  # one coefficient, which both names hold
        else:
            found |= {f"{name}_first": value * (k == 0), f"{name}_rest": value * (k > 0)}
    return found
