"""The scripted pair as a simulation reads it."""

from __future__ import annotations

import pytest

from hspark.lab.simulate import Prepared
from tests.lab.scripted import scripted_free, scripted_table


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(scripted_table(tmp_path_factory.mktemp("table")), scripted_free().estimator)
