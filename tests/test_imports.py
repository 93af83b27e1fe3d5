"""The folders for authors of other engines stand alone; the package's own names are all there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hspark


@pytest.mark.parametrize("module", ["hspark.policy", "hspark.verify", "hspark.core", "hspark.sampling"])
def test_import_needs_nothing_but_torch(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([m for m in ('transformers', 'accelerate', 'hspark.engine', 'hspark.target') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_public_names() -> None:
    for name in hspark.__all__:
        assert getattr(hspark, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Speculator'"):
        hspark.Speculator  # noqa: B018


def test_drafters_and_policies_are_found_where_documented() -> None:
    from hspark.drafters import DSparkDrafter, NgramDrafter
    from hspark.policy import AcceptanceEstimator, LinearCost, StepCostTable, allocate, choose_budget, policy
    from hspark.verify import check, exact_distribution, verifier

    for public in (AcceptanceEstimator, LinearCost, StepCostTable, DSparkDrafter, NgramDrafter):
        assert isinstance(public, type)
    assert all(callable(public) for public in (allocate, choose_budget, policy, check, exact_distribution, verifier))
