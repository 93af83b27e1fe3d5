"""What a study lacks is named, and so are options that are out of range."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hspark.lab.studies import LeftOutError, StudyOptions, run_study
from tests.lab.made_studies import lab, words
from tests.lab.made_table import made_table


def test_what_is_missing_is_named() -> None:
    table, alone = made_table(), made_table(6, model=False)
    with pytest.raises(ValueError, match="study='speed' is unknown; use one of acceptance"):
        run_study("speed", table)
    with pytest.raises(ValueError, match="give them when the Lab is made"):
        run_study("ladder", lab(), seeds=2)
    for name in ("policies", "ablations", "edit_distance"):
        with pytest.raises(LeftOutError, match="needs a model drafter's chains"):
            run_study(name, alone)
    with pytest.raises(LeftOutError, match="give the workload file"):
        run_study("edit_distance", table)
    with pytest.raises(LeftOutError, match="no output answers an edit"):
        run_study("edit_distance", table, programs={"other": "x"}, decode=words)
    with pytest.raises(LeftOutError, match="--overhead"):
        run_study("never_choose", table)
    with pytest.raises(LeftOutError, match="holds one prompt"):
        run_study("estimator", table.select([0]))
    with pytest.raises(LeftOutError, match="no output with a token"):
        run_study("acceptance", table.select([]))


def test_published_fits_are_for_the_papers_match_limits() -> None:
    table = made_table()
    other = dataclasses.replace(table, info={**table.info, "ngram": {**table.info["ngram"], "min_match": 3}})
    with pytest.raises(LeftOutError, match="other match limits"):
        run_study("transfer", other)
    assert len(run_study("estimator", other, resamples=10).tables[0].rows) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": ()}, r"batch_sizes=\(\)"),
        ({"batch_sizes": (4, 2)}, r"batch_sizes=\(4, 2\)"),
        ({"batch_sizes": (0, 2)}, "batch_sizes=0 is not usable"),
        ({"row_steps": 0}, "row_steps=0"),
        ({"seeds": 0}, "seeds=0"),
        ({"resamples": -1}, "resamples=-1"),
        ({"budget_delay": -1}, "budget_delay=-1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudyOptions(**options)
