"""`hspark train`: a target's outputs, its hidden states over them, a drafter trained on both, a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_model import DSparkModel
from hspark.lab.outputs import RecordedOutput, read_outputs
from hspark.lab.workloads import load_workload
from hspark.models import LoadedTarget, load_target
from hspark.options import set_threads
from hspark.train.data import FeatureStore, group_of
from hspark.train.export import calibrate, draft_limits, export_drafter, measure
from hspark.train.files import write_whole
from hspark.train.generate import generate_outputs
from hspark.train.invent import invent_prompts
from hspark.train.prompts import training_prompts
from hspark.train.recipe import train_config
from hspark.train.settings import ANSWERS, FEATURES, INVENTED, read_settings, save_settings
from hspark.train.setup import bigram_markov, drafter_config, new_drafter, unused_token
from hspark.train.trainer import Trainer


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit status. ValueErrors are the caller's mistakes."""
    options = read_settings(argv)
    config = train_config(options)
    set_threads(options.threads)
    folder = Path(options.folder)
    precision = _precision()
    accelerator = Accelerator(mixed_precision=precision, cpu=options.device == "cpu")
    dtype = options.dtype if precision == "bf16" else "float32"  # without autocast weights and tables must agree

    def load() -> LoadedTarget:
        return load_target(options.model, dtype, str(accelerator.device), progress=not options.json)

    with accelerator.main_process_first():
        target = load()
        shape = _shape(options, target, options.taps)
        recorded = _recorded(options, folder, target)
        if accelerator.is_main_process:
            save_settings(options)
        if not (folder / FEATURES).exists() and (options.prompts or options.prompt_file or options.invent):
            _answer(options, folder, target)
            target = load()  # the engine took the other copy over for good
        store = _prepare(folder, target, shape, recorded)
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


def _precision() -> str:
    return "bf16" if (torch.cuda.is_available() and torch.cuda.is_bf16_supported()) or _cpu_bf16() else "no"


def _cpu_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def _recorded(options: argparse.Namespace, folder: Path, target: LoadedTarget) -> list[RecordedOutput]:
    """The outputs in the files given, unless the run already has its features."""
    if (folder / FEATURES).exists():
        return []
    return [output for file in options.outputs for output in read_outputs(file, lambda text: _encode(target, text))]


def _answer(options: argparse.Namespace, folder: Path, target: LoadedTarget) -> None:
    """Has the target answer the prompts asked for; those that it answered before an interruption are kept."""
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


def _prepare(folder: Path, target: LoadedTarget, shape: DSparkConfig, recorded: list[RecordedOutput]) -> FeatureStore:
    """The feature store of a run, filled: of the recorded outputs and of the answers in the folder."""
    features = (folder / FEATURES).parent
    if (folder / FEATURES).exists():
        store = FeatureStore(features)
    else:
        answers = folder / ANSWERS
        outputs = [*recorded, *(read_outputs(answers) if answers.exists() else [])]
        groups = [group_of(output.task_id, _decode(target, output)) for output in outputs]
        store = FeatureStore.create(features, outputs, groups, shape.taps, shape.hidden_size)
    with tqdm(total=store.offsets[-1], unit="tok", desc="hidden states", file=sys.stderr) as bar:
        store.fill(target.model, progress=lambda done, total: bar.update(done - bar.n))
    return store


def _invented(options: argparse.Namespace, folder: Path, target: LoadedTarget) -> list[tuple[str, str]]:
    """Prompts made up by the target; kept in the folder, so that a run that was cut short goes on with the same."""
    path = folder / INVENTED
    if path.exists():
        return [(task_id, message) for task_id, message in json.loads(path.read_text(encoding="utf-8"))]
    with tqdm(total=options.invent, unit="prompt", desc="prompts", file=sys.stderr) as bar:
        found = invent_prompts(
            target, options.invent, seed=options.seed, progress=lambda done, total: bar.update(done - bar.n)
        )
    write_whole(path, json.dumps(found))
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


def _shape(options: argparse.Namespace, target: LoadedTarget, taps: Sequence[int] | int) -> DSparkConfig:
    """The drafter asked for. ValueError if it does not fit the target."""
    model: Any = target.model
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    if options.kv_heads is not None and heads % options.kv_heads:
        raise ValueError(f"kv_heads={options.kv_heads} does not divide the target's {heads} query heads; use a divisor")
    return drafter_config(
        text,
        mask_token_id=unused_token(target.tokenizer, text.vocab_size),
        layers=options.layers,
        taps=taps,
        kv_heads=options.kv_heads,
        markov_rank=options.markov_rank,
        block_size=options.block_size,
    )


def _drafter(options: argparse.Namespace, target: LoadedTarget, store: FeatureStore) -> DSparkModel:
    config = _shape(options, target, store.taps_of)
    drafter = new_drafter(config, target.model, samples=store.taps[:2000], seed=options.seed)
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
    length, tokens = (None if n == "all" else n for n in (options.draft_length, options.draft_vocabulary))
    draft_limits(trainer.stores, length, tokens).save(place)
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
