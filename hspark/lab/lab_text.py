"""Studies as text for a terminal."""

from __future__ import annotations

import textwrap

from hspark.lab.report_html import format_column
from hspark.lab.study import Study, Table

_WIDTH = 100


def render_study(study: Study, tables: bool = True) -> str:
    """Heading, finding, and (if asked for) the tables of a study."""
    heading = study.title if not study.source else f"{study.title} ({study.source})"
    parts = [heading, textwrap.fill(study.finding, _WIDTH)]
    if tables:
        parts += [render_table(table) for table in study.tables if table.rows]
    return "\n\n".join(part for part in parts if part)


def render_table(table: Table) -> str:
    """Columns side by side; a heading wider than its values takes several lines."""
    texts = [format_column([row[index] for row in table.rows]) for index in range(len(table.columns))]
    widths = [max(9, *map(len, column)) for column in texts]
    heads = [
        textwrap.wrap(name, width, break_long_words=False) for name, width in zip(table.columns, widths, strict=True)
    ]
    widths = [max(width, *map(len, head)) for width, head in zip(widths, heads, strict=True)]
    depth = max(map(len, heads))
    heads = [[""] * (depth - len(head)) + head for head in heads]
    lines = [*zip(*heads, strict=True), *zip(*texts, strict=True)]
    shown = ["  ".join(part.rjust(width) for part, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    shown.insert(depth, "-" * max(map(len, shown)))
    note = [textwrap.fill(table.note, _WIDTH)] if table.note else []
    return "\n".join([table.title, *shown, *note])
