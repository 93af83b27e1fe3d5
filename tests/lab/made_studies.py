"""The studies of a small made-up table, each made once."""

from __future__ import annotations

import functools
from typing import Any

from hspark.lab.studies import Lab, StudyOptions, run_study
from hspark.lab.study import Study
from hspark.policy import LinearCost
from tests.lab.made_table import made_table

COST = LinearCost({2: 1.0, 6: 1.1}, {2: 0.02, 6: 0.06})
SETTINGS: dict[str, Any] = {
    "cost": COST,
    "batch_sizes": (2, 6),
    "row_steps": 300,
    "seeds": 3,
    "resamples": 40,
    "overhead": {"never_choose": {"value": 0.97, "low": 0.96, "high": 0.98}},
}


def words(ids: Any) -> str:
    return " ".join(map(str, ids))


@functools.cache
def lab() -> Lab:
    table = made_table()
    programs = {name: words(out.prompt_token_ids) for name, out in zip(table.task_ids, table.recorded(), strict=True)}
    sampled = made_table(8, seed=3, temperature=1.0)
    return Lab(table, StudyOptions(**SETTINGS, programs=programs, decode=words, sampled=sampled))


@functools.cache
def made(name: str) -> Study:
    return run_study(name, lab(), command=f"hspark lab study {name}")


def rows(study: Study, table: int = 0) -> list[dict[str, Any]]:
    """A table's rows by heading; of headings that occur twice, the first."""
    columns = study.tables[table].columns
    return [dict(reversed(list(zip(columns, row, strict=True)))) for row in study.tables[table].rows]
