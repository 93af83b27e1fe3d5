"""A benchmark's settings are checked before anything is loaded."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hspark.lab.bench_settings import BenchSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ()}, "arms is empty"),
        ({"arms": ("ngram_only", "ngram_only")}, "names one twice"),
        ({"batch_sizes": ()}, "batch_sizes=.* is empty"),
        ({"batch_sizes": (0,)}, "batch_sizes holds 0"),
        ({"repeats": 0}, "repeats holds 0"),
        ({"group_size": -1}, "group_size holds -1"),
        ({"arms": ("transformers",), "batch_sizes": (4,)}, "arm='transformers' runs at batch size 1 only"),
        ({"arms": ("model_only",)}, "arm='model_only' needs a model drafter"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is out of range"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"verify": "hope"}, "verify='hope' is not a verifier; use one of"),
        ({"drafting": "wild"}, "drafting='wild' is unknown"),
        ({"estimator": "none-such"}, "estimator='none-such' is neither a file nor a preset"),
        ({"cost": "/no/such/file"}, "cost file '/no/such/file' cannot be read"),
        ({"budget_delay": -1}, "budget_delay=-1"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchSettings(**changes)


def test_vanilla_is_always_measured() -> None:
    assert BenchSettings(arms=("ngram_only",)).arms == ("vanilla", "ngram_only")
    assert BenchSettings(arms=("ngram_only", "vanilla")).arms == ("ngram_only", "vanilla")
