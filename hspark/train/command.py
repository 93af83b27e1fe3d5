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
from hspark.train.config import TrainConfig
from hspark.train.data import FeatureStore, group_of
from hspark.train.export import calibrate, export_drafter, measure
from hspark.train.generate import generate_outputs
from hspark.train.losses import LossWeights
from hspark.train.prompts import training_prompts
from hspark.train.setup import bigram_markov, drafter_config, new_drafter, unused_token
from hspark.train.trainer import Trainer

_EXAMPLE = """
a ten-minute recipe, for a laptop:
  hspark train --folder run --prompts 64 --minutes 10
The default target answers 64 built-in prompts (a few minutes more), its hidden states are kept in the folder, a drafter
is trained for ten minutes and exported to run/drafter. What it is worth is printed as acceptance length (AL) on outputs
that were held out: 1 is nothing. To see it at work: hspark bench --drafter run/drafter

in earnest:
  hspark train --folder run --outputs outputs.jsonl.gz --early-slots 4 --early-steps 200 --hours 12 --fuse
  hspark train --folder run                    # goes on where the run stopped, with the settings it was started with
  torchrun --nproc-per-node 2 -m hspark train --folder run --outputs outputs.jsonl.gz

Each line of an outputs file is a JSON object with task_id, temperature, output_token_ids, and prompt (one user message)
or prompt_token_ids. Outputs must be the target's own: a drafter learns what its target says.
"""
SETTINGS, ANSWERS = "settings.json", "outputs.jsonl"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hspark train", description="Train a model drafter for a target.", epilog=_EXAMPLE)
    add_target_options(parser)
    data = parser.add_argument_group("data").add_argument
    data("--folder", required=True, metavar="DIR", help="where the run lives: features, log, checkpoint, drafter")
    data("--outputs", action="append", default=[], metavar="FILE", help="recorded outputs of the target; repeatable")
    data("--prompt-file", metavar="FILE", help="a workload file whose prompts the target answers first")
    data("--prompts", type=int, default=0, metavar="N", help="answer N built-in prompts first")
    data("--max-new-tokens", type=int, default=320, metavar="N", help="length of those answers (default: 320)")
    shape = parser.add_argument_group("drafter").add_argument
    shape("--layers", type=int, default=2, metavar="N", help="draft layers (default: 2)")
    shape("--taps", type=int, default=4, metavar="N", help="target layers that it reads (default: 4)")
    shape("--kv-heads", type=int, metavar="N", help="key/value heads (default: as many as query heads)")
    shape("--markov-rank", type=int, default=32, metavar="R", help="rank of the Markov head (default: 32)")
    shape("--block-size", type=int, default=7, metavar="B", help="tokens of a draft (default: 7)")
    _add_recipe(parser)
    out = parser.add_argument_group("output").add_argument
    out("--export", metavar="DIR", help="where the drafter goes (default: DIR/drafter of the run's folder)")
    out("--with-tables", action="store_true", help="store embedding and head too, for loaders that insist on them")
    out("--json", action="store_true", help="print the report as JSON")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    default, weights = TrainConfig(), TrainConfig().weights
    add = parser.add_argument_group("recipe").add_argument
    add("--steps", type=int, default=default.steps, metavar="N", help=f"optimiser steps (default: {default.steps})")
    add("--minutes", type=float, default=0.0, metavar="M", help="stop training after so long (default: by steps alone)")
    add("--hours", type=float, default=0.0, metavar="H", help="the same in hours")
    add("--optimizer", default=default.optimizer, help=f"adamw or muon (default: {default.optimizer})")
    add("--lr", type=float, default=default.lr, help=f"learning rate of AdamW (default: {default.lr})")
    add("--matrix-lr", type=float, default=default.matrix_lr, help=f"of Muon (default: {default.matrix_lr})")
    add("--early-slots", type=int, default=0, metavar="N", help="start with blocks of N slots, which are cheaper ...")
    add("--early-steps", type=int, default=0, metavar="N", help="... for so many steps (default: 0)")
    add("--schedule", default=default.schedule, help="constant or cosine (default: constant)")
    add(
        "--cooldown", type=int, default=0, metavar="N", help="let the rate fall to 0 over the last N steps (default: 0)"
    )
    add("--on-prompts", action="store_true", help="also train on blocks inside the prompts")
    add("--warmup", type=int, default=default.warmup, metavar="N", help=f"steps (default: {default.warmup})")
    add("--sequences", type=int, default=default.sequences, metavar="N", help="per step and process (default: 8)")
    add("--micro-batch", type=int, default=default.micro_batch, metavar="N", help="sequences at once (default: 4)")
    add("--anchors", type=int, default=default.anchors, metavar="N", help="blocks per sequence (default: 128)")
    add("--vocabulary", type=int, default=default.vocabulary, metavar="N", help="tokens of the softmax, 0 for all")
    add("--common", type=int, default=default.common, metavar="N", help="of these, the most frequent (default: 4096)")
    for name in ("ce", "l1", "soft", "confidence"):
        value = getattr(weights, name)
        add(f"--{name}", type=float, default=value, metavar="W", help=f"weight of that loss term (default: {value})")
    add("--gamma", type=float, default=weights.gamma, help="decay of later slots, 0 for none (default: 4)")
    add("--ema", type=float, default=default.ema, help=f"decay of the averaged weights (default: {default.ema})")
    add("--seed", type=int, default=0, help="of data order, anchors and initial weights (default: 0)")
    add("--fuse", action="store_true", help="compile the loss with torch.compile; pays in long runs")


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit status. ValueErrors are the caller's mistakes."""
    options = _parser().parse_args(argv)
    set_threads(options.threads)
    folder = Path(options.folder)
    settings_file = folder / SETTINGS
    if settings_file.exists():
        options = _restored(options, json.loads(settings_file.read_text()))
    config = _config(options)
    precision = _precision()
    accelerator = Accelerator(mixed_precision=precision, cpu=options.device == "cpu")
    dtype = options.dtype if precision == "bf16" else "float32"  # without autocast weights and tables must agree

    def load() -> LoadedTarget:
        return load_target(options.model, dtype, str(accelerator.device), progress=not options.json)

    with accelerator.main_process_first():
        if options.prompts or options.prompt_file:
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
    free = {"steps", "minutes", "hours", "export", "with_tables", "json", "threads", "fuse", "device"}
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


def _precision() -> str:
    return "bf16" if (torch.cuda.is_available() and torch.cuda.is_bf16_supported()) or _cpu_bf16() else "no"


def _cpu_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def _config(options: argparse.Namespace) -> TrainConfig:
    if options.minutes < 0 or options.hours < 0:
        raise ValueError(f"minutes={options.minutes}, hours={options.hours}; use durations of at least 0")
    return TrainConfig(
        steps=options.steps,
        seconds=60 * options.minutes + 3600 * options.hours,
        sequences=options.sequences,
        micro_batch=options.micro_batch,
        anchors=options.anchors,
        optimizer=options.optimizer,
        lr=options.lr,
        matrix_lr=options.matrix_lr,
        schedule=options.schedule,
        cooldown=options.cooldown,
        prompts=options.on_prompts,
        warmup=options.warmup,
        weights=LossWeights(
            ce=options.ce, l1=options.l1, soft=options.soft, confidence=options.confidence, gamma=options.gamma
        ),
        block_schedule=_blocks(options),
        vocabulary=options.vocabulary,
        common=options.common,
        ema=options.ema,
        seed=options.seed,
        compiled=options.fuse,
    )


def _blocks(options: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """The block schedule; later slots hardly matter while early drafts are still wrong."""
    early, steps, block = options.early_slots, options.early_steps, options.block_size
    if not steps:
        return ()
    if not 1 <= early <= block:
        raise ValueError(f"early_slots={early} with early_steps={steps}; use 1 to {block} slots (block_size)")
    return ((0, early), (steps, block))


def _prepare(options: argparse.Namespace, folder: Path, target: LoadedTarget) -> FeatureStore:
    """The feature store of a run, filled."""
    features = folder / "features"
    if (features / "index.json").exists():
        store = FeatureStore(features)
    else:
        answers = folder / ANSWERS
        files = [*options.outputs, *([answers] if answers.exists() else [])]
        if not files:
            raise ValueError("there is nothing to train on; use --outputs, --prompt-file or --prompts")
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
    prompts = training_prompts(options.prompts, options.seed) if options.prompts else []
    if options.prompt_file:
        prompts += [(sample.task_id, sample.messages[-1]["content"]) for sample in load_workload(options.prompt_file)]
    with tqdm(total=len(prompts), unit="prompt", desc="answers", file=sys.stderr) as bar:
        generate_outputs(
            load(),
            prompts,
            folder / ANSWERS,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            progress=lambda done, total: bar.update(done - bar.n),
        )


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
