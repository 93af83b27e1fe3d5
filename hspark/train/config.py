"""The recipe of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hspark.policy.curves import whole
from hspark.train.checks import check_flag, check_number
from hspark.train.losses import LossWeights

MAX_SEED = 2**32 - 1  # the generators' seeds are made from it and a step, and must fit 64 bits


@dataclass(frozen=True)
class TrainConfig:
    """The recipe of a run, checked when the object is made: ValueError with the name, the value and what would do.

    steps: optimiser steps in all; the cosine schedule ends there. seconds: stop earlier, after this long (0: never).
    sequences: per step and process; micro_batch of them go through one forward. anchors: blocks of each sequence.
    optimizer: "adamw", or "muon" for matrices with AdamW for the rest (`matrix_lr` and `lr`). schedule: "cosine" to 0
    or "constant", after `warmup` steps. cooldown: over so many last steps the rate also falls linearly to 0; a constant
    run can so be ended at any time, by resuming it with `steps` that far ahead.
    prompts: also train on blocks inside the prompts, which lie as near to the target's text as it gets without asking
    it for more.
    vocabulary: tokens of the softmax, of which `common` are always there (0: the whole vocabulary).
    block_schedule: (step, slots) pairs: from that step on blocks have so many slots, at most the drafter's own.
    clip: largest norm of a step's gradient. ema: decay of the averaged weights, which get measured and exported.
    held_out: share of the groups of outputs that is measured on instead. compiled: fuse the loss with torch.compile.
    log_every, save_every: seconds between log records and between checkpoints.
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
            whole(name, getattr(self, name), 1)
        for name in ("warmup", "cooldown", "vocabulary", "common"):
            whole(name, getattr(self, name), 0)
        if 0 < self.vocabulary < self.common:
            raise ValueError(
                f"common={self.common!r} tokens do not fit into vocabulary={self.vocabulary!r}; use at most that many, "
                "or vocabulary=0 for all tokens"
            )
        whole("seed", self.seed, 0, MAX_SEED)
        for name in ("lr", "matrix_lr", "clip"):
            check_number(name, getattr(self, name), lambda value: value > 0, "a finite number above 0")
        for name in ("seconds", "log_every", "save_every"):
            check_number(name, getattr(self, name), lambda value: value >= 0, "a finite number of at least 0 seconds")
        check_number("ema", self.ema, lambda value: 0 <= value < 1, "a number from 0 (off) to below 1")
        check_number("held_out", self.held_out, lambda value: 0 <= value < 1, "a share from 0 to below 1")
        for name in ("prompts", "compiled"):
            check_flag(name, getattr(self, name))
        for name, known in (("optimizer", ("adamw", "muon")), ("schedule", ("constant", "cosine"))):
            if getattr(self, name) not in known:
                accepted = " or ".join(f'"{choice}"' for choice in known)
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; use {accepted}")
        if not isinstance(self.weights, LossWeights):
            raise ValueError(f"weights={self.weights!r}; use LossWeights")
        self._check_blocks()

    def _check_blocks(self) -> None:
        pairs = self.block_schedule
        whole = isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
        if not whole or not all(type(step) is type(slots) is int and step >= 0 < slots for step, slots in pairs):
            raise ValueError(
                f"block_schedule={pairs!r}; use (step, slots) pairs of integers, step at least 0, slots at least 1"
            )
        if any(earlier >= later for (earlier, _), (later, _) in pairwise(pairs)):
            raise ValueError(f"block_schedule={pairs!r} is out of order; use ascending steps")
