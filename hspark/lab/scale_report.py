"""What `hspark bench scale` measures and finds, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

SECONDS, BYTES = "seconds", "bytes"


@dataclass(frozen=True)
class ScaleSizes:
    """The sizes that are measured. step_batch, step_context: what is fixed while another size varies. slots: draft
    slots per row. budget_rows: rows of 15 survivals each. memory_rows, memory_lengths: of the table of bytes."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    slots: tuple[int, ...] = (0, 1, 3, 7, 11, 15)
    scan_contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    scan_rows: tuple[int, ...] = (1, 4, 16, 64)
    budget_rows: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    memory_rows: tuple[int, ...] = (1, 4, 16, 64)
    memory_lengths: tuple[int, ...] = (512, 2048, 8192)
    step_batch: int = 4
    step_context: int = 512
    step_slots: int = 7
    repeats: int = 7


FULL = ScaleSizes()
QUICK = ScaleSizes(
    batches=(1, 4, 16),
    contexts=(256, 1024, 2048),
    slots=(0, 3, 7, 15),
    scan_contexts=(256, 1024, 4096),
    scan_rows=(1, 16),
    budget_rows=(4, 64, 1024, 4096),
    repeats=3,
)


@dataclass(frozen=True)
class Series:
    """One curve: values in seconds or bytes at sizes `x`. left_out: sizes that were not measured, and why. shift: added
    to a size where it counts as a factor of the work: k draft slots are k + 1 tokens."""

    name: str
    x: list[int]
    values: list[float]
    left_out: dict[int, str] = field(default_factory=dict)
    shift: int = 0

    @property
    def exponents(self) -> list[float | None]:
        """Growth between each size and the one before; None for the first."""
        points = [(x + self.shift, value) for x, value in zip(self.x, self.values, strict=True)]
        return [None] * bool(points) + [growth(a, b) for a, b in pairwise(points)]


@dataclass(frozen=True)
class Section:
    """Curves over one variable. unit: "seconds" or "bytes". why: what makes the curves bend."""

    title: str
    variable: str
    unit: str
    why: str
    series: list[Series]


@dataclass(frozen=True)
class ScaleReport:
    header: dict[str, Any]
    sections: list[Section]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form, exponents included."""
        record = asdict(self)
        for section, made in zip(record["sections"], self.sections, strict=True):
            for series, source in zip(section["series"], made.series, strict=True):
                series["exponents"] = source.exponents
        return record


def growth(first: tuple[float, float], second: tuple[float, float]) -> float | None:
    """e of value ~ size^e through two (size, value); None where a logarithm has no meaning."""
    (x, a), (y, b) = first, second
    if min(x, y, a, b) <= 0 or x == y:
        return None
    return math.log(b / a) / math.log(y / x)
