"""How often each draft position is accepted, for both drafters and by kind of match (figures 2 and 4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hspark.lab.studies.lab import Lab
from hspark.lab.studies.statistics import Interval, interval
from hspark.lab.study import Plot, Series, Study, Table

Array = NDArray[Any]
_DRAFTERS = {"model": "model drafter", "free": "n-gram drafter, given a match"}
# Grades from which on a position is spoken of.
ENOUGH = 30
_EDGES = ("95% low", "95% high")


class Profile(NamedTuple):
    """By draft position, lists [W]: chains that have the position (with an output token there), graded, accepted;
    acceptance given that all before were accepted; survival, accepted over drafted (NaN where nothing is)."""

    drafted: list[int]
    graded: list[int]
    accepted: list[int]
    conditional: list[Interval]
    survival: list[float]


def profile(lab: Lab, source: str, chosen: Array | None = None) -> Profile:
    """The profile of one drafter's chains ("model" or "free") over all positions, or those chosen (bool [N])."""
    table = lab.table
    inside = np.ones(table.positions, dtype=bool) if chosen is None else chosen
    length, accepted = (getattr(table, f"{source}_{name}").astype(np.int64) for name in ("length", "accepted"))
    drafted, graded = np.minimum(length, table.remaining), table.graded(source)
    width = table.model_width if source == "model" else table.free_width
    columns: dict[str, list[Any]] = {name: [] for name in Profile._fields}
    for slot in range(width):
        given, right = inside & (graded > slot), inside & (accepted > slot)
        by_output = [np.bincount(table.output, weights=w, minlength=table.outputs) for w in (right, given)]
        count = int((inside & (drafted > slot)).sum())
        columns["drafted"].append(count)
        columns["graded"].append(int(given.sum()))
        columns["accepted"].append(int(right.sum()))
        columns["conditional"].append(interval(lab.bootstrap.ratio(*by_output)))
        columns["survival"].append(int(right.sum()) / count if count else float("nan"))
    return Profile(**columns)


def match_groups(lab: Lab) -> dict[str, Array]:
    """bool [N] each: kinds of match, by match length n and for full matches copy length m; the paper's groups."""
    table = lab.table
    least, full = (int(table.info["ngram"][name]) for name in ("min_match", "max_match"))
    matched, n, m = table.free_length > 0, table.match_length.astype(np.int64), table.copy_length
    return {
        f"n = {least}": matched & (n == least) & (n < full),
        f"n = {least + 1}-{full - 1}": matched & (n > least) & (n < full),
        f"n = {full}, m ≤ {2 * full}": matched & (n >= full) & (m <= 2 * full),
        f"n = {full}, m > {2 * full}": matched & (n >= full) & (m > 2 * full),
    }


def acceptance(lab: Lab) -> Study:
    sources = ("model", "free") if lab.has_model else ("free",)
    profiles = {_DRAFTERS[source]: profile(lab, source) for source in sources}
    groups = {name: profile(lab, "free", chosen) for name, chosen in match_groups(lab).items() if chosen.any()}
    counts = {name: int(chosen.sum()) for name, chosen in match_groups(lab).items()}
    plots = [
        _plot("Acceptance given that all earlier positions were accepted", profiles),
        Plot(
            "Survival: share of drafts accepted up to and including the position",
            "draft position",
            "survival",
            [Series(name, _places(each), list(each.survival)) for name, each in profiles.items()],
        ),
    ]
    if groups:
        named = {f"{name} ({counts[name]} positions)": each for name, each in groups.items()}
        plots.append(_plot("Acceptance of n-gram drafts by kind of match", named))
    return Study(
        name="acceptance",
        title="",
        source="",
        question="How often is a draft token accepted, by its position in the chain and by what was matched?",
        finding=_finding(lab, profiles, groups),
        tables=[_table("Both drafters", profiles), _table("n-gram drafts by kind of match", groups)],
        plots=plots,
        data={"matched_positions": int(lab.matched.sum()), "positions_by_match": counts},
    )


def _places(found: Profile) -> list[float | str]:
    return [float(place) for place in range(1, len(found.drafted) + 1)]


def _plot(title: str, profiles: dict[str, Profile]) -> Plot:
    series = []
    for name, found in profiles.items():
        value = [each.value for each in found.conditional]
        low = [np.nan if each.low is None else each.low for each in found.conditional]
        high = [np.nan if each.high is None else each.high for each in found.conditional]
        series.append(Series(name, _places(found), value, low, high))
    note = "All positions of the outputs count, not only those where a decoder would stop. Intervals: 95% over prompts."
    return Plot(title, "draft position", "acceptance, given all before", series, note=note)


def _table(title: str, profiles: dict[str, Profile]) -> Table:
    columns = ["chains", "position", "drafted", "graded", "acceptance", *_EDGES, "survival"]
    rows: list[list[Any]] = []
    for name, found in profiles.items():
        for slot, each in enumerate(found.conditional):
            counts = [found.drafted[slot], found.graded[slot]]
            rows.append([name, slot + 1, *counts, each.value, each.low, each.high, found.survival[slot]])
    return Table(title, columns, rows, "graded: drafts whose predecessors were all accepted, with a token to compare.")


def _finding(lab: Lab, profiles: dict[str, Profile], groups: dict[str, Profile]) -> str:
    free = profiles[_DRAFTERS["free"]]
    share = float(lab.matched.sum()) / lab.table.positions
    parts = [f"The n-gram drafter finds a match at {share:.1%} of {lab.table.positions} positions."]
    if free.graded[0]:
        parts.append(f"Given a match, {_ends(free)}")
    if lab.has_model and profiles[_DRAFTERS["model"]].graded[0]:
        parts.append(f"For the model drafter, {_ends(profiles[_DRAFTERS['model']])}")
    if len(groups) > 1:
        first = {name: each.conditional[0].value for name, each in groups.items() if each.graded[0]}
        if first:
            words = ", ".join(f"{value:.0%} for {name}" for name, value in first.items())
            parts.append(f"By kind of match the first token is accepted {words}.")
    return " ".join(parts)


def _ends(found: Profile) -> str:
    """The first and the last position that has grades enough, compared as far as their intervals carry it."""
    enough = min(ENOUGH, found.graded[0])
    last = max(slot for slot, count in enumerate(found.graded) if count >= enough)
    head, tail = found.conditional[0], found.conditional[last]
    words = (
        f"the first token is accepted {head.value:.0%} of the time and token {last + 1}, once reached, "
        f"{tail.value:.0%} ({found.graded[0]} and {found.graded[last]} graded): "
    )
    if head.low is None or head.high is None or tail.low is None or tail.high is None:
        return words + "too few prompts to tell them apart."
    if tail.low > head.high:
        return words + "the deep token is accepted more often."
    return words + ("the first is accepted more often." if tail.high < head.low else "their intervals overlap.")
