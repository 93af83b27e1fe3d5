"""A trained drafter as a checkpoint in the DeepSpec layout, with its confidence calibrated on held-out outputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hspark.drafters.confidence import FILE_NAME as CONFIDENCE
from hspark.drafters.confidence import Calibration, fit_platt
from hspark.drafters.dspark_model import DSparkModel
from hspark.drafters.limits import FILE_NAME as LIMITS
from hspark.drafters.limits import DraftLimits
from hspark.policy import expected_calibration_error
from hspark.train.data import FeatureStore
from hspark.train.evaluate import Item, runs_of
from hspark.train.invent import INVENTED

# What a reader takes from beside config.json and model.safetensors, the index even in place of the latter.
BESIDE = (CONFIDENCE, LIMITS, "model.safetensors.index.json")
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def export_drafter(
    model: DSparkModel,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tables: bool = False,
    calibration: Calibration | None = None,
) -> Path:
    """Writes config.json, model.safetensors and, if given, confidence.json; returns the folder.

    tables: also store `embed_tokens` and `lm_head`, which equal the target's, for loaders that insist on them.
    A checkpoint that the folder already holds is replaced: its calibration, draft limits and index of shards go.
    ValueError for a dtype that cannot be stored.
    """
    if dtype not in NAMES:
        raise ValueError(f"dtype={dtype!r} cannot be stored; use one of {', '.join(map(str, NAMES))}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in BESIDE:
        (folder / name).unlink(missing_ok=True)
    weights: dict[str, Tensor] = {
        name: value.detach().to("cpu", dtype).contiguous().clone()
        for name, value in model.state_dict().items()
        if tables or not name.startswith(("embed_tokens.", "lm_head."))
    }
    (folder / "config.json").write_text(model.config.to_json("deepspec", NAMES[dtype]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if calibration is not None:
        calibration.save(folder)
    return folder


def draft_limits(stores: Sequence[FeatureStore], length: int | None, tokens: int | None) -> DraftLimits:
    """What a drafter trained on these stores is asked for: `length` tokens of a block, out of the `tokens` ids that are
    most frequent in all prompts and outputs, the lower id first among equals; None means all. See `DraftLimits`."""
    if tokens is None:
        return DraftLimits(length)
    counts = sum((Counter(store.tokens.tolist()) for store in stores), Counter())
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[:tokens]
    return DraftLimits(length, tuple(sorted(frequent)))


@dataclass(frozen=True)
class DrafterReport:
    """How a drafter does on greedy outputs with greedy drafts, all verified; one anchor is one step.

    acceptance_length: tokens per step, the target's own included. by_position: share of steps that accept slot k.
    ece: calibration error of the survival of every slot, and of the first slot's acceptance alone.
    reliability: (mean predicted survival, share that survived, slots) in ten bins of the prediction.
    """

    anchors: int
    acceptance_length: dict[str, float]
    by_position: list[float]
    ece: float
    ece_first: float
    reliability: list[tuple[float, float, int]]

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def calibrate(
    model: DSparkModel, stores: Sequence[FeatureStore], items: Sequence[Item], *, anchors: int = 48, batch_size: int = 8
) -> Calibration:
    """Temperatures and biases of the confidence, from greedy drafts on held-out outputs (`fit_platt`).

    A target's answers to prompts that it made up itself are easier to foresee than others, so they count only where
    there are no others.
    """
    kinds, hits, inside, confidence = _collect(model, stores, items, anchors, batch_size)
    written = torch.tensor([kind != INVENTED for kind in kinds])
    chosen = written if bool(written.any()) else ~written
    return fit_platt(confidence[chosen], hits[chosen].sum(1), inside[chosen].sum(1))


def measure(
    model: DSparkModel,
    stores: Sequence[FeatureStore],
    items: Sequence[Item],
    calibration: Calibration | None = None,
    *,
    anchors: int = 48,
    batch_size: int = 8,
) -> DrafterReport:
    """The report of a drafter on these items. ValueError if none of them is a greedy output."""
    kinds, hits, inside, confidence = _collect(model, stores, items, anchors, batch_size)
    survival = (calibration or Calibration()).acceptance(confidence).cumprod(dim=1)
    lengths = {
        kind: round(1 + hits[[k == kind for k in kinds]].sum(1).float().mean().item(), 4) for kind in sorted(set(kinds))
    }
    predicted, outcome = survival[inside], hits[inside].float()
    bin_of = (predicted * 10).long().clamp(max=9)
    rows = [bin_of == b for b in range(10)]
    return DrafterReport(
        anchors=len(hits),
        acceptance_length=lengths | {"all": round(1 + hits.sum(1).float().mean().item(), 4)},
        by_position=[round(value, 4) for value in hits.float().mean(0).tolist()],
        ece=round(expected_calibration_error(predicted, outcome), 4),
        ece_first=round(expected_calibration_error(survival[:, 0], hits[:, 0].float()), 4),
        reliability=[
            (round(predicted[r].mean().item(), 3), round(outcome[r].mean().item(), 3), int(r.sum()))
            for r in rows
            if bool(r.any())
        ],
    )


def _collect(
    model: DSparkModel, stores: Sequence[FeatureStore], items: Sequence[Item], anchors: int, batch_size: int
) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Per anchor: its kind of task, and hits, inside, confidence [n, B] (see `Runs`), on the CPU."""
    kinds: list[str] = []
    parts = []
    for kind, runs in runs_of(model, stores, items, anchors=anchors, batch_size=batch_size):
        kinds += [kind] * len(runs.hits)
        parts.append(runs)
    if not parts:
        raise ValueError("none of the outputs is greedy (temperature 0); there is nothing to measure on")
    hits, inside, confidence = (
        torch.cat([getattr(r, n) for r in parts]).cpu() for n in ("hits", "inside", "confidence")
    )
    return kinds, hits, inside, confidence.float()
