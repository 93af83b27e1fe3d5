"""The report of `hspark bench scale` as tables and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hspark.lab.bench_text import table
from hspark.lab.scale_report import SECONDS, ScaleReport, Section

FORMATS = (".svg", ".png", ".pdf")


def render_scale(report: ScaleReport) -> str:
    header = report.header
    machine = header["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{header['model']}, {header['dtype']}, on {machine['device']}; {versions}",
        f"machine   {machine['processor']}, {machine['system']}; cores: {machine['cores']}, threads: "
        f"{machine['threads']}; load average {machine['load_average']} -> {machine['load_average_after']}",
        f"drafts    model drafter: {Path(header['drafter']).name if header['drafter'] else 'none'}",
        f"points    medians of {header['repeats']} runs after one warm-up, on made-up tokens",
    ]
    return "\n\n".join(["\n".join(lines), *(_section(section) for section in report.sections)])


def amount(value: float, unit: str) -> str:
    """A value with three significant digits."""
    return f"{value * 1e3:.3g} ms" if unit == SECONDS else f"{value / 1e6:.4g} MB"


def _section(section: Section) -> str:
    sizes = sorted({x for series in section.series for x in (*series.x, *series.left_out)})
    columns: list[Any] = [(section.variable, str)]
    for series in section.series:
        cells = {
            x: amount(value, section.unit) + ("" if exponent is None else f" x^{exponent:.2f}")
            for x, value, exponent in zip(series.x, series.values, series.exponents, strict=True)
        }
        columns.append((series.name, lambda x, cells=cells: cells.get(x, "-")))
    lines = [section.title, "", table(columns, sizes), "", f"  {section.why}"]
    for series in section.series:
        lines += [f"  left out: {series.name} at {x}: {why}" for x, why in series.left_out.items()]
    return "\n".join(lines)


def check_plot(path: str | None) -> None:
    """ValueError, before any work, for a figure that could not be drawn."""
    if path is None:
        return
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"plot={path!r} has no known ending; use one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"plot={path!r} needs matplotlib; install it with `pip install 'hspark[lab]'`") from None


def plot(report: ScaleReport, path: str) -> None:
    """Draws every section as one panel, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(report.sections)
    figure, axes = pyplot.subplots(-(-count // 2), 2, figsize=(12, 4 * -(-count // 2)), squeeze=False)
    for axis, section in zip(axes.flat, report.sections, strict=False):
        scale = 1e3 if section.unit == SECONDS else 1e-6
        for series in section.series:
            axis.plot(
                [x + series.shift for x in series.x], [v * scale for v in series.values], marker="o", label=series.name
            )
        shifted = section.series[0].shift  # a logarithm has no zero, and the growth is by the shifted size
        label = section.variable + (f" + {shifted}" if shifted else "")
        axis.set(xscale="log", yscale="log", title=section.title, xlabel=label)
        axis.set_ylabel("milliseconds" if section.unit == SECONDS else "MB")
        axis.legend(fontsize="small")
        axis.grid(visible=True, which="both", alpha=0.3)
    for axis in list(axes.flat)[count:]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
