"""The parts of a report page as HTML: numbers, tables, sections and the style. Every text is escaped here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hspark.lab.study import Cell, Plot, Study, Table

# What a cell without a value shows.
NOTHING = "–"
# Tables with more rows may break across printed pages.
LONG_TABLE = 24
_NUMBER_LIKE = re.compile(r"^[-+−±<>≤≥~]?\d")

STYLE = """
:root { --ink: #1d232a; --soft: #5b6570; --line: #d9dee3; --accent: #0072b2; --paper: #f4f7fa; }
* { box-sizing: border-box; }
html { background: #eef1f4; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--ink);
  background: #fff; max-width: 62rem; margin: 0 auto; padding: 2.5rem clamp(1rem, 5vw, 4rem) 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 1rem; letter-spacing: -0.01em; }
h2 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 .3rem; }
section { border-top: 2px solid var(--ink); margin-top: 3.5rem; padding-top: 1.2rem; }
p { margin: .5rem 0; }
a { color: var(--accent); }
.source, .note, footer, .key { color: var(--soft); font-size: .9rem; }
.question { font-size: 1.1rem; }
.finding { background: var(--paper); border-left: 4px solid var(--accent); padding: .7rem 1rem; margin: 1rem 0; }
.finding p:first-child { margin-top: 0; } .finding p:last-child { margin-bottom: 0; }
.warning { background: #fff6e5; border-left: 4px solid #e69f00; padding: .6rem 1rem; }
nav ol { columns: 2; column-gap: 2.5rem; padding-left: 1.4rem; margin: .4rem 0; }
nav li { break-inside: avoid; margin: .15rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; font-size: .93rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.8rem 0; }
figure svg, figure img { display: block; width: 100%; max-width: 46rem; height: auto; margin: .3rem auto; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
.label { color: var(--soft); font-weight: 400; margin-right: .35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.35; font-variant-numeric: tabular-nums;
  border-top: 1.5px solid var(--ink); border-bottom: 1.5px solid var(--ink); min-width: 50%; }
th, td { padding: .3rem .8rem; text-align: left; vertical-align: baseline; }
th { font-weight: 600; vertical-align: bottom; border-bottom: 1px solid var(--ink); }
tbody tr:nth-child(even) { background: #f7f9fb; }
.n { text-align: right; } td.n { white-space: nowrap; }
.published { color: #6a4a00; font-style: italic; }
pre { background: var(--paper); border: 1px solid var(--line); border-radius: 4px; padding: .6rem .9rem;
  font: .84rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: .4rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
@page { margin: 16mm 14mm; }
@media print {
  html, body { background: #fff; } body { font-size: 10pt; max-width: none; padding: 0; }
  section { margin-top: 2rem; } h1 { font-size: 20pt; } h2 { font-size: 14pt; }
  h2, .source, .question, figcaption, thead { break-after: avoid; }
  figure { margin: 1rem 0; } figure svg, figure img { max-width: 128mm; }
  figure, .finding, pre, tr { break-inside: avoid; } figure.long { break-inside: auto; }
  thead { display: table-header-group; } .scroll { overflow: visible; }
  details { display: none; } a { color: inherit; text-decoration: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".strip()


def page(title: str, body: str) -> str:
    """A whole document."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}\n<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n'
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def about_list(about: Mapping[str, Any]) -> str:
    """What the report is of: the model, the machine, the date, as a list of names and values."""
    if not about:
        return ""
    items = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(_in_words(value))}</dd>" for name, value in about.items())
    return f"<dl>{items}</dl>"


def contents(studies: Sequence[Study]) -> str:
    """Links to the studies."""
    items = "".join(f'<li><a href="#{escape(s.name)}">{escape(s.title)}</a></li>' for s in studies)
    return f'<nav aria-label="Contents"><ol>{items}</ol></nav>'


def study_section(study: Study, figures: Sequence[str], tables: Sequence[str]) -> str:
    """One study: heading, source, question, finding, figures, tables, the command that made it, its numbers."""
    parts = [f'<section id="{escape(study.name)}">', f"<h2>{escape(study.title)}</h2>"]
    if study.source:
        parts.append(f'<p class="source">{escape(study.source)}</p>')
    parts.append(f'<p class="question">{escape(study.question)}</p>')
    if study.finding.strip():
        paragraphs = [f"<p>{escape(text.strip())}</p>" for text in re.split(r"\n\s*\n", study.finding) if text.strip()]
        parts.append(f'<div class="finding">{"".join(paragraphs)}</div>')
    parts += [*figures, *tables]
    took = f" in {format_number(study.seconds)} s" if study.seconds else ""
    if study.command:
        parts.append(f'<p class="source">Made{took} by</p><pre>{escape(study.command)}</pre>')
    if study.data:
        text = json.dumps(study.to_dict()["data"], indent=1, ensure_ascii=False)
        parts.append(f"<details><summary>Further numbers (JSON)</summary><pre>{escape(text)}</pre></details>")
    return "\n".join([*parts, "</section>"])


def figure(plot: Plot, number: int, drawing: str) -> str:
    """A drawn plot with its number, title and note."""
    note = f'<p class="note">{escape(plot.note)}</p>' if plot.note else ""
    caption = f'<figcaption><span class="label">Figure {number}</span>{escape(plot.title)}</figcaption>'
    named = escape(f"{plot.title}: {plot.y_label} against {plot.x_label}")
    return f'<figure>{caption}<div role="img" aria-label="{named}">{drawing}</div>{note}</figure>'


def table_figure(table: Table, number: int) -> str:
    """A table with its number, title and note; columns of numbers to the right, the paper's in another hand."""
    columns = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    texts = [format_column(column) for column in columns]
    kinds = []
    for index, (name, column) in enumerate(zip(table.columns, columns, strict=True)):
        words = ["n"] if _is_numeric(column, texts_too=index > 0) else []
        words += ["published"] if _is_published(name) else []
        kinds.append(f' class="{" ".join(words)}"' if words else "")
    head = "".join(f'<th scope="col"{kind}>{escape(c)}</th>' for kind, c in zip(kinds, table.columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>\n"
        for row in zip(*texts, strict=True)
    )
    long = ' class="long"' if len(table.rows) > LONG_TABLE else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    caption = f'<figcaption><span class="label">Table {number}</span>{escape(table.title)}</figcaption>'
    grid = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    return f'<figure{long}>{caption}<div class="scroll">{grid}</div>{note}</figure>'


def format_column(cells: Sequence[Cell]) -> list[str]:
    """The cells of a column as text; its floats with as many decimals as the finest of them needs, up to four."""
    floats = [cell for cell in cells if isinstance(cell, float) and math.isfinite(cell)]
    decimals = min(4, max((_decimals(value) for value in floats), default=0))
    return [format_number(cell, decimals) if isinstance(cell, float) else format_cell(cell) for cell in cells]


def format_cell(cell: Cell) -> str:
    """One cell as text."""
    if cell is None:
        return NOTHING
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return format_number(cell) if isinstance(cell, float) else str(cell)


def format_number(value: float, decimals: int | None = None) -> str:
    """A number for reading: `decimals` places, or four significant digits; tiny and huge ones as 1.2e-05."""
    if not math.isfinite(value):
        return NOTHING
    size = abs(value)
    if size and (size < 5e-4 or size >= 1e9):
        return f"{value:.3g}".replace("-", "−", 1) if value < 0 else f"{value:.3g}"
    text = f"{value:,.{_decimals(value) if decimals is None else decimals}f}"
    return text.replace("-", "−")


def _decimals(value: float) -> int:
    """The places of `value` at four significant digits, without trailing zeros."""
    size = abs(value)
    if size >= 1000 or size == 0 or size < 5e-4:
        return 0
    text = f"{value:.4g}"
    return len(text.partition(".")[2]) if "e" not in text else 4


def _is_numeric(column: Sequence[Cell], texts_too: bool) -> bool:
    """Whether the column holds values: numbers, or texts that begin like one, such as "1.02 [0.99, 1.05]".

    texts_too is for columns after the first, whose texts are names even if they begin with a digit, as "5-10%" does.
    """
    cells = [cell for cell in column if cell is not None]
    return bool(cells) and all(not isinstance(cell, str) or (texts_too and _NUMBER_LIKE.match(cell)) for cell in cells)


def _is_published(heading: str) -> bool:
    """Whether a column holds the paper's own values, as "AL, paper" does, and "ours over the paper's" does not."""
    compared = re.search(r"\b(ours?|over|than|against|difference|ratio|minus|per)\b|/", heading, re.IGNORECASE)
    return not compared and bool(re.search(r"\b(paper|published)\b", heading, re.IGNORECASE))


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_in_words(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value))
    return format_cell(value) if value is None or isinstance(value, int | float) else str(value)
