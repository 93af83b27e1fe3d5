"""A drafter asked for fewer tokens, of part of the vocabulary, drafts what the whole one would among those."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hspark.drafters.checkpoint import open_checkpoint
from hspark.drafters.checkpoint_files import CheckpointError
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.limits import FILE_NAME, DraftLimits, reduce_vocabulary
from tests.drafters.dspark_cases import GREEDY, SAMPLED, bound, feed, random_model, rows_of, save_model, tiny_config

CONFIG = tiny_config()
IDS = tuple(range(0, 40, 3))
TEXT = [1, 5, 9, 2, 7, 7]


def proposal(model: Any, mode: Any = GREEDY, **options: Any) -> Any:
    drafter = bound(model, **options)
    feed(drafter, 0, TEXT[:-1])
    return drafter.propose(rows_of([TEXT], temperature=0.0 if mode is GREEDY else 0.9), mode)


def test_reduced_logits_are_the_chosen_rows() -> None:
    whole = random_model(CONFIG)
    part = reduce_vocabulary(copy.deepcopy(whole), IDS)
    hidden, previous = torch.randn(2, 3, 16), torch.randint(0, 40, (2, 3))
    with torch.no_grad():
        expected = whole.base_logits(hidden) + whole.markov_bias(previous, hidden)
        got = part.base_logits(hidden) + part.markov_bias(previous, hidden)
    assert torch.equal(got, expected[..., list(IDS)])
    assert part.to_target(torch.arange(len(IDS))).tolist() == list(IDS)
    assert whole.config.drafts == 40


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
def test_drafts_stay_inside(mode: Any) -> None:
    chain = proposal(random_model(CONFIG), mode, vocabulary=IDS, length=3)
    assert chain.tokens.shape == (1, 3)
    assert set(chain.tokens.flatten().tolist()) <= set(IDS)
    everything = proposal(random_model(CONFIG), mode, vocabulary=tuple(range(40)))
    plain = proposal(random_model(CONFIG), mode)
    assert torch.equal(everything.tokens, plain.tokens)
    torch.testing.assert_close(everything.survival, plain.survival)


def test_a_checkpoint_says_what_it_is_worth(tmp_path: Path) -> None:
    save_model(random_model(CONFIG), tmp_path)
    DraftLimits(2, IDS).save(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert DSparkDrafter(checkpoint).width == 2
    assert DSparkDrafter(checkpoint).vocabulary == IDS
    assert DSparkDrafter(checkpoint, length=4, vocabulary=None).width == 4
    assert DSparkDrafter(checkpoint, length=4, vocabulary=None).vocabulary is None


@pytest.mark.parametrize(
    "values",
    [
        {"size": 3},
        {"length": 0},
        {"length": 9},
        {"length": True},
        {"length": "3"},
        {"vocabulary": [3, 2]},
        {"vocabulary": [40]},
        {"vocabulary": []},
        {"vocabulary": 5},
        {"vocabulary": [1, "a"]},
        {"vocabulary": {"1": 2}},
        {"vocabulary": "12"},
        {"vocabulary": [False, True]},
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, values: Any) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"drafting\.json: not the limits of this drafter .*; use"):
        DraftLimits.load_beside(tmp_path, 5, 40)


def test_ids_may_come_from_an_array() -> None:
    assert DSparkDrafter(random_model(CONFIG), vocabulary=torch.tensor([3, 5]), length=np.int64(2)).vocabulary == (3, 5)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"vocabulary=\[3, 3\] is not usable; use ascending ids from 0 to 39"):
        DSparkDrafter(random_model(CONFIG), vocabulary=[3, 3])
    with pytest.raises(ValueError, match="vocabulary='common'"):
        DSparkDrafter(random_model(CONFIG), vocabulary="common")
    with pytest.raises(ValueError, match="already drafts 14 of 40"):
        reduce_vocabulary(reduce_vocabulary(random_model(CONFIG), IDS), IDS)
