"""Command-line options that several commands share, and what they are called in Python."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

import torch

from hspark.policy import AcceptanceEstimator

DEFAULT_MODEL = "smollm2-135m"
# Threads are made as they are asked for, and a process that cannot make them ends without a message.
MAX_THREADS = max(64, 8 * (os.cpu_count() or 1))
_COMPILE: dict[str, str | bool] = {"auto": "auto", "on": True, "off": False, "step": "step"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line and exit with 2, and whose epilog keeps its lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hspark: error: {message} (`{self.prog} --help` lists the options)\n")


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --device, --threads."""
    add = parser.add_argument_group("target").add_argument
    add(
        "--model",
        metavar="NAME",
        default=DEFAULT_MODEL,
        help=f"short name, hub id, directory or .gguf file (default: {DEFAULT_MODEL})",
    )
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16 or float64 (default: auto)")
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--threads", type=int, metavar="N", help="CPU threads of torch (default: torch's own choice)")


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """How drafts are made, priced and verified, apart from policy and budget."""
    add = parser.add_argument_group("speculation").add_argument
    add(
        "--drafter",
        metavar="NAME",
        default="auto",
        help="model drafter: auto, none, a directory or hub id (default: auto)",
    )
    add("--drafting", default="greedy", help="greedy or probabilistic model drafts (default: greedy)")
    add("--verify", default="coupled", help="coupled or rejection (default: coupled)")
    add(
        "--estimator",
        metavar="NAME",
        default="auto",
        help=f"auto, a file that `hspark fit` saved, or a preset: {', '.join(AcceptanceEstimator.preset_names())} "
        "(default: auto)",
    )
    add(
        "--cost",
        metavar="PATH",
        default="auto",
        help="auto (measured at start-up), or a saved cost file (default: auto)",
    )
    add(
        "--budget-delay",
        type=int,
        default=None,
        metavar="STEPS",
        help="steps from survivals to the step they size (default: 0 on a CPU, 2 elsewhere)",
    )
    add(
        "--compile",
        choices=list(_COMPILE),
        default="auto",
        help="on: torch.compile the target's layers on a CPU, the whole step elsewhere; step: the whole step "
        "(default: auto, which compiles nothing)",
    )
    add("--allow-lossy", action="store_true", help="run combinations that change the output distribution, for study")


def drafting_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_drafting_options` as keyword arguments of HybridSpeculator.from_pretrained."""
    return {
        "drafter": parse_drafter(options.drafter),
        "drafting": options.drafting,
        "verify": options.verify,
        "estimator": options.estimator,
        "cost": options.cost,
        "budget_delay": options.budget_delay,
        "compile": _COMPILE[options.compile],
        "allow_lossy": options.allow_lossy,
    }


def none_or(text: str) -> str | None:
    return None if text == "none" else text


def parse_drafter(text: str) -> str | None:
    """The drafter that --drafter names, None for "none"; ValueError for a name that nothing can be behind."""
    from hspark.drafters.checkpoint_files import HUB_ID
    from hspark.models import KNOWN_MODELS

    known = text in ("auto", "none") or text in KNOWN_MODELS
    if not known and not Path(text).expanduser().exists() and not HUB_ID.fullmatch(text):
        raise ValueError(
            f"drafter={text!r} does not exist; use auto, none, a directory, a .gguf file, a hub id (owner/name) or one "
            f"of {', '.join(KNOWN_MODELS)}"
        )
    return none_or(text)


def parse_budget(text: str) -> str | int:
    """A number where it is one; anything else is left to EngineConfig, whose error names what it accepts."""
    try:
        return int(text)
    except ValueError:
        return text


def set_threads(threads: int | None) -> None:
    """The number of CPU threads of torch; None leaves its own choice. ValueError outside 1 .. MAX_THREADS."""
    if threads is None:
        return
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads={threads} is out of range; use an integer from 1 to {MAX_THREADS}")
    torch.set_num_threads(threads)


def check_output_file(name: str, path: str | None) -> None:
    """ValueError for a file that could not be written; for use before any work.

    Folders on the way are made where they are missing; a file that is there is left as it is.
    """
    if not path:
        return
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = not place.exists()
        place.open("a").close()
        if fresh:
            place.unlink()
    except OSError as error:
        raise ValueError(
            f"{name}={path!r} cannot be written ({error.strerror}); use the name of a file in a writable directory"
        ) from error


def check_output_directory(name: str, path: str | None) -> None:
    """ValueError for a directory that could not be made or written in; for use before any work. Makes nothing."""
    if not path:
        return
    place = Path(path).absolute()
    there = next(each for each in (place, *place.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is no directory" if not there.is_dir() else "is not writable"
        raise ValueError(f"{name}={path!r} cannot be used, as {str(there)!r} {what}; use a directory that can be made")
