"""`hspark bench scale`: how the parts of a step grow, from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from tqdm import tqdm

from hspark.drafters.known import known_drafter
from hspark.drafters.opening import open_drafter
from hspark.lab.bench_command import add_report_options, show
from hspark.lab.machine import load_average, machine_facts
from hspark.lab.scale import Scale
from hspark.lab.scale_report import FULL, QUICK, ScaleReport
from hspark.lab.scale_text import check_plot, plot, render_scale
from hspark.models import load_target
from hspark.options import Parser, add_target_options, check_output_file, parse_drafter, set_threads

_EXAMPLE = """
examples:
  hspark bench scale --quick
  hspark bench scale --dtype bfloat16 --output scale.json --plot scale.svg

Sizes that the model has no positions for, or that would not fit into free memory, are left out, and named.
"""


def _parser() -> Parser:
    parser = Parser(
        prog="hspark bench scale",
        description="Measure how a step and its parts grow with batch, context and drafts.",
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer sizes and repeats: about a minute")
    add(
        "--repeats", type=int, metavar="N", help=f"runs of each point (default: {FULL.repeats}, quick: {QUICK.repeats})"
    )
    add("--plot", metavar="FILE", help="also draw the curves: .svg, .png or .pdf (needs matplotlib)")
    add("--drafter", metavar="NAME", default="auto", help="model drafter: auto, none, a directory or hub id")
    add_report_options(parser)
    add_target_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Entry of `hspark bench scale`. Returns the exit status; raises ValueError."""
    options = _parser().parse_args(argv)
    set_threads(options.threads)
    check_output_file("output", options.output)
    check_plot(options.plot)
    check_output_file("plot", options.plot)
    sizes = QUICK if options.quick else FULL
    if options.repeats is not None:
        if options.repeats < 1:
            raise ValueError(f"repeats={options.repeats} is out of range; use an integer of at least 1")
        sizes = replace(sizes, repeats=options.repeats)
    name = known_drafter(options.model) if options.drafter == "auto" else parse_drafter(options.drafter)
    drafter = None if name is None else open_drafter(name, options.dtype, options.device)
    target = load_target(options.model, options.dtype, options.device)
    header: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(target.device),
        "model": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafter": name,
        "repeats": sizes.repeats,
        "sizes": asdict(sizes),
    }
    with tqdm(unit="point", disable=None, leave=False) as bar:

        def progress(point: str) -> None:
            bar.set_description(point, refresh=False)
            bar.update()

        sections = Scale(target.model, drafter, sizes, progress=progress).sections()
    header["machine"]["load_average_after"] = load_average()
    report = ScaleReport(header, sections)
    show(report.to_dict(), render_scale(report), options)
    if options.plot:
        plot(report, options.plot)
    return 0
