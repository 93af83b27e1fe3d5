"""A recipe is checked when it is made, by name, value and what would do."""

import re
from typing import Any

import pytest

from hspark.train.config import TrainConfig

NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "steps": [0, 2.5, "9", True, None],
    "sequences": [0],
    "micro_batch": [True],
    "anchors": [0, 1.5],
    "warmup": [-1, 1.5],
    "cooldown": [-1],
    "vocabulary": [-5, 10.0],
    "common": [-1, 7000],
    "seed": [None, -1, 2**32],
    "lr": [0.0, -1.0, NAN, INF, "x", 10**400],
    "matrix_lr": [NAN],
    "clip": [0.0, -1.0, NAN],
    "seconds": [-1.0, INF],
    "log_every": [-1],
    "save_every": [NAN],
    "ema": [1.0, True, NAN],
    "held_out": [1.0, "x"],
    "prompts": [1],
    "compiled": ["yes"],
    "optimizer": ["sgd"],
    "schedule": ["linear"],
    "weights": [(1.0, 0.0)],
    "block_schedule": [((0, -3),), ((5, 0),), ((-1, 3),), ((0, 2.0),), ((0, 2, 1),), (3,), 3, ((4, 2), (4, 3))],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))}.*; use ") as refusal:
        TrainConfig(**{name: value})
    assert len(str(refusal.value).splitlines()) == 1


def test_every_setting_is_checked():
    assert set(BAD) == set(TrainConfig.__dataclass_fields__)


def test_what_just_fits():
    TrainConfig(warmup=0, vocabulary=0, common=9999, ema=0, held_out=0, lr=1, block_schedule=((0, 1), (1, 7)))
