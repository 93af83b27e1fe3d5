"""The studies of the lab: the paper's tables and figures, each by one function over a record table.

`run_study("ladder", table)` gives a `Study`; several studies of one table share a `Lab`, which remembers its fits and
simulations. No study runs a model.
"""

from hspark.lab.studies.lab import Lab, StudyOptions
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.studies.registry import STUDIES, Spec, run_study

__all__ = ["STUDIES", "Lab", "LeftOutError", "Spec", "StudyOptions", "run_study"]
