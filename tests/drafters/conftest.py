"""Every kind of DSpark network, one after the other."""

from __future__ import annotations

import pytest

from hspark.drafters.dspark_model import DSparkModel
from tests.drafters.dspark_models import CONFIGS, MODELS


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> DSparkModel:
    return MODELS[request.param]
