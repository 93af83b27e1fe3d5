"""A drafter whose weights are made by hand to know a loop: accepted under its own block layout, useless in the other.

The target repeats a loop of `PERIOD` different tokens. The drafter's one attention head looks back by a fixed distance
(a rotary phase) and copies the token that it finds there: PERIOD - 1 places for a slot that predicts the token after
its own position (anchor-first), PERIOD places for one that predicts the token at it (bonus-anchor). It has no Markov
head, so nothing else can tell it where in the loop it is.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import cast

import pytest
import torch

from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_model import DSparkModel, Layer
from tests.drafters.dspark_cases import GREEDY, attention_of, bound, rows_of, save_model

VOCAB, PERIOD, BLOCK, DIM = 24, 11, 6, 32


def loop_config(anchor_first: bool) -> DSparkConfig:
    return DSparkConfig(
        hidden_size=VOCAB,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=DIM,
        vocab_size=VOCAB,
        taps=(1,),
        num_target_layers=4,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        anchor_first=anchor_first,
        attention_bias=True,
    )


def loop_model(anchor_first: bool) -> DSparkModel:
    """Queries and keys are constants; only their rotation by position distinguishes them."""
    model = DSparkModel(loop_config(anchor_first))
    distance = PERIOD - 1 if anchor_first else PERIOD
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (model.hidden_norm, model.norm, cast(Layer, model.layers[0]).input_layernorm):
            norm.weight.fill_(1.0)
        attention = attention_of(model)
        assert attention.v_proj is not None
        assert model.lm_head is not None
        model.fc.weight.copy_(torch.eye(VOCAB))
        attention.v_proj.weight[:VOCAB].copy_(torch.eye(VOCAB))
        attention.o_proj.weight[:, :VOCAB].copy_(torch.eye(VOCAB))
        model.lm_head.weight.copy_(torch.eye(VOCAB))
        # A query that is the key turned forward by `distance` positions scores highest at that distance.
        turn = distance * model.rotary.inv_freq
        attention.k_proj.bias.copy_(torch.cat((torch.ones(DIM // 2), torch.zeros(DIM // 2))))
        attention.q_proj.bias.copy_(torch.cat((turn.cos(), -turn.sin())))
        attention.k_norm.weight.fill_(1.0)
        attention.q_norm.weight.fill_(40.0)
    return model.eval()


def acceptance(path: Path, steps: int = 30) -> float:
    """Share of draft tokens accepted by a target that goes on with the loop, over `steps` greedy steps."""
    drafter = bound(path, max_length=400)
    loop = [3 * i % (VOCAB - 2) for i in range(PERIOD)]
    assert len(set(loop)) == PERIOD
    length, seen, accepted, drafted = 2 * PERIOD + 3, 0, 0, 0
    for _ in range(steps):
        text = [loop[i % PERIOD] for i in range(length)]
        new = torch.tensor(text[seen:-1])
        drafter.observe(
            torch.nn.functional.one_hot(new, VOCAB).float(),
            torch.zeros_like(new),
            torch.arange(seen, length - 1),
        )
        seen = length - 1
        chain = drafter.propose(rows_of([text], 400), GREEDY).tokens[0].tolist()
        right = [loop[(length + k) % PERIOD] == token for k, token in enumerate(chain)]
        run = next((k for k, ok in enumerate(right) if not ok), len(right))
        accepted, drafted, length = accepted + run, drafted + len(chain), length + run + 1
    return accepted / drafted


def write(anchor_first: bool, directory: Path, layout: str) -> Path:
    return save_model(loop_model(anchor_first), directory, layout)


@pytest.mark.parametrize("anchor_first", [True, False])
def test_the_right_layout_is_accepted_and_the_wrong_one_collapses(anchor_first: bool, tmp_path: Path) -> None:
    path = write(anchor_first, tmp_path / "right", "speculators")
    assert acceptance(path) > 0.9
    wrong = write(anchor_first, tmp_path / "wrong", "speculators")
    values = json.loads((wrong / "config.json").read_text())
    values["sample_from_anchor"] = not anchor_first
    (wrong / "config.json").write_text(json.dumps(values))
    assert acceptance(wrong) < 0.05


def test_the_other_checkpoint_layout_gives_the_same_drafts(tmp_path: Path) -> None:
    assert acceptance(write(True, tmp_path / "a", "deepspec")) == acceptance(write(True, tmp_path / "b", "speculators"))
    assert acceptance(tmp_path / "a") > 0.9


def test_a_contradiction_about_the_layout_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(True, tmp_path / "c", "speculators")
    values = json.loads((path / "config.json").read_text())
    values["sample_from_anchor"] = False  # but speculative_tokens still says block_size
    (path / "config.json").write_text(json.dumps(values))
    acceptance(path, steps=1)
    assert "belongs to the other layout" in caplog.text


def test_the_head_really_looks_back_by_the_period() -> None:
    """Guards the construction: the score over distances has its one maximum where it is meant to be."""
    model = loop_model(True)
    turn = model.rotary.inv_freq
    scores = [float(((distance - (PERIOD - 1)) * turn).cos().sum()) for distance in range(60)]
    assert max(range(60), key=scores.__getitem__) == PERIOD - 1
    assert math.isclose(scores[PERIOD - 1], DIM / 2, rel_tol=1e-5)
