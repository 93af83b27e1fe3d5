"""How many draft tokens the target would accept, by teacher forcing over outputs that it already gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hspark.drafters.dspark_model import DSparkModel
from hspark.train.blocks import make_slots
from hspark.train.data import FeatureStore
from hspark.train.losses import block_hidden

Item = tuple[int, int]  # (store, sequence)


class Runs(NamedTuple):
    """Greedy drafts from n anchors, compared with what followed.

    sequence: int64 [n], which of the given sequences. hits: bool [n, B], slot k and all before it were right; a
    position past the end of the output is a miss. inside: bool [n, B], slots within the output. confidence: float32
    [n, B] logits of acceptance; zeros without a confidence head.
    """

    sequence: Tensor
    hits: Tensor
    inside: Tensor
    confidence: Tensor


@torch.inference_mode()
def greedy_runs(model: DSparkModel, store: FeatureStore, indices: Sequence[int], anchors: int) -> Runs:
    """Drafts greedily from up to `anchors` evenly spaced anchors of each of some sequences."""
    tables = model.lm_head
    assert tables is not None
    batch = store.batch(indices, anchors, None, next(tables.parameters()).device)
    kept = batch.keep.flatten()
    slots = make_slots(batch, model.config.block_size, None)
    hidden = block_hidden(model, batch)[kept]
    label, inside = slots.labels.flatten(0, 1)[kept], slots.mask.flatten(0, 1)[kept]
    previous = batch.tokens.gather(1, batch.anchors).flatten()[kept]
    alive = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    state, hits, confidence = None, [], []
    for slot in range(model.config.block_size):
        h = hidden[:, slot]
        logits = model.base_logits(h)
        if model.confidence_head is not None:
            confidence.append(model.confidence(previous[:, None], h[:, None])[:, 0])
        if model.markov_head is not None:
            latent, state = model.markov_head.step(model.markov_head.markov_w1(previous), h, state)
            logits = logits + model.markov_head.markov_w2(latent)
        previous = logits.argmax(dim=-1)
        alive = alive & inside[:, slot] & (previous == label[:, slot])
        hits.append(alive)
    hit = torch.stack(hits, dim=1)
    return Runs(
        sequence=torch.arange(len(indices)).repeat_interleave(batch.keep.sum(1).cpu()),
        hits=hit,
        inside=inside,
        confidence=torch.stack(confidence, dim=1) if confidence else torch.zeros(hit.shape, device=hit.device),
    )


def runs_of(
    model: DSparkModel, stores: Sequence[FeatureStore], items: Sequence[Item], *, anchors: int, batch_size: int
) -> Iterator[tuple[str, Runs]]:
    """(kind of task, runs) for every greedy output among `items`, in batches of sequences of similar length."""
    for s, store in enumerate(stores):
        chosen = sorted((i for t, i in items if t == s and store.temperatures[i] == 0), key=store.length)
        for start in range(0, len(chosen), batch_size):
            indices = chosen[start : start + batch_size]
            runs = greedy_runs(model, store, indices, anchors)
            for place, i in enumerate(indices):
                yield store.task_ids[i].split("/")[0], Runs(*(t[(runs.sequence == place).to(t.device)] for t in runs))


def acceptance_length(
    model: DSparkModel,
    stores: Sequence[FeatureStore],
    items: Sequence[Item],
    *,
    anchors: int = 24,
    batch_size: int = 8,
) -> dict[str, float]:
    """Expected tokens per step (the target's own included) with greedy drafts, all verified, on greedy outputs.

    By kind of task (the part of its id before "/"); "all"; and "first", the share of first drafts that are right.
    Empty without greedy outputs.
    """
    by_kind: dict[str, list[Tensor]] = defaultdict(list)
    for kind, runs in runs_of(model, stores, items, anchors=anchors, batch_size=batch_size):
        by_kind[kind].append(runs.hits.float())
    if not by_kind:
        return {}
    everything = torch.cat([hits for kind in by_kind.values() for hits in kind])
    lengths = {kind: 1 + torch.cat(hits).sum(1).mean().item() for kind, hits in sorted(by_kind.items())}
    lengths["all"] = 1 + everything.sum(1).mean().item()
    lengths["first"] = everything[:, 0].mean().item()
    return {kind: round(value, 4) for kind, value in lengths.items()}
