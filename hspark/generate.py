"""`hspark generate`: one prompt, streaming."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hspark.config import EngineConfig, SamplingParams
from hspark.core import RequestOutput
from hspark.lab.workloads import edit_messages
from hspark.options import (
    Parser,
    add_drafting_options,
    add_target_options,
    drafting_settings,
    none_or,
    parse_budget,
    set_threads,
)
from hspark.policy import policy_names
from hspark.prompts import Prompt
from hspark.speculator import HybridSpeculator
from hspark.terminal import Painter, legend, wants_colour

_EXAMPLE = """
examples:
  hspark generate "Why is the sky blue?"
  hspark generate --edit program.py "Rename the variable n to count."
  hspark generate --file prompt.txt --temperature 0.7 --seed 1 --stats
  git diff | hspark generate --system "Summarise this change." --json

On a terminal, tokens that a drafter proposed are coloured; NO_COLOR or --color never turns that off.
"""


# Fields of SamplingParams that are options of the same name.
_SAME = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "stop", "ignore_eos", "seed", "logprobs"),
)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hspark generate", description="Decode one prompt, streaming.", epilog=_EXAMPLE)
    _add_prompt_options(parser)
    _add_sampling_options(parser)
    add_target_options(parser)
    add_drafting_options(parser)
    add = parser.add_argument
    add(
        "--policy",
        metavar="NAME",
        default="proposed",
        help=f"which chain is verified: {', '.join(policy_names())} (default: proposed)",
    )
    add("--budget", default="adaptive", help="draft slots per step: adaptive, all or a number (default: adaptive)")
    add("--lookup", choices=["ngram", "none"], default="ngram", help="the model-free drafter (default: ngram)")
    add("--max-length", type=int, metavar="N", help="tokens of prompt and output (default: 2048, or the model's limit)")
    return parser


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; - or nothing reads standard input")
    add("--file", metavar="PATH", help="read the prompt from a file")
    add("--edit", metavar="PATH", help="ask for an edit of this program; the prompt is the instruction")
    add("--system", metavar="TEXT", help="a system message before the prompt")
    add("--raw", action="store_true", help="no chat template: the model continues the prompt as it stands")
    add("--json", action="store_true", help="print the whole result as JSON when it is complete")
    add("--stats", action="store_true", help="print speed and sources afterwards, on standard error")
    add("--color", choices=["auto", "always", "never"], default="auto", help="colour tokens by source (default: auto)")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-new-tokens", type=int, default=256, metavar="N", help="output tokens at most (default: 256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="0 is off (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default: 1)")
    add("--min-p", type=float, default=0.0, metavar="P", help="0 is off (default: 0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is off (default: 1)")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="0 is off (default: 0)")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="0 is off (default: 0)")
    add("--logit-bias", action="append", default=[], metavar="ID=X", help="add X to a token's logit; repeatable")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add("--stop-token-id", action="append", default=[], type=int, metavar="ID", help="end at this token; repeatable")
    add("--ignore-eos", action="store_true", help="do not end at end-of-sequence tokens")
    add("--seed", type=int, metavar="N", help="noise seed (default: a fresh one)")
    add("--logprobs", action="store_true", help="with --json: the target's log-probability of every token")
    add("--no-speculate", action="store_true", help="decode plainly")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The SamplingParams that the options ask for; ValueError names the one that is wrong."""
    bias = dict(_bias(text) for text in options.logit_bias)
    return SamplingParams(
        **{name: getattr(options, name) for name in _SAME},
        logit_bias=bias or None,
        stop_token_ids=options.stop_token_id,
        speculate=not options.no_speculate,
    )


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(token), float(value)
    except ValueError:
        raise ValueError(f"logit_bias={text!r} is not usable; use ID=X, a token id and a number") from None


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt's text, from the argument, a file or standard input."""
    if options.prompt is not None and options.file is not None:
        raise ValueError(f"prompt={options.prompt!r} and file={options.file!r} are both given; use one of them")
    if options.file is not None:
        text, origin = _read_text("file", options.file), f"file={options.file!r}"
    elif options.prompt not in (None, "-"):
        text, origin = options.prompt, "prompt"
    elif options.prompt is None and sys.stdin.isatty():
        raise ValueError("prompt is missing; give it as an argument, with --file, or on standard input")
    else:
        text, origin = sys.stdin.read(), "standard input"
    if not text.strip():
        raise ValueError(f"{origin} holds an empty prompt; use some text")
    return text


def _read_text(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{name}={path!r} cannot be read ({error.strerror}); use a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}={path!r} is not UTF-8 ({error.reason}, byte {error.start}); use such text") from error


def read_messages(options: argparse.Namespace) -> list[dict[str, str]]:
    """The chat messages that the options ask for; with --raw only the last one's text counts."""
    if options.raw and (options.system is not None or options.edit is not None):
        raise ValueError("raw uses no chat template, so it excludes system and edit; leave one of them out")
    text = read_prompt(options)
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    if options.edit is None:
        return [*messages, {"role": "user", "content": text}]
    program = _read_text("edit", options.edit)
    if not program.strip():
        raise ValueError(f"edit={options.edit!r} is an empty file; use a program")
    return messages + edit_messages(text, program)


def load_speculator(options: argparse.Namespace) -> HybridSpeculator:
    return HybridSpeculator.from_pretrained(
        options.model,
        lookup=none_or(options.lookup),
        policy=options.policy,
        budget=parse_budget(options.budget),
        dtype=options.dtype,
        device=options.device,
        max_batch_size=1,
        max_length=options.max_length,
        progress=sys.stderr.isatty(),
        **drafting_settings(options),
    )


def apply_template(messages: list[dict[str, str]], speculator: HybridSpeculator, options: argparse.Namespace) -> Prompt:
    """The prompt for the target: chat messages where it has a template (unless --raw), else the text itself."""
    if speculator.tokenizer is None:
        raise ValueError(f"model={options.model!r} has no tokenizer, so it cannot read text; use a model with one")
    if options.raw:
        return messages[-1]["content"]
    if getattr(speculator.tokenizer, "chat_template", None):
        return messages
    if options.system is not None:
        raise ValueError(
            f"system={options.system!r} needs a chat template, and {options.model!r} has none; leave it out"
        )
    return messages[-1]["content"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `hspark generate`; argv without the program's name. Returns the exit status; raises ValueError."""
    options = _parser().parse_args(argv)
    params = sampling_params(options)
    if options.logprobs and not options.json:
        raise ValueError("logprobs are part of the JSON result; add --json")
    length = {} if options.max_length is None else {"max_length": options.max_length}
    EngineConfig(budget=parse_budget(options.budget), **length)
    set_threads(options.threads)
    messages = read_messages(options)
    speculator = load_speculator(options)
    prompt = apply_template(messages, speculator, options)
    if options.json:
        output = speculator.generate([prompt], params, progress=sys.stderr.isatty())[0]
        print(json.dumps(output.to_dict()), flush=True)
        if options.stats:
            print(summary(output, speculator, colour=False), file=sys.stderr)
    else:
        output = show(speculator, prompt, params, options)
    if output.error is not None:
        print(f"hspark: error: {output.error}", file=sys.stderr)
    return int(output.error is not None)


def show(
    speculator: HybridSpeculator, prompt: Prompt, params: SamplingParams, options: argparse.Namespace
) -> RequestOutput:
    """Streams one output to standard output and returns it."""
    colour = wants_colour(sys.stdout, options.color)
    painter = Painter(sys.stdout, speculator.tokenizer, colour)
    output, last = None, "\n"
    for chunk in speculator.stream(prompt, params):
        painter.write(chunk.text, chunk.token_ids, chunk.sources)
        output, last = chunk.output, chunk.text[-1:] or last
    assert output is not None
    if last != "\n":
        print()
    if options.stats or (sys.stdout.isatty() and sys.stderr.isatty()):
        print(summary(output, speculator, colour), file=sys.stderr)
    return output


def summary(output: RequestOutput, speculator: HybridSpeculator, colour: bool) -> str:
    """A few lines on how the output came about."""
    metrics = output.metrics
    seconds = metrics.seconds - metrics.prefill_seconds
    speed = f"{metrics.tokens / seconds:.1f} tokens/s" if seconds > 0 else "-"
    counts: dict[str, Any] = {source: output.sources.count(source) for source in dict.fromkeys(output.sources)}
    by = ", ".join(f"{count} by {source}" for source, count in counts.items())
    lines = [
        f"{metrics.tokens} tokens in {metrics.steps} steps, {metrics.acceptance_length:.2f} per step; {speed} after "
        f"{metrics.prefill_seconds:.2f} s of prompt; {by}; ended by {output.finish_reason}",
    ]
    if speculator.engine.device_step.free_drafter is not None:
        lines.append(speculator.estimator_note)
    if output.lossy:
        lines.append("this combination of options changes the output distribution")
    if colour:
        lines.append(f"colours: {legend()}")
    return "\n".join(line for line in lines if line)
