"""`hspark train`: a target's outputs, its hidden states over them, a drafter trained on both, a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from hspark.lab.outputs import RecordedOutput, read_outputs
from hspark.lab.workloads import load_workload
from hspark.models import LoadedTarget, load_target
from hspark.options import Parser, add_target_options, set_threads
from hspark.train.data import FeatureStore, group_of
from hspark.train.export import calibrate, draft_limits, export_drafter, measure
from hspark.train.generate import generate_outputs
from hspark.train.invent import invent_prompts
from hspark.train.prompts import training_prompts
from hspark.train.recipe import add_recipe, train_config
from hspark.train.setup import bigram_markov, drafter_config, new_drafter, unused_token
from hspark.train.trainer import Trainer

_EXAMPLE = """
a ten-minute recipe, for a laptop:
  hspark train --folder run --prompts 64 --minutes 10
The default target answers 64 built-in prompts (a few minutes more), its hidden states are kept in the folder, a drafter
is trained for ten minutes and exported to run/drafter. What it is worth is printed as acceptance length (AL) on outputs
that were held out: 1 is nothing. To see it at work: hspark bench --drafter run/drafter

in earnest:
  hspark train --folder run --prompts 3000 --invent 3000 --early-slots 4 --early-steps 200 --hours 12 --fuse
  hspark train --folder run --outputs outputs.jsonl.gz --early-slots 4 --early-steps 200 --hours 12 --fuse
  hspark train --folder run                    # goes on where the run stopped, with the settings it was started with
  torchrun --nproc-per-node 2 -m hspark train --folder run --outputs outputs.jsonl.gz

Each line of an outputs file is a JSON object with task_id, temperature, output_token_ids, and prompt (one user message)
or prompt_token_ids. Outputs must be the target's own: a drafter learns what its target says.
"""
SETTINGS, INVENTED, ANSWERS = "settings.json", "invented.json", "outputs.jsonl"


def _parser() -> argparse.ArgumentParser:
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
    out("--draft-length", type=int, metavar="N", help="ask the drafter for N tokens of a block only (default: all)")
    out("--draft-vocabulary", type=int, metavar="N", help="draft the data's N most frequent tokens only (default: all)")
    out("--with-tables", action="store_true", help="store embedding and head too, for loaders that insist on them")
    out("--json", action="store_true", help="print the report as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit status. ValueErrors are the caller's mistakes."""
    options = _parser().parse_args(argv)
    set_threads(options.threads)
    folder = Path(options.folder)
    settings_file = folder / SETTINGS
    if settings_file.exists():
        options = _restored(options, json.loads(settings_file.read_text()))
    config = train_config(options)
    _check_limits(options)
    precision = _precision()
    accelerator = Accelerator(mixed_precision=precision, cpu=options.device == "cpu")
    dtype = options.dtype if precision == "bf16" else "float32"  # without autocast weights and tables must agree

    def load() -> LoadedTarget:
        return load_target(options.model, dtype, str(accelerator.device), progress=not options.json)

    with accelerator.main_process_first():
        if options.prompts or options.prompt_file or options.invent:
            _answer(options, folder, load)
        target = load()
        store = _prepare(options, folder, target)
        if not settings_file.exists():
            settings_file.write_text(json.dumps(vars(options), indent=2, sort_keys=True) + "\n")
    trainer = Trainer(_drafter(options, target, store), [store], folder, config, accelerator)
    del target
    resumed = trainer.resume()
    bar = tqdm(
        total=config.steps, initial=trainer.step, unit="step", disable=not accelerator.is_main_process, file=sys.stderr
    )

    def show(record: dict[str, Any]) -> None:
        bar.n = record["step"]
        bar.set_postfix(AL=record.get("held_out", {}).get("all"), anchors=record["anchors"])

    trainer.train(show)
    bar.close()
    if accelerator.is_main_process:
        _finish(options, folder, trainer, resumed)
    return 0


def _restored(options: argparse.Namespace, saved: dict[str, Any]) -> argparse.Namespace:
    """The settings that a run was started with; only when to stop and where to export may change."""
    free = {"steps", "minutes", "hours", "json", "threads", "fuse", "device"}
    free |= {"export", "with_tables", "draft_length", "draft_vocabulary"}
    given = vars(options)
    defaults = vars(_parser().parse_args(["--folder", options.folder]))
    changed = sorted(
        name for name in saved if name not in free | {"folder"} and given[name] not in (saved[name], defaults[name])
    )
    if changed:
        raise ValueError(
            f"{options.folder} holds a run with other settings of {', '.join(changed)}; leave these options out to "
            "continue it, or use another --folder"
        )
    kept = {name: value for name, value in saved.items() if name not in free | {"folder"}}
    return argparse.Namespace(**{**given, **kept})


def _check_limits(options: argparse.Namespace) -> None:
    for name, most in (("draft_length", options.block_size), ("draft_vocabulary", None)):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= (most or value):
            limit = f"from 1 to the block's {most}" if most else "of at least 1"
            raise ValueError(f"{name}={value!r}; use a number {limit}, or leave it out for all")


def _precision() -> str:
    return "bf16" if (torch.cuda.is_available() and torch.cuda.is_bf16_supported()) or _cpu_bf16() else "no"


def _cpu_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def _prepare(options: argparse.Namespace, folder: Path, target: LoadedTarget) -> FeatureStore:
    """The feature store of a run, filled."""
    features = folder / "features"
    if (features / "index.json").exists():
        store = FeatureStore(features)
    else:
        answers = folder / ANSWERS
        files = [*options.outputs, *([answers] if answers.exists() else [])]
        if not files:
            raise ValueError("there is nothing to train on; use --outputs, --prompt-file, --prompts or --invent")
        outputs = [output for file in files for output in read_outputs(file, lambda text: _encode(target, text))]
        groups = [group_of(output.task_id, _decode(target, output)) for output in outputs]
        config = drafter_config(target.model.config, mask_token_id=0, taps=options.taps)
        store = FeatureStore.create(features, outputs, groups, config.taps, config.hidden_size)
    with tqdm(total=store.offsets[-1], unit="tok", desc="hidden states", file=sys.stderr) as bar:
        store.fill(target.model, progress=lambda done, total: bar.update(done - bar.n))
    return store


def _answer(options: argparse.Namespace, folder: Path, load: Callable[[], LoadedTarget]) -> None:
    """Has the target answer the prompts asked for, unless the run already has its features.

    The engine takes a model over for good, so hidden states are computed by another copy of it.
    """
    if (folder / "features" / "index.json").exists():
        return
    target = load()
    prompts = training_prompts(options.prompts, options.seed) if options.prompts else []
    if options.prompt_file:
        prompts += [(sample.task_id, sample.messages[-1]["content"]) for sample in load_workload(options.prompt_file)]
    if options.invent:
        prompts += _invented(options, folder, target)
    with tqdm(total=len(prompts), unit="prompt", desc="answers", file=sys.stderr) as bar:
        generate_outputs(
            target,
            prompts,
            folder / ANSWERS,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            progress=lambda done, total: bar.update(done - bar.n),
        )


def _invented(options: argparse.Namespace, folder: Path, target: LoadedTarget) -> list[tuple[str, str]]:
    """Prompts made up by the target; kept in the folder, so that a run that was cut short goes on with the same."""
    path = folder / INVENTED
    if path.exists():
        return [(task_id, message) for task_id, message in json.loads(path.read_text(encoding="utf-8"))]
    with tqdm(total=options.invent, unit="prompt", desc="prompts", file=sys.stderr) as bar:
        found = invent_prompts(
            target, options.invent, seed=options.seed, progress=lambda done, total: bar.update(done - bar.n)
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")
    return found


def _encode(target: LoadedTarget, message: str) -> list[int]:
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer; give prompt_token_ids in the outputs file")
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def _decode(target: LoadedTarget, output: RecordedOutput) -> str:
    if target.tokenizer is None:
        return str(output.prompt_token_ids)
    return target.tokenizer.decode(list(output.prompt_token_ids))


def _drafter(options: argparse.Namespace, target: LoadedTarget, store: FeatureStore) -> Any:
    model: Any = target.model
    text = model.config.get_text_config()
    config = drafter_config(
        text,
        mask_token_id=unused_token(target.tokenizer, text.vocab_size),
        layers=options.layers,
        taps=store.taps_of,
        kv_heads=options.kv_heads,
        markov_rank=options.markov_rank,
        block_size=options.block_size,
    )
    drafter = new_drafter(config, model, samples=store.taps[:2000], seed=options.seed)
    if drafter.markov_head is not None:
        spans = zip(store.offsets[:-1], store.prompt_lengths, store.offsets[1:], strict=True)
        bigram_markov(drafter, torch.cat([store.tokens[start + prompt : end] for start, prompt, end in spans]).long())
    return drafter


def _finish(options: argparse.Namespace, folder: Path, trainer: Trainer, resumed: bool) -> None:
    """Calibrates, exports and reports the averaged drafter."""
    model = trainer.averaged_model()
    calibration, report = None, None
    if any(trainer.stores[s].temperatures[i] == 0 for s, i in trainer.held_items):
        with trainer.accelerator.autocast():
            calibration = calibrate(model, trainer.stores, trainer.held_items)
            report = measure(model, trainer.stores, trainer.held_items, calibration).to_dict()
    place = export_drafter(
        model, options.export or folder / "drafter", tables=options.with_tables, calibration=calibration
    )
    draft_limits(trainer.stores, options.draft_length, options.draft_vocabulary).save(place)
    summary = {
        "drafter": str(place),
        "anchors": trainer.anchors_seen,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "resumed": resumed,
        "held_out": report,
    }
    if options.json:
        print(json.dumps(summary))
        return
    print(
        f"drafter: {place} ({trainer.anchors_seen} anchors, {trainer.step} steps, {trainer.seconds / 60:.1f} minutes)"
    )
    if report is not None:
        lengths = ", ".join(f"{kind} {value:.2f}" for kind, value in report["acceptance_length"].items())
        print(f"acceptance length on held-out outputs: {lengths}; calibration error {report['ece']:.3f}")
