"""The training loop: data order, schedule, averaged weights, and checkpoints from which a run goes on exactly.

Everything random is a function of (seed, step), so a checkpoint needs no generator state: a run that was interrupted
and resumed computes what an uninterrupted one does, bit for bit on the same machine.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hspark.drafters.dspark_model import DSparkModel
from hspark.train.blocks import Batch, make_slots
from hspark.train.config import TrainConfig
from hspark.train.data import FeatureStore, is_held_out
from hspark.train.evaluate import acceptance_length
from hspark.train.losses import EPSILON, LossTerms, Vocabulary, draft_losses
from hspark.train.optimizers import build_optimizers


class DraftLoss(nn.Module):
    """The drafter with its loss as a module, so that a data-parallel wrapper sees one forward."""

    def __init__(self, model: DSparkModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, **options: Any) -> LossTerms:
        return draft_losses(self.model, batch, **options)


class Trainer:
    """Trains `model` on feature stores, writing a log and checkpoints into `folder`.

    An item is (store, sequence). Items whose group falls into the held-out share are never trained on.
    """

    def __init__(
        self,
        model: DSparkModel,
        stores: Sequence[FeatureStore],
        folder: str | Path,
        config: TrainConfig,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.config, self.stores, self.folder = config, list(stores), Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.accelerator = accelerator or Accelerator(mixed_precision="bf16")
        self.train_items: list[tuple[int, int]] = []
        self.held_items: list[tuple[int, int]] = []
        for s, store in enumerate(self.stores):
            for i, group in enumerate(store.groups):
                if store.done[i]:
                    (self.held_items if is_held_out(group, config.held_out) else self.train_items).append((s, i))
        if len(self.train_items) < config.sequences * self.accelerator.num_processes:
            raise ValueError(
                f"{len(self.train_items)} training sequences are fewer than the {config.sequences} that a step takes"
            )
        self.full_block = model.config.block_size
        self.frequent = self._frequent_tokens(model.config.vocab_size)
        self.step = self.anchors_seen = 0
        self.seconds = 0.0
        self.averaged = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        optimizers = build_optimizers(model, config.optimizer, config.lr, config.matrix_lr)
        self.loss = self.accelerator.prepare(DraftLoss(model))
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in optimizers]
        self.base_lr = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    @property
    def model(self) -> DSparkModel:
        return self.accelerator.unwrap_model(self.loss).model

    def _frequent_tokens(self, vocab_size: int) -> Tensor:
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for s, i in self.train_items:
            store = self.stores[s]
            output = store.tokens[store.offsets[i] + store.prompt_lengths[i] : store.offsets[i + 1]]
            counts += torch.bincount(output.long(), minlength=vocab_size)
        return counts.argsort(descending=True)

    def items_of(self, step: int) -> list[tuple[int, int]]:
        """The sequences of a step for this process, sorted by length so that micro-batches are padded little."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        per_step = self.config.sequences * world
        epoch, place = divmod(step, len(self.train_items) // per_step)
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train_items), generator=generator)[place * per_step : (place + 1) * per_step]
        chosen = sorted(
            (self.train_items[int(k)] for k in order), key=lambda item: self.stores[item[0]].length(item[1])
        )
        return chosen[rank::world]

    def train(self, on_log: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Runs until `steps` or `seconds` are reached; logs, saves, and returns the last log record."""
        config = self.config
        started, before = time.monotonic(), self.seconds
        logged = saved = started
        averages: dict[str, float] = {}
        record: dict[str, Any] = {}
        while self.step < config.steps and not (config.seconds and self.seconds >= config.seconds):
            terms = self.take_step()
            for name, value in terms.items():
                averages[name] = 0.95 * averages.get(name, value) + 0.05 * value
            now = time.monotonic()
            self.seconds = before + now - started
            last = self.step >= config.steps or bool(config.seconds and self.seconds >= config.seconds)
            if now - logged >= config.log_every or last:
                record = self.write_log(averages)
                logged = time.monotonic()
                if on_log is not None:
                    on_log(record)
            if now - saved >= config.save_every or last:
                self.save()
                saved = time.monotonic()
        return record

    def take_step(self) -> dict[str, float]:
        """One optimiser step; returns the mean loss terms."""
        config, accelerator = self.config, self.accelerator
        block = self.full_block
        for start, size in config.block_schedule:
            if self.step >= start:
                block = min(size, self.full_block)
        self.model.config = self.model.config.replace(block_size=block)
        seed = (config.seed * 1_000_003 + self.step) * 1009 + accelerator.process_index + 1
        generator = torch.Generator().manual_seed(seed)
        items, parts = self.items_of(self.step), []
        for start in range(0, len(items), config.micro_batch):
            parts.extend(self._batches(items[start : start + config.micro_batch], generator))
        slots = [make_slots(part, block, config.weights.gamma) for part in parts]
        weight = accelerator.reduce(torch.stack([s.weights.sum() for s in slots]).sum(), reduction="sum")
        denominator = (weight + EPSILON) / accelerator.num_processes  # gradients are averaged over processes
        vocabulary = self._vocabulary(torch.cat([s.labels.flatten() for s in slots]), generator)
        totals = torch.zeros(4, device=accelerator.device)
        for number, part in enumerate(parts):
            final = number == len(parts) - 1
            with accelerator.autocast(), _syncing(accelerator, self.loss, final):
                terms = self.loss(
                    part,
                    weights=config.weights,
                    denominator=denominator,
                    vocabulary=vocabulary,
                    compiled=config.compiled,
                )
                accelerator.backward(terms.total)
            totals += torch.stack([terms.ce, terms.l1, terms.soft, terms.confidence]).detach()
        norm = accelerator.clip_grad_norm_(self.loss.parameters(), config.clip)
        self._update()
        self.anchors_seen += int(accelerator.reduce(sum(part.keep.sum() for part in parts), reduction="sum"))
        means = (accelerator.reduce(totals, reduction="sum") / (weight + EPSILON)).tolist()
        self.model.config = self.model.config.replace(block_size=self.full_block)
        return dict(zip(("ce", "l1", "soft", "confidence"), means, strict=True)) | {"norm": float(norm)}

    def _batches(self, items: Sequence[tuple[int, int]], generator: torch.Generator) -> list[Batch]:
        """The batches of a micro-batch: one per store that it draws from."""
        return [
            self.stores[s].batch(
                [i for t, i in items if t == s],
                self.config.anchors,
                generator,
                self.accelerator.device,
                prompts=self.config.prompts,
            )
            for s in sorted({s for s, _ in items})
        ]

    def _vocabulary(self, labels: Tensor, generator: torch.Generator) -> Vocabulary | None:
        size = self.config.vocabulary
        if not size or size >= len(self.frequent):
            return None
        return Vocabulary.sample(self.frequent[: self.config.common], labels, size, len(self.frequent), generator)

    def _update(self) -> None:
        config = self.config
        factor = min(1.0, (self.step + 1) / config.warmup) if config.warmup else 1.0
        if config.schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / config.steps)))
        if config.cooldown:
            factor *= min(1.0, max(0, config.steps - self.step) / config.cooldown)
        for optimizer, rates in zip(self.optimizers, self.base_lr, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        decay = min(config.ema, self.step / (self.step + 10))
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, average in self.averaged.items():
                average.lerp_(weights[name], 1 - decay)

    def averaged_model(self) -> DSparkModel:
        """A copy of the drafter with the averaged weights; the tables are shared with the trained one."""
        own = self.model
        assert own.embed_tokens is not None
        assert own.lm_head is not None
        model = DSparkModel(own.config, tables=False).to(self.accelerator.device)
        model.share_tables(own.embed_tokens.weight, own.lm_head.weight)  # type: ignore[arg-type]
        model.load_state_dict(self.averaged, strict=False)
        return model.eval()

    def write_log(self, averages: dict[str, float]) -> dict[str, Any]:
        """Measures the averaged weights on held-out items and appends one line to log.jsonl."""
        record: dict[str, Any] = {
            "step": self.step,
            "anchors": self.anchors_seen,
            "seconds": round(self.seconds, 1),
            "loss": {name: round(value, 4) for name, value in averages.items()},
        }
        if self.accelerator.is_main_process:
            if self.held_items:
                with self.accelerator.autocast():
                    record["held_out"] = acceptance_length(
                        self.averaged_model(), self.stores, self.held_items, anchors=12
                    )
            with (self.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
        self.accelerator.wait_for_everyone()
        return record

    def save(self) -> None:
        """Writes checkpoint.pt, all of it or nothing."""
        if self.accelerator.is_main_process:
            path = self.folder / "checkpoint.pt"
            state = {
                "model": {k: v for k, v in self.model.state_dict().items() if not k.startswith(("embed_", "lm_head"))},
                "averaged": self.averaged,
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "step": self.step,
                "anchors": self.anchors_seen,
                "seconds": self.seconds,
                "config": asdict(self.config),
                "drafter": self.model.config.to_dict(),
            }
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        self.accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Goes on from checkpoint.pt if there is one."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"], strict=False)
        for name, value in state["averaged"].items():
            self.averaged[name].copy_(value)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.anchors_seen, self.seconds = state["step"], state["anchors"], state["seconds"]
        return True


def _syncing(accelerator: Accelerator, module: nn.Module, final: bool) -> Any:
    """Gradients are exchanged between processes at the last micro-batch only."""
    return nullcontext() if final else accelerator.no_sync(module)
