"""`hspark lab`: record a pair once, then see the paper's studies of it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hspark.lab.lab_options import (
    add_record_options,
    add_study_options,
    check_file,
    make_lab,
    record_settings,
    study_options,
    study_words,
)
from hspark.lab.lab_record import record_file
from hspark.lab.lab_text import render_study
from hspark.lab.report import DEFAULT_TITLE, MADE_FROM, check_page, write_report
from hspark.lab.studies import STUDIES, LeftOutError, StudyOptions, run_study
from hspark.lab.study import Study, load_studies, save_study
from hspark.lab.table import RecordTable
from hspark.options import Parser, check_output_directory, check_output_file, set_threads

# Where earlier versions kept what is now in each study's MADE_FROM.
_ABOUT = "about.json"
_EXAMPLE = """
examples:
  hspark lab all edits.jsonl --out lab
  hspark lab record edits.jsonl --out table
  hspark lab study ladder --table table
  hspark lab study all --table table --workload edits.jsonl --out studies
  hspark lab report --studies studies --out report.html

`hspark lab COMMAND --help` lists a command's options.
"""
_COMMANDS_TEXT = """commands:
  record  answer a workload once and record what both drafters propose at every position
  study   one study of a recorded table, or all of them; no model is run
  report  one page of saved studies
  all     record, all studies, and the report"""
_STUDIES_TEXT = "studies:\n" + "\n".join(f"  {name:16}{spec.title}: {spec.about}" for name, spec in STUDIES.items())


def main(argv: Sequence[str]) -> int:
    """Entry of `hspark lab`; argv without the program's name. Returns the exit status; raises ValueError."""
    if argv and argv[0] in SUBCOMMANDS:
        return SUBCOMMANDS[argv[0]](argv[1:])
    parser = Parser(
        prog="hspark lab",
        usage="hspark lab [--help] COMMAND ...",
        description=f"The paper's studies of your own target and drafter.\n\n{_COMMANDS_TEXT}",
        epilog=_EXAMPLE,
    )
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv)
        parser.print_help()
        return 0
    parser.error(f"command={argv[0]!r} is unknown; use one of {', '.join(SUBCOMMANDS)}")


# -- record --------------------------------------------------------------------------------------------------------


def _record(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="hspark lab record",
        description="Answer a workload once and record both drafters' chains at every position of the answers. A run "
        "that was cut short goes on where it was.",
        epilog="\nexample:\n  hspark lab record edits.jsonl --target smollm2-135m --out table --max-new-tokens 256\n",
    )
    parser.add_argument("file", metavar="FILE", help="JSON-lines workload, or recorded outputs; plain or .gz")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the table")
    add_record_options(parser)
    parser.add_argument("--json", action="store_true", help="print what was recorded as JSON")
    options = parser.parse_args(argv)
    set_threads(options.threads)
    check_file("file", options.file)
    settings = record_settings(options)
    check_output_directory("out", options.out)
    table = record_file(options.file, options.out, settings, _note)
    print(json.dumps(_counts(table) | {"table": options.out}) if options.json else _recorded(table, options.out))
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _counts(table: RecordTable) -> dict[str, Any]:
    return {"outputs": table.outputs, "positions": table.positions, "info": table.info}


def _recorded(table: RecordTable, directory: str) -> str:
    matched = int((table.free_length > 0).sum())
    lines = [
        f"recorded {table.outputs} outputs, {table.positions} positions, into {directory}",
        f"n-gram drafter: a match at {matched} positions, {table.free_accepted.mean():.2f} drafts right at a position",
    ]
    if table.model_width:
        lines.append(
            f"model drafter: {table.model_accepted.mean():.2f} of {table.model_width} drafts right at a position"
        )
    return "\n".join(lines)


# -- study ---------------------------------------------------------------------------------------------------------


def _study(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="hspark lab study",
        description=f"One study of a recorded table, or all of them.\n\n{_STUDIES_TEXT}",
        epilog="\nexamples:\n  hspark lab study ladder --table table\n"
        "  hspark lab study all --table table --workload edits.jsonl --out studies\n",
    )
    parser.add_argument("name", metavar="NAME", help="a study, or all")
    parser.add_argument("--table", required=True, metavar="DIR", help="table written by `hspark lab record`")
    parser.add_argument("--workload", metavar="FILE", help="what was recorded, for its programs (edit_distance)")
    parser.add_argument("--out", metavar="DIR", help="save the studies here, for `hspark lab report`")
    add_study_options(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="print the studies as JSON")
    options = parser.parse_args(argv)
    set_threads(options.threads)
    if options.name != "all" and options.name not in STUDIES:
        raise ValueError(f"study={options.name!r} is unknown; use all, or one of {', '.join(STUDIES)}")
    given = study_options(options)
    check_output_directory("out", options.out)
    table = RecordTable.load(options.table)
    studies, left_out = run_studies(table, given, options, options.out)
    if options.json:
        print(json.dumps({"studies": [study.to_dict() for study in studies], "left_out": left_out}))
        return 0
    for study in studies:
        print(render_study(study, tables=options.name != "all"), end="\n\n")
    _print_left_out(left_out)
    if options.out:
        print(f"saved to {options.out}; `hspark lab report --studies {options.out}` makes a page of them")
    return 0


def run_studies(
    table: RecordTable, given: StudyOptions, options: argparse.Namespace, out: str | None
) -> tuple[list[Study], dict[str, str]]:
    """The studies that are asked for, saved as they are made, and why others are left out of "all".

    A study asked for by its own name that cannot be made raises its ValueError.
    """
    lab = make_lab(table, given, options.tokenizer)
    made_from = _made_from(table, options)
    studies, left_out = [], {}
    for name in STUDIES if options.name == "all" else [options.name]:
        command = shlex.join(["hspark", "lab", "study", name, "--table", options.table, *study_words(options)])
        try:
            study = run_study(name, lab, command)
        except LeftOutError as error:
            if options.name != "all":
                raise
            left_out[name] = str(error)
            continue
        studies.append(replace(study, data=study.data | {MADE_FROM: made_from}))
        if out:
            save_study(studies[-1], out)
    return studies, left_out


def _made_from(table: RecordTable, options: argparse.Namespace) -> dict[str, Any]:
    """What a study was made from: the table, the settings, and the versions. Paths stay out of it."""
    import torch

    from hspark.lab.machine import machine_facts

    facts = machine_facts(torch.device("cpu"))
    drafter = table.info.get("drafter")
    temperatures = sorted({float(t) for t in table.temperature if t == t})
    return {
        "target": Path(str(table.info.get("target") or "unknown")).name,
        "model drafter": "none" if not drafter else f"{drafter.get('name') or 'DSpark'} ({drafter['drafting']})",
        "dtype": table.info.get("dtype") or "not recorded",
        "outputs": table.outputs,
        "positions": table.positions,
        "temperature": ", ".join(f"{t:g}" for t in temperatures) or "not recorded",
        "simulations": f"batches of {options.batch_sizes}, {options.row_steps} steps, {options.orders} orders, "
        f"sizing delay {options.sizing_delay}, {options.resamples} bootstrap draws",
        "processor": facts["processor"],
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }


def _print_left_out(left_out: dict[str, str]) -> None:
    for name, reason in left_out.items():
        print(f"left out {name}: {reason}")


# -- report --------------------------------------------------------------------------------------------------------


def _report(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="hspark lab report",
        description="One self-contained page of saved studies, and the JSON behind it.",
        epilog="\nexample:\n  hspark lab report --studies studies --out report.html\n",
    )
    parser.add_argument("--studies", required=True, metavar="DIR", help="where `hspark lab study` saved them")
    parser.add_argument("--out", default="report.html", metavar="PATH", help="the page (default: report.html)")
    parser.add_argument("--title", default=DEFAULT_TITLE, help=f"heading (default: {DEFAULT_TITLE})")
    parser.add_argument("--json", action="store_true", help="print where it was written as JSON")
    options = parser.parse_args(argv)
    studies = load_studies(options.studies)
    check_page("out", options.out)
    check_output_file("out", options.out)
    page = write_report(studies, options.out, title=options.title, about=_former_head(options.studies, studies))
    record = {"page": str(page), "data": str(page.with_suffix(".json"))}
    print(json.dumps(record) if options.json else f"wrote {page} and {page.with_suffix('.json')}")
    return 0


def _former_head(directory: str, studies: Sequence[Study]) -> Mapping[str, Any]:
    """The head of a directory whose studies do not say what they were made from; nothing where any does."""
    about = Path(directory) / _ABOUT
    if not about.exists() or any(MADE_FROM in study.data for study in studies):
        return {}
    try:
        return json.loads(about.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{about} is not JSON ({error}); run a study again, or delete it") from error


# -- all -----------------------------------------------------------------------------------------------------------


def _all(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="hspark lab all",
        description="Record a workload, make all studies of it, and the report: table, studies and report.html in DIR.",
        epilog="\nexample:\n  hspark lab all edits.jsonl --target smollm2-135m --out lab\n",
    )
    parser.add_argument("file", metavar="FILE", help="JSON-lines workload, or recorded outputs; plain or .gz")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of everything that is made")
    add_record_options(parser)
    add_study_options(parser)
    parser.add_argument("--json", action="store_true", help="print what was made as JSON")
    options = parser.parse_args(argv)
    set_threads(options.threads)
    check_file("file", options.file)
    settings = record_settings(options)
    out = Path(options.out)
    options.name, options.table, options.workload = "all", str(out / "table"), options.file
    given = study_options(options)
    check_output_directory("out", options.out)
    table = record_file(options.file, options.table, settings, _note)
    studies, left_out = run_studies(table, given, options, str(out / "studies"))
    page = write_report(load_studies(out / "studies"), out / "report.html")
    if options.json:
        print(
            json.dumps(_counts(table) | {"studies": [s.name for s in studies], "left_out": left_out, "page": str(page)})
        )
        return 0
    print(_recorded(table, options.table), end="\n\n")
    for study in studies:
        print(render_study(study, tables=False), end="\n\n")
    _print_left_out(left_out)
    print(f"wrote {page}")
    return 0


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "record": _record,
    "study": _study,
    "report": _report,
    "all": _all,
}
