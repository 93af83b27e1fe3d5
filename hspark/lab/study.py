"""What a study of the lab produces: tables, plots and numbers as plain data, with a JSON round trip.

A study knows nothing of how it is drawn; `hspark.lab.report` turns saved studies into a page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

Cell = str | int | float | None
PLOT_KINDS = ("line", "bar", "scatter")

# The order of a report: the studies in the order in which the paper tells them; any other follows by name.
STUDY_ORDER = (
    "acceptance",
    "estimator",
    "ladder",
    "transfer",
    "edit_distance",
    "policies",
    "ablations",
    "never_choose",
    "staleness",
    "context_length",
    "simulator",
    "against_engine",
)


@dataclass
class Table:
    """A table to print.

    title: what it shows.
    columns: the headings, with units, e.g. "tokens per step" or "time (ms)".
    rows: one list per row, as long as `columns`; None prints as a dash.
    note: one sentence below the table; "" for none.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError(f"table {self.title!r} has no columns; give at least one heading")
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}, row {number} has {len(row)} cells; it needs one for each of the "
                    f"{len(self.columns)} columns"
                )


@dataclass
class Series:
    """One curve, one set of bars or one cloud of points.

    name: its entry in the legend.
    x: positions [N], numbers or category names (a plot's series share one or the other).
    y: values [N]; NaN or infinity leaves a gap.
    low, high: the ends of an interval around each y [N], e.g. a 95% confidence interval; None for none.
    published: the values are the paper's; they are drawn dashed or hollow.
    """

    name: str
    x: list[float | str]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    published: bool = False

    def __post_init__(self) -> None:
        for part in ("y", "low", "high"):
            values = getattr(self, part)
            if values is not None and len(values) != len(self.x):
                raise ValueError(f"series {self.name!r}: {part} has {len(values)} values for {len(self.x)} of x")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series {self.name!r} has only one of low and high; give both or neither")


@dataclass
class Plot:
    """A figure.

    title: what it shows; x_label, y_label: the axes, with units.
    kind: "line", "bar" (grouped by x) or "scatter".
    log_x, log_y: logarithmic axes.
    note: one sentence below the figure; "" for none.
    """

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    kind: str = "line"
    log_x: bool = False
    log_y: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in PLOT_KINDS:
            raise ValueError(f"plot {self.title!r}: kind={self.kind!r} is unknown; use one of {', '.join(PLOT_KINDS)}")
        if not self.series:
            raise ValueError(f"plot {self.title!r} has no series; give at least one")
        named = {isinstance(x, str) for series in self.series for x in series.x}
        if len(named) > 1:
            raise ValueError(f"plot {self.title!r} mixes numbers and names on its x axis; use one or the other")
        if named == {True} and self.log_x:
            raise ValueError(f"plot {self.title!r}: log_x needs numbers on the x axis, not names")


@dataclass
class Study:
    """One study of the lab: a question, what was found, and the tables, figures and numbers that show it.

    name: short and unique, e.g. "ladder"; the name of its file, so letters, digits, "_" and "-" only.
    title: the heading.
    source: where the paper has it, e.g. "Figures 2 and 4 of the paper"; "" if it has not.
    question: one sentence.
    finding: the answer in plain words; may be "".
    command: the command line that makes it again.
    tables, plots: in the order in which they are shown.
    data: further numbers, JSON values only.
    seconds: time that it took.
    """

    name: str
    title: str
    source: str
    question: str
    finding: str = ""
    command: str = ""
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("_", "").replace("-", "").isalnum() or not self.name.isascii():
            raise ValueError(f"study name {self.name!r} cannot name a file; use letters, digits, '_' and '-'")

    def to_dict(self) -> dict[str, Any]:
        """JSON values only: numpy and torch scalars become numbers; a number that is not finite becomes None."""
        return plain(asdict(self))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Study:
        """The study that `to_dict` wrote; a missing or unknown field is named in a ValueError."""
        record = _checked(cls, record, "study")
        tables = [Table(**_checked(Table, table, "table")) for table in record.get("tables", [])]
        plots = [_plot(plot) for plot in record.get("plots", [])]
        return cls(**{**record, "tables": tables, "plots": plots})


def save_study(study: Study, directory: str | Path) -> Path:
    """Writes `study` to `directory`/NAME.json (made if it is missing; an older one is replaced); returns the path."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{study.name}.json"
    path.write_text(to_json(study.to_dict()), encoding="utf-8")
    return path


def load_studies(directory: str | Path) -> list[Study]:
    """The studies saved in `directory`, in the order of `STUDY_ORDER`, any other after them by name.

    JSON files without a "question" are not studies and are left out. ValueError if the directory is missing or holds
    no study, and names a file that cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"study directory {str(directory)!r} does not exist; run a study first")
    studies = []
    for path in sorted(directory.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict) and "question" in record:
                studies.append(Study.from_dict(record))
        except ValueError as error:
            raise ValueError(f"{path} is not a saved study: {error}") from error
    if not studies:
        raise ValueError(f"study directory {str(directory)!r} holds no study; run one first")
    return in_order(studies)


def in_order(studies: Sequence[Study]) -> list[Study]:
    """The studies sorted as in a report."""
    rank = {name: place for place, name in enumerate(STUDY_ORDER)}
    return sorted(studies, key=lambda study: (rank.get(study.name, len(rank)), study.name))


def to_json(value: Any) -> str:
    """`value` as JSON text, indented, with lists of plain values on one line each."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    # A raw line break is never inside a JSON string, so only the layout changes.
    return re.sub(r"\[\n *([^\[\]{}]*?)\n *\]", lambda match: "[" + re.sub(r"\n *", " ", match[1]) + "]", text) + "\n"


def plain(value: Any) -> Any:
    """`value` as JSON values: tuples and arrays become lists, array scalars numbers, NaN and infinity None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    raise ValueError(f"a study holds {value!r} of type {type(value).__name__}, which JSON cannot hold")


def _plot(record: Mapping[str, Any]) -> Plot:
    record = _checked(Plot, record, "plot")
    return Plot(**{**record, "series": [_series(series) for series in record["series"]]})


def _series(record: Mapping[str, Any]) -> Series:
    """A saved None is a number that was not finite, so that a gap stays a gap."""
    record = _checked(Series, record, "series")
    for part in ("y", "low", "high"):
        if record.get(part) is not None:
            record[part] = [math.nan if value is None else value for value in record[part]]
    return Series(**record)


def _checked(kind: type, record: Any, what: str) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise ValueError(f"a {what} is saved as an object, not as {type(record).__name__}")
    known = {part.name for part in fields(kind)}
    for name in record:
        if name not in known:
            raise ValueError(f"a {what} has no field {name!r}; its fields are {', '.join(sorted(known))}")
    needed = {"study": ("name", "title", "source", "question"), "table": ("title", "columns", "rows")}
    for name in {**needed, "plot": ("title", "x_label", "y_label", "series"), "series": ("name", "x", "y")}[what]:
        if name not in record:
            raise ValueError(f"a {what} needs the field {name!r}")
    return dict(record)
