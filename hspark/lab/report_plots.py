"""Draws a study's plots with matplotlib, as markup to put into a page: SVG with its text as text, or PNG."""

from __future__ import annotations

import base64
import importlib.util
import io
import itertools
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from hspark.lab.study import Plot, Series

# Okabe and Ito's palette, which colour-blind readers can tell apart; its yellow is too light for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8B5A2B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Above this many points a picture is smaller than its drawing commands.
MOST_SVG_POINTS = 3000
# Up to so many bars carry their values, unless they have intervals.
MOST_LABELLED_BARS = 16
SIZE = (7.0, 3.9)
# matplotlib measures text in the font that it ships; pages show it in a narrower one, so that nothing overlaps.
_SHOWN_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hspark",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#222222",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
}


def plots_available() -> bool:
    """Whether matplotlib, the optional extra `lab`, is installed."""
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except (ImportError, ValueError):
        return False


def draw_plot(plot: Plot, identifier: str) -> str:
    """The plot as an <svg> element, or as an <img> with the picture in it if it has many points.

    identifier: prefix of every id in the markup, unique within the page. The same plot always gives the same bytes
    (with the same matplotlib). ImportError without matplotlib.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    as_picture = sum(len(series.x) for series in plot.series) > MOST_SVG_POINTS
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE, layout="constrained")
        (FigureCanvasAgg if as_picture else FigureCanvasSVG)(figure)
        _draw(figure, plot)
        file = io.BytesIO()
        if as_picture:
            figure.savefig(file, format="png", dpi=130, metadata={"Software": None})
        else:
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    if as_picture:
        return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
    return _embedded(file.getvalue().decode("utf-8"), identifier)


def _draw(figure: Any, plot: Plot) -> None:
    axes = figure.add_subplot()
    names = _names(plot)
    styles = _styles(plot.series)
    if plot.log_x:
        axes.set_xscale("log", nonpositive="mask")
    if plot.log_y:
        axes.set_yscale("log", nonpositive="mask")
    if plot.kind == "bar":
        _draw_bars(axes, plot, names, styles)
    else:
        for series, (colour, marker) in zip(plot.series, styles, strict=True):
            _draw_series(axes, series, plot.kind, names, colour, marker)
    if names is not None:
        _name_ticks(axes, names)
    _set_ticks(axes, plot, numbers=names is None)
    if "speed" in plot.y_label.lower():
        _mark_one(axes)
    if "predicted" in plot.x_label.lower() and "observed" in plot.y_label.lower():
        axes.axline((0, 0), slope=1, color="#777777", linewidth=1.0, zorder=1)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(textwrap.fill(plot.y_label, 44))
    if len(plot.series) > 1 or plot.series[0].published:
        columns = _legend_columns([series.name for series in plot.series])
        figure.legend(loc="outside upper center", ncols=columns, handlelength=2.6, columnspacing=1.6)


def _draw_series(axes: Any, series: Series, kind: str, names: list[str] | None, colour: str, marker: str) -> None:
    x = [_place(value, names) for value in series.x]
    look: dict[str, Any] = {"color": colour, "marker": marker, "label": series.name, "zorder": 3}
    if series.published:
        look |= {"markerfacecolor": "white", "linestyle": "--", "linewidth": 1.5, "zorder": 2}
    if len(x) > 60:
        look["marker"] = "" if kind == "line" else "."
    if kind == "scatter":
        look |= {"linestyle": "none", "alpha": 0.75}
    axes.plot(x, series.y, **look)
    if series.low is None or series.high is None:
        return
    if kind == "line" and names is None:
        axes.fill_between(x, series.low, series.high, color=colour, alpha=0.14, linewidth=0)
    else:
        axes.vlines(x, series.low, series.high, color=colour, linewidth=1.1, zorder=2)


def _draw_bars(axes: Any, plot: Plot, names: list[str] | None, styles: Sequence[tuple[str, str]]) -> None:
    width = 0.8 / len(plot.series)
    bars = sum(len(series.x) for series in plot.series)
    labelled = bars <= MOST_LABELLED_BARS and all(series.low is None for series in plot.series)
    for number, (series, (colour, _)) in enumerate(zip(plot.series, styles, strict=True)):
        offset = (number - (len(plot.series) - 1) / 2) * width
        x = [_place(value, names) + offset for value in series.x]
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": colour, "linewidth": 0.8}
        if series.published:
            look = {"facecolor": "white", "edgecolor": colour, "linestyle": "--", "linewidth": 1.3}
        axes.bar(x, series.y, width * 0.92, label=series.name, zorder=2, **look)
        if series.low is not None and series.high is not None:
            axes.vlines(x, series.low, series.high, color="#222222", linewidth=1.1, zorder=3)
        for place, y in zip(x, series.y, strict=True) if labelled else ():
            if math.isfinite(y):
                axes.annotate(f"{y:.3g}", (place, y), (0, 2), textcoords="offset points", ha="center", fontsize=8)


def _names(plot: Plot) -> list[str] | None:
    """The categories of the x axis in order of appearance (bars at numbers: in order of size); None if it has none."""
    values = dict.fromkeys(x for series in plot.series for x in series.x)
    if plot.kind == "bar" and all(not isinstance(x, str) for x in values):
        return [_short(x) for x in sorted(float(x) for x in values)]
    if any(isinstance(x, str) for x in values):
        return [str(x) for x in values]
    return None


def _name_ticks(axes: Any, names: list[str]) -> None:
    """Names side by side if they fit, else on two lines, else tilted."""
    room = int(80 / len(names))
    folded = [textwrap.fill(name, max(6, room), break_long_words=False) for name in names]
    lines = [line for name in folded for line in name.split("\n")]
    fits = max(map(len, lines)) <= room and max(name.count("\n") for name in folded) < 2
    if fits:
        axes.set_xticks(range(len(names)), folded)
    else:
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.grid(axis="x", visible=False)


def _place(value: float | str, names: list[str] | None) -> float:
    if names is None:
        return float(value)
    return float(names.index(value if isinstance(value, str) else _short(value)))


def _styles(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Colour and marker of each: the paper's values take those of our series of the same name."""
    unused = itertools.cycle(zip(COLOURS, MARKERS, strict=True))
    given: dict[str, tuple[str, str]] = {}
    # Our own series first, so that colours do not depend on where the paper's stand.
    for one in sorted(series, key=lambda one: one.published):
        key = _subject(one.name)
        if key not in given:
            given[key] = next(unused)
    return [given[_subject(one.name)] for one in series]


def _subject(name: str) -> str:
    """A series' name without words for whose values they are: "DSpark (paper)" and "DSpark, ours" are both DSpark."""
    words = re.sub(r"\b(the|paper's|paper|ours|measured|published|here)\b", " ", name.lower())
    return " ".join(re.findall(r"[\w+×.-]+", words)) or name.lower()


def _set_ticks(axes: Any, plot: Plot, numbers: bool) -> None:
    from matplotlib import ticker

    plain = ticker.FuncFormatter(lambda value, _: _short(value))
    if plot.log_x:
        places = sorted(
            {float(x) for series in plot.series for x in series.x if not isinstance(x, str) and float(x) > 0}
        )
        if len(places) <= 12:
            axes.xaxis.set_major_locator(ticker.FixedLocator(places))
            axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(plain)
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    elif numbers:
        whole = all(not isinstance(x, str) and float(x).is_integer() for series in plot.series for x in series.x)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=10, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    if plot.log_y:
        heights = [y for series in plot.series for y in series.y if math.isfinite(y) and y > 0]
        narrow = bool(heights) and max(heights) < 100 * min(heights)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if narrow else (1,)))
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _mark_one(axes: Any) -> None:
    """A line at speed-up 1, if that is in sight."""
    low, high = axes.get_ylim()
    if low <= 1 <= high:
        axes.axhline(1, color="#777777", linewidth=1.0, zorder=1)


def _legend_columns(names: Sequence[str]) -> int:
    """As many columns as fit the width."""
    return max(1, min(len(names), int(92 / (max(len(name) for name in names) + 9))))


def _short(value: float | str) -> str:
    return f"{float(value):,.0f}" if abs(float(value)) >= 1000 else f"{float(value):g}"


def _embedded(svg: str, identifier: str) -> str:
    """The <svg> element alone: no prolog, no metadata, ids that are unique in the page, the page's font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    # A style sheet inside an inline drawing would hold for the whole page; these two properties are inherited.
    svg = re.sub(r"\s*<style.*?</style>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def keep(match: re.Match[str]) -> str:
        return f' id="{identifier}-{match[1]}"' if match[1] in used else ""

    svg = re.sub(r'\s+id="([^"]+)"', keep, svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{identifier}-", svg)
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", _SHOWN_FONT, svg)
    svg = re.sub(r">\s+<", "><", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height|version)="[^"]*"', "", head)
    return f'{head} style="stroke-linejoin: round; stroke-linecap: butt" aria-hidden="true">{rest.strip()}'
