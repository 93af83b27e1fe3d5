"""The recipe of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hspark.train.losses import LossWeights


@dataclass(frozen=True)
class TrainConfig:
    """The recipe of a run.

    steps: optimiser steps in all; the cosine schedule ends there. seconds: stop earlier, after this long (0: never).
    sequences: per step and process; micro_batch of them go through one forward. anchors: blocks of each sequence.
    optimizer: "adamw", or "muon" for matrices with AdamW for the rest (`matrix_lr` and `lr`). schedule: "cosine" to 0
    or "constant", after `warmup` steps. cooldown: over so many last steps the rate also falls linearly to 0; a constant
    run can so be ended at any time, by resuming it with `steps` that far ahead.
    prompts: also train on blocks inside the prompts, which lie as near to the target's text as it gets without asking
    it for more.
    vocabulary: tokens of the softmax, of which `common` are always there (0: the whole vocabulary).
    block_schedule: (step, slots) pairs: from that step on blocks have so many slots, at most the drafter's own.
    ema: decay of the averaged weights, which are what gets measured and exported.
    """

    steps: int = 20000
    seconds: float = 0.0
    sequences: int = 8
    micro_batch: int = 4
    anchors: int = 128
    optimizer: str = "muon"
    lr: float = 1.5e-3
    matrix_lr: float = 3e-3
    schedule: str = "constant"
    warmup: int = 20
    cooldown: int = 0
    prompts: bool = False
    clip: float = 1.0
    weights: LossWeights = field(default_factory=lambda: LossWeights(ce=0.3, l1=0.1, soft=1.0, confidence=0.1))
    vocabulary: int = 6144
    common: int = 4096
    block_schedule: tuple[tuple[int, int], ...] = ()
    ema: float = 0.98
    seed: int = 0
    held_out: float = 0.04
    compiled: bool = False
    log_every: float = 60.0
    save_every: float = 300.0

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "micro_batch", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}; use an integer of at least 1")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f'optimizer={self.optimizer!r} is not known; use "adamw" or "muon"')
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f'schedule={self.schedule!r} is not known; use "constant" or "cosine"')
        for name in ("warmup", "cooldown"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}; use an integer of at least 0")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema={self.ema!r}; use a number from 0 (off) to below 1")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out!r}; use a share from 0 to below 1")
