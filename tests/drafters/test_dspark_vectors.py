"""Every reference vector, through the public loader and the drafter's own buffers, in float32 to 1e-4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hspark.core import RowState
from hspark.drafters.confidence import ProbabilityCurve
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_context import BufferContext, LayerKV, SharedContext, buffer_masks
from hspark.sampling import SamplingMode
from tests.drafters.dspark_cases import CASES, GREEDY, bound, rows_of, vector_case

STEPS = ("step1", "step2")


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} and {tuple(expected.shape)}"
    worst = float((actual - expected).abs().max())
    assert worst <= 1e-4, f"{what} is off by {worst:.2e}"


class Replay:
    """One case: a drafter that has seen what the reference had seen at the given step."""

    def __init__(self, case: str, step: str, **options: Any) -> None:
        path, self.io = vector_case(case)
        self.drafter: DSparkDrafter = bound(path, max_length=32, **options)
        self.step, self.config, self.model = step, self.drafter.config, self.drafter.model
        position = 0
        for earlier in STEPS[: STEPS.index(step) + 1]:
            features = self.io[f"{earlier}.target_hidden_states"][0]
            count = features.shape[0]
            self.drafter.observe(features, torch.zeros(count, dtype=torch.int64), position + torch.arange(count))
            position += count
        self.start = int(self["start"])
        assert self.start == position

    def __getitem__(self, name: str) -> Tensor:
        return self.io[f"{self.step}.{name}"]

    def rows(self, **sampling: Any) -> RowState:
        return rows_of([self.io["token_ids"][0, : self.start + 1].tolist()], 32, **sampling)

    def hidden(self, outputs: list[Tensor] | None = None) -> Tensor:
        drafter, anchor = self.drafter, self["start"]
        tokens, positions = self.model.block_inputs(self["anchor_token"], anchor)
        assert torch.equal(tokens, self["block_input_ids"])
        masks = buffer_masks(self.config, anchor, drafter.scratch, drafter.columns, torch.float32)
        return self.model.block_hidden(tokens, positions, BufferContext(self.config, drafter.buffers, masks), outputs)

    def previous(self, drafts: Tensor) -> Tensor:
        """What conditions each slot of the block [1, B] when `drafts` [1, n] are the tokens chosen."""
        lead = 1 if self.config.anchor_first else 2
        return torch.cat((self["anchor_token"].expand(1, lead), drafts[:, :-1]), dim=1)


@pytest.fixture(params=[(case, step) for case in CASES for step in STEPS], ids=lambda pair: "-".join(pair))
def replay(request: pytest.FixtureRequest) -> Replay:
    return Replay(*request.param)


def test_all_nine_cases_are_here() -> None:
    assert len(CASES) == 9


def test_features_and_caches(replay: Replay) -> None:
    close(replay.model.context_features(replay["target_hidden_states"]), replay["context_features"], "features")
    scratch, start = replay.drafter.scratch, replay.start
    if f"{replay.step}.cache_k.0" not in replay.io:
        assert replay.drafter.source.layout == "speculators"  # type: ignore[union-attr]  # its reference has no cache
        return
    for layer, buffer in enumerate(replay.drafter.buffers):
        close(buffer.keys[:, :, scratch : scratch + start], replay[f"cache_k.{layer}"], f"keys of layer {layer}")
        close(buffer.values[:, :, scratch : scratch + start], replay[f"cache_v.{layer}"], f"values of layer {layer}")


def test_layer_numbers_name_the_reference_states(replay: Replay) -> None:
    """The one convention: tap i is the output of decoder layer i (entry i + 1 of all states), -1 the embeddings."""
    if replay.drafter.source.layout == "speculators":  # type: ignore[union-attr]
        assert replay.config.taps == (1, 3, 6)  # the file says 2, 4, 7: one higher
        return
    states = replay["target_all_hidden_states"]
    picked = torch.cat([states[tap + 1] for tap in replay.config.taps], dim=-1)
    assert torch.equal(picked, replay["target_hidden_states"])


def test_layers_and_logits(replay: Replay) -> None:
    outputs: list[Tensor] = []
    hidden = replay.hidden(outputs)
    for layer, output in enumerate(outputs):
        close(output, replay[f"layer_output.{layer}"], f"output of layer {layer}")
    close(hidden, replay["block_hidden"], "block hidden")
    close(replay.model.base_logits(hidden), replay["base_logits"], "base logits")


def test_greedy_path(replay: Replay) -> None:
    chain = replay.drafter.propose(replay.rows(), GREEDY)
    assert torch.equal(chain.tokens, replay["draft_tokens"])
    assert chain.length.tolist() == [replay.config.width]
    assert bool(chain.point_mass.all())
    assert chain.log_probs is None
    hidden, previous = replay.hidden(), replay.previous(replay["draft_tokens"])
    corrected = replay.model.base_logits(hidden) + replay.model.markov_bias(previous, hidden)
    close(corrected[:, -replay.config.width :], replay["corrected_logits"], "corrected logits")
    if replay.config.confidence_head:
        close(chain.acceptance, replay["confidence_logits"].sigmoid(), "acceptance")
        close(chain.survival, replay["confidence_logits"].sigmoid().cumprod(1), "survival")
    else:
        top = replay["corrected_logits"].softmax(-1).amax(-1)
        close(chain.acceptance, ProbabilityCurve()(top.log()), "acceptance of a drafter without a confidence head")


def test_forced_path(replay: Replay) -> None:
    hidden, previous = replay.hidden(), replay.previous(replay["forced_tokens"])
    corrected = replay.model.base_logits(hidden) + replay.model.markov_bias(previous, hidden)
    close(corrected[:, -replay.config.width :], replay["forced_corrected_logits"], "forced logits")
    if replay.config.confidence_head:
        confidence = replay.model.confidence(previous, hidden)[:, -replay.config.width :]
        close(confidence, replay["forced_confidence_logits"], "forced confidence")


def test_sampled_path_follows_its_own_tokens(replay: Replay) -> None:
    """Slot by slot sampling reports the teacher-forced law of the tokens that it drew, in target ids."""
    drafter = Replay(
        next(case for case in CASES if vector_case(case)[0] == replay.drafter.source.path),  # type: ignore[union-attr]
        replay.step,
        drafting="probabilistic",
    ).drafter
    chain = drafter.propose(replay.rows(temperature=0.7, seed=3), SamplingMode(sampled=True))
    hidden, previous = replay.hidden(), replay.previous(chain.tokens)
    corrected = replay.model.base_logits(hidden) + replay.model.markov_bias(previous, hidden)
    law = (corrected[:, -replay.config.width :] / 0.7).softmax(-1)
    assert chain.log_probs is not None
    close(chain.log_probs.exp()[..., replay.model.target_ids()], law, "law")
    close(chain.log_probs.exp().sum(-1), torch.ones(1, replay.config.width), "total probability")
    assert not bool(chain.point_mass.any())


def test_reference_thresholds(replay: Replay) -> None:
    """Cutting at the first slot whose acceptance is below a threshold gives the reference's lengths."""
    if f"{replay.step}.draft_lengths" not in replay.io:
        assert replay.drafter.source.layout == "speculators" or not replay.config.confidence_head  # type: ignore[union-attr]
        return
    acceptance = replay.drafter.propose(replay.rows(), GREEDY).acceptance[0]
    for threshold, length in zip(
        replay["confidence_thresholds"].tolist(), replay["draft_lengths"].tolist(), strict=True
    ):
        below = (acceptance < threshold).nonzero()
        kept = replay.config.width if threshold <= 0 or not len(below) else int(below[0])
        assert kept == length, f"threshold {threshold}"


def test_training_context_equals_drafting_context(replay: Replay) -> None:
    """Many blocks over one shared context (training) give what one block over static buffers gives (drafting)."""
    scratch, start = replay.drafter.scratch, replay.start
    layers = [
        LayerKV(
            b.keys[:, :, scratch : scratch + start].expand(2, -1, -1, -1),
            b.values[:, :, scratch : scratch + start].expand(2, -1, -1, -1),
        )
        for b in replay.drafter.buffers
    ]
    anchors = torch.tensor([[start, 4, start], [0, start, 7]])  # two sequences, three blocks each
    ids = replay.io["token_ids"][0]
    tokens, positions = replay.model.block_inputs(ids[anchors.flatten()], anchors.flatten())
    hidden = replay.model.block_hidden(tokens, positions, SharedContext(replay.config, layers, anchors))
    for block in (0, 2, 4):
        close(hidden[block : block + 1], replay["block_hidden"], f"block {block}")
    for block, anchor in ((1, 4), (3, 0), (5, 7)):
        early = replay.model.block_hidden(
            tokens[block : block + 1],
            positions[block : block + 1],
            BufferContext(
                replay.config,
                replay.drafter.buffers,
                buffer_masks(replay.config, torch.tensor([anchor]), scratch, 32, torch.float32),
            ),
        )
        close(hidden[block : block + 1], early, f"block {block}")
