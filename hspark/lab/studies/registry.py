"""Which studies there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hspark.lab.studies.ablations import ablations
from hspark.lab.studies.acceptance import acceptance
from hspark.lab.studies.against_engine import against_engine
from hspark.lab.studies.context_length import context_length
from hspark.lab.studies.edit_distance import edit_distance
from hspark.lab.studies.estimator import estimator
from hspark.lab.studies.lab import Lab, StudyOptions
from hspark.lab.studies.ladder import ladder, transfer
from hspark.lab.studies.never_choose import never_choose
from hspark.lab.studies.policies import policies
from hspark.lab.studies.simulator import simulator
from hspark.lab.studies.staleness import staleness
from hspark.lab.study import STUDY_ORDER, Study
from hspark.lab.table import RecordTable


@dataclass(frozen=True)
class Spec:
    """A study: its function, heading, place in the paper, and what it is about in a line.

    The function leaves heading, source, command and time to `run_study`.
    """

    function: Callable[[Lab], Study]
    title: str
    source: str
    about: str


_SPECS: dict[str, Spec] = {
    "acceptance": Spec(acceptance, "Acceptance by position", "Figures 2 and 4", "both drafters, and by match group"),
    "estimator": Spec(estimator, "Calibration of both drafters", "Section 4.2, table 5", "reliability, ECE, log-loss"),
    "ladder": Spec(
        ladder, "The estimator, term by term", "Tables 6 and 7", "log-loss, ECE and throughput of six rungs"
    ),
    "transfer": Spec(transfer, "Coefficients of other models", "Section 5.5", "throughput with published coefficients"),
    "edit_distance": Spec(
        edit_distance, "Speed-up against edit distance", "Figures 1 and 5, table 11", "four ways of drafting, by bucket"
    ),
    "policies": Spec(policies, "Policies", "Tables 1, 13 and 14", "seven policies at three batch sizes"),
    "ablations": Spec(ablations, "What each part is worth", "Figure 6", "rules and features taken out one at a time"),
    "never_choose": Spec(
        never_choose, "The price of running a drafter", "Section 5.6", "a drafter that is never chosen"
    ),
    "staleness": Spec(staleness, "Stale budgets", "Table 16, appendix O", "miscounts, shortfalls, goodput lost"),
    "context_length": Spec(context_length, "Context length", "Figure 9", "acceptance length and speed-up by context"),
    "simulator": Spec(simulator, "Speed of the simulator", "", "steps per second by batch size and length"),
    "against_engine": Spec(
        against_engine, "The simulator against the engine", "", "a benchmark replayed and held against it"
    ),
}
STUDIES: dict[str, Spec] = {name: _SPECS[name] for name in STUDY_ORDER}


def run_study(name: str, table: RecordTable | Lab, command: str = "", **options: Any) -> Study:
    """One study of a table, by name; options: fields of `StudyOptions`. command: the line that makes it again.

    A `Lab` in place of the table shares its fits and simulations between studies, and takes no options.
    ValueError for an unknown name; LeftOutError (a ValueError) where the study needs what is not there.
    """
    if name not in STUDIES:
        raise ValueError(f"study={name!r} is unknown; use one of {', '.join(STUDIES)}")
    if isinstance(table, Lab) and options:
        raise ValueError(f"options {sorted(options)} with a Lab; give them when the Lab is made")
    lab = table if isinstance(table, Lab) else Lab(table, StudyOptions(**options))
    spec = STUDIES[name]
    begun = time.perf_counter()
    study = spec.function(lab)
    seconds = round(time.perf_counter() - begun, 2)
    source = f"The paper: {spec.source}" if spec.source else ""
    data = lab.counts | study.data
    return replace(study, title=spec.title, source=source, command=command, seconds=seconds, data=data)
