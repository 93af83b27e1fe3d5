"""The command line: `hspark demo | generate | bench | fit | lab | train`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import hspark

_EXAMPLE = """
examples:
  hspark demo
  hspark generate "Why is the sky blue?"
  hspark generate --edit program.py "Add type hints."
  hspark bench --limit 8
  hspark lab all edits.jsonl --out lab

`hspark COMMAND --help` lists a command's options.
"""

# Conventional exit statuses: mistakes of the caller, and programs ended by an interrupt.
USAGE, FAILURE, INTERRUPTED = 2, 1, 130

Command = Callable[[Sequence[str]], int]


def _demo(argv: Sequence[str]) -> int:
    from hspark.demo import main

    return main(argv)


def _generate(argv: Sequence[str]) -> int:
    from hspark.generate import main

    return main(argv)


def _bench(argv: Sequence[str]) -> int:
    from hspark.lab.bench_command import main

    return main(argv)


def _fit(argv: Sequence[str]) -> int:
    from hspark.lab.fit import main

    return main(argv)


def _lab(argv: Sequence[str]) -> int:
    from hspark.lab.lab_command import main

    return main(argv)


def _train(argv: Sequence[str]) -> int:
    from hspark.train import main

    return main(argv)


COMMANDS: dict[str, tuple[Command, str]] = {
    "demo": (_demo, "a real model edits real programs: watch the drafts, then see the speed-up"),
    "generate": (_generate, "decode one prompt, streaming"),
    "bench": (_bench, "measure policies against each other, and against transformers, on the same prompts"),
    "fit": (_fit, "fit the n-gram acceptance estimator to a target's recorded outputs"),
    "lab": (_lab, "record a target and its drafter once, then see every study of the paper on them"),
    "train": (_train, "train a model drafter for a target"),
}


def _parser() -> argparse.ArgumentParser:
    from hspark.options import Parser

    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {about}" for name, (_, about) in COMMANDS.items()]
    parser = Parser(
        prog="hspark",
        usage="hspark [--help] [--version] COMMAND ...",
        description="Hybrid speculative decoding in plain PyTorch.\n\ncommands:\n" + "\n".join(lines),
        epilog=_EXAMPLE,
    )
    parser.add_argument("--version", action="version", version=f"hspark {hspark.__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status. Mistakes are one line on standard error and status 2."""
    return run(_dispatch, sys.argv[1:] if argv is None else list(argv))


def _dispatch(argv: Sequence[str]) -> int:
    # torch is imported from here on, which takes seconds: an interrupt in them is one like any other.
    if not argv or argv[0].startswith("-"):
        parser = _parser()
        parser.parse_args(argv)
        parser.print_help()
        return 0
    if argv[0] not in COMMANDS:
        _parser().error(f"command={argv[0]!r} is unknown; use one of {', '.join(COMMANDS)}")
    return COMMANDS[argv[0]][0](argv[1:])


def run(command: Command, argv: Sequence[str]) -> int:
    """`command(argv)`, with what may go wrong turned into a line and an exit status."""
    try:
        status = command(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (ValueError, OSError) as error:
        print(f"hspark: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nhspark: interrupted", file=sys.stderr)
        return INTERRUPTED
