"""The settings of a run: the options of `hspark train`, their checks, and what a run that goes on keeps of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hspark.models import resolve_device
from hspark.options import Parser, add_target_options, check_output_directory
from hspark.policy.curves import whole
from hspark.train.data import MIN_SUPERVISED
from hspark.train.files import write_whole
from hspark.train.recipe import add_recipe, train_config

SETTINGS, INVENTED, ANSWERS, FEATURES, CHECKPOINT = (
    "settings.json",
    "invented.json",
    "outputs.jsonl",
    "features/index.json",
    "checkpoint.pt",
)
# Not settings of the run: where it is, and how it reports.
_UNSAVED = {"folder", "json"}
# What prompts, answers and hidden states depend on: fixed once the folder holds any of them.
_DATA = {"model", "dtype", "outputs", "prompt_file", "prompts", "invent", "max_new_tokens", "taps", "seed"}
# When to stop, on what to compute and what to export: never fixed. Everything else is, once there is a checkpoint.
_FREE = {"steps", "minutes", "hours", "cooldown", "threads", "device", "fuse"}
_FREE |= {"export", "with_tables", "draft_length", "draft_vocabulary"}

_EXAMPLE = """
a ten-minute recipe, for a laptop:
  hspark train --folder run --prompts 64 --minutes 10
The default target answers 64 built-in prompts (a few minutes more), its hidden states are kept in the folder, a drafter
is trained for ten minutes and exported to run/drafter. What it is worth is printed as acceptance length (AL) on outputs
that were held out: 1 is nothing. To see it at work: hspark bench --drafter run/drafter

in earnest:
  hspark train --folder run --prompts 3000 --invent 3000 --early-slots 4 --early-steps 200 --hours 12 --fuse
  hspark train --folder run --outputs outputs.jsonl.gz --early-slots 4 --early-steps 200 --hours 12 --fuse
  hspark train --folder run                    # goes on where the run stopped, with the settings it had
  hspark train --folder run --hours 14         # the same, but for longer (hours of training in all)
  torchrun --nproc-per-node 2 -m hspark train --folder run --outputs outputs.jsonl.gz

Each line of an outputs file is a JSON object with task_id, temperature, output_token_ids, and prompt (one user message)
or prompt_token_ids. Outputs must be the target's own: a drafter learns what its target says.
"""


def make_parser() -> argparse.ArgumentParser:
    """The options of `hspark train`."""
    parser = Parser(prog="hspark train", description="Train a model drafter for a target.", epilog=_EXAMPLE)
    add_target_options(parser)
    data = parser.add_argument_group("data").add_argument
    data("--folder", required=True, metavar="DIR", help="where the run lives: features, log, checkpoint, drafter")
    data("--outputs", action="append", default=[], metavar="FILE", help="recorded outputs of the target; repeatable")
    data("--prompt-file", metavar="FILE", help="a workload file whose prompts the target answers first")
    data("--prompts", type=int, default=0, metavar="N", help="answer N built-in prompts first")
    data("--invent", type=int, default=0, metavar="N", help="answer N prompts that the target makes up itself, too")
    data("--max-new-tokens", type=int, default=320, metavar="N", help="length of those answers (default: 320)")
    shape = parser.add_argument_group("drafter").add_argument
    shape("--layers", type=int, default=2, metavar="N", help="draft layers (default: 2)")
    shape("--taps", type=int, default=4, metavar="N", help="target layers that it reads (default: 4)")
    shape("--kv-heads", type=int, metavar="N", help="key/value heads (default: as many as query heads)")
    shape("--markov-rank", type=int, default=32, metavar="R", help="rank of the Markov head (default: 32)")
    shape("--block-size", type=int, default=7, metavar="B", help="tokens of a draft (default: 7)")
    add_recipe(parser)
    out = parser.add_argument_group("output").add_argument
    out("--export", metavar="DIR", help="where the drafter goes (default: DIR/drafter of the run's folder)")
    limit: dict[str, Any] = {"type": _limit, "default": "all", "metavar": "N"}
    out("--draft-length", **limit, help="ask the drafter for N tokens of a block only, or all (default: all)")
    out("--draft-vocabulary", **limit, help="draft the data's N most frequent tokens only, or all (default: all)")
    out(
        "--with-tables",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="store embedding and head too, for loaders that insist on them",
    )
    out("--json", action="store_true", help="print the report as JSON")
    return parser


def _limit(text: str) -> int | str:
    return text if text == "all" else int(text)


def read_settings(argv: Sequence[str]) -> argparse.Namespace:
    """The checked settings of a run: what `argv` gives, else what its folder's settings.json holds, else the defaults.

    ValueError, before anything is written, for a value out of range, for nothing to train on, and for an option that
    differs from the one that the folder's contents were made with.
    """
    parser = make_parser()
    complete = vars(parser.parse_args(argv))
    # Options that find an attribute of theirs in the namespace leave it alone unless they are given.
    parsed = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(complete))))
    given = {name: value for name, value in parsed.items() if value is not None}
    folder = Path(complete["folder"])
    saved = {name: value for name, value in _saved(folder).items() if name in complete.keys() - _UNSAVED}
    _refuse_changes(folder, given, saved)
    if given.keys() & {"minutes", "hours"}:  # two units of one setting
        saved = {name: value for name, value in saved.items() if name not in ("minutes", "hours")}
    options = argparse.Namespace(**{**complete, **saved, **given})
    _check(options)
    _check_sources(options, folder)
    return options


def save_settings(options: argparse.Namespace) -> None:
    """Keeps them in the run's folder, for `read_settings`."""
    kept = {name: value for name, value in vars(options).items() if name not in _UNSAVED}
    write_whole(Path(options.folder) / SETTINGS, json.dumps(kept, indent=2, sort_keys=True) + "\n")


def _saved(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"holds {type(values).__name__}")
    except ValueError as error:
        raise ValueError(f"{path}: not the settings of a run ({error}); use another --folder") from None
    return {name: value for name, value in values.items() if value is not None}


def _refuse_changes(folder: Path, given: dict[str, Any], saved: dict[str, Any]) -> None:
    """ValueError for options that contradict what the folder holds."""
    fixed: set[str] = set()
    if (folder / CHECKPOINT).exists():
        fixed = saved.keys() - _FREE
    elif any((folder / name).exists() for name in (INVENTED, ANSWERS, FEATURES)):
        fixed = _DATA
    changed = sorted(name for name in given.keys() & saved.keys() & fixed if given[name] != saved[name])
    if changed:
        values = ", ".join(f"{name}={given[name]!r} instead of {saved[name]!r}" for name in changed)
        raise ValueError(
            f"{folder} holds a run with other settings: {values}; leave these options out to continue it, or use "
            "another --folder"
        )


def _check(options: argparse.Namespace) -> None:
    for name in ("layers", "taps", "block_size"):
        whole(name, getattr(options, name), 1)
    for name in ("markov_rank", "prompts", "invent"):
        whole(name, getattr(options, name), 0)
    if options.kv_heads is not None:
        whole("kv_heads", options.kv_heads, 1)
    whole("max_new_tokens", options.max_new_tokens, MIN_SUPERVISED)  # shorter outputs are not trained on
    train_config(options)
    for name, most in (("draft_length", options.block_size), ("draft_vocabulary", None)):
        value = getattr(options, name)
        if value != "all" and (type(value) is not int or not 1 <= value <= (most or value)):
            limit = f"from 1 to the block's {most}" if most else "of at least 1"
            raise ValueError(f'{name}={value!r}; use a number {limit}, or "all"')
    check_output_directory("export", options.export)
    if resolve_device(options.device).index is not None:
        raise ValueError(
            f"device={options.device!r}; leave the number out: accelerate gives each process a device of its own, and "
            "CUDA_VISIBLE_DEVICES limits them"
        )


def _check_sources(options: argparse.Namespace, folder: Path) -> None:
    """ValueError if there is nothing to train on, or a file of it is missing; the features once made are enough."""
    if (folder / FEATURES).exists():
        return
    named = [("outputs", file) for file in options.outputs]
    named += [("prompt_file", options.prompt_file)] if options.prompt_file else []
    for name, file in named:
        if not Path(file).is_file():
            raise ValueError(f"{name}={file!r} is not a file; use one that exists")
    if not named and not options.prompts and not options.invent and not (folder / ANSWERS).exists():
        raise ValueError("there is nothing to train on; use --outputs, --prompt-file, --prompts or --invent")
