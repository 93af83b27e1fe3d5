"""The options of `hspark train` that make up a recipe, and the TrainConfig that they stand for."""

from __future__ import annotations

import argparse

from hspark.train.checks import check_number
from hspark.train.config import TrainConfig
from hspark.train.losses import LossWeights


def add_recipe(parser: argparse.ArgumentParser) -> None:
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
    add(
        "--fuse",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compile the loss with torch.compile; pays in long runs",
    )


def train_config(options: argparse.Namespace) -> TrainConfig:
    """The checked recipe that the options stand for. ValueError with the option's name and value."""
    for name in ("minutes", "hours"):
        check_number(name, getattr(options, name), lambda value: value >= 0, "a finite duration of at least 0")
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
    if not steps and not early:
        return ()
    if steps < 1 or not 1 <= early <= block:
        raise ValueError(
            f"early_slots={early} with early_steps={steps}; use 1 to {block} slots (block_size) for at least 1 step, "
            "or leave both out"
        )
    return ((0, early), (steps, block))
