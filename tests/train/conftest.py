"""Accelerate keeps its settings for the whole process; every training test starts without any."""

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def no_earlier_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
