"""One page for all studies: `write_report` makes a self-contained HTML file and the JSON behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hspark.lab.report_html import about_list, contents, figure, page, study_section, table_figure
from hspark.lab.report_plots import draw_plot, plots_available
from hspark.lab.study import Study, in_order, plain, to_json

# The key in a study's data of what it was made from: names and values, such as its table's target and outputs.
MADE_FROM = "made_from"
DEFAULT_TITLE = "Hybrid Spark on your own model: the studies"
_KEY = (
    "Dashed lines, hollow markers and hollow bars are the paper's published values, as are columns in italics; "
    "they were measured on other models and machines. Everything else was measured here."
)
_NO_PLOTS = "The plots are left out: they need matplotlib, which pip install hspark[lab] brings."


def write_report(
    studies: Sequence[Study],
    path: str | Path,
    title: str = DEFAULT_TITLE,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the page to `path` (.html) and the studies as JSON beside it (same name, .json); returns the page's path.

    studies: shown in the fixed order of `in_order`, whatever order they come in. about: further names and values for
    the head of the page. The head has what all studies were made from (`MADE_FROM` of their data); where they differ,
    each study says its own.

    The page loads nothing from anywhere: style and drawings are inside it. It is the same, byte for byte, for the same
    studies and the same matplotlib. Without matplotlib (the extra `lab`) it has everything but the plots and says so.
    ValueError for no studies, two of one name, and a path that is not .html.
    """
    path = Path(path)
    check_page("path", path)
    if not studies:
        raise ValueError("studies=[] is empty; run at least one study first")
    twice = [name for name, count in Counter(study.name for study in studies).items() if count > 1]
    if twice:
        raise ValueError(f"studies holds {twice[0]!r} twice; give each study once")
    ordered = in_order(studies)
    data = path.with_suffix(".json")
    shared, own = made_from(ordered)
    about = {**(about or {}), **shared}
    text = page(title, _body(ordered, title, about, own, data.name))
    record = {"title": title, "about": plain(about), "studies": [study.to_dict() for study in ordered]}
    path.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(to_json(record), encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    return path


def check_page(name: str, path: str | Path) -> None:
    """ValueError for a path that is not a page's."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{name}={str(path)!r} is not a page; use a name that ends in .html")


def made_from(studies: Sequence[Study]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all studies were made from, and what else each of them was. A study without `MADE_FROM` shares nothing."""
    facts = [dict(study.data.get(MADE_FROM) or {}) for study in studies]
    shared = {
        name: value for name, value in facts[0].items() if all(name in each and each[name] == value for each in facts)
    }
    return shared, [{name: value for name, value in each.items() if name not in shared} for each in facts]


def _body(
    studies: Sequence[Study], title: str, about: Mapping[str, Any], own: Sequence[Mapping[str, Any]], data: str
) -> str:
    has_plots = any(study.plots for study in studies)
    with_plots = plots_available()
    parts = [f"<header><h1>{escape(title)}</h1>", about_list(about), contents(studies)]
    if any(series.published for study in studies for plot in study.plots for series in plot.series):
        parts.append(f'<p class="key">{escape(_KEY)}</p>')
    if has_plots and not with_plots:
        parts.append(f'<p class="warning">{escape(_NO_PLOTS)}</p>')
    parts.append("</header>")
    figures = tables = 0
    for study, facts in zip(studies, own, strict=True):
        drawn, listed = [about_list(facts)] if facts else [], []
        for plot in study.plots if with_plots else []:
            figures += 1
            drawn.append(figure(plot, figures, draw_plot(plot, f"f{figures}")))
        for table in study.tables:
            tables += 1
            listed.append(table_figure(table, tables))
        parts.append(study_section(study, drawn, listed))
    link = f'<a href="{escape(data)}">{escape(data)}</a>'
    parts.append(f"<footer><p>All numbers of this page, unrounded: {link}.</p></footer>")
    return "\n".join(part for part in parts if part)
