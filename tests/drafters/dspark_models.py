"""A random DSpark network of every kind, and a batch of rows for it."""

from __future__ import annotations

from typing import Any

import torch

from hspark.core import RowState
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_model import DSparkModel
from hspark.sampling import SamplingMode
from tests.drafters.dspark_cases import bound, feed, random_model, rows_of, tiny_config

WINDOWED = {"windows": (4, None), "anchor_first": False, "draft_vocab_size": 25, "markov_head": "rnn"}
CONFIGS = {
    "anchor_first": tiny_config(),
    "bonus_windowed_reduced": tiny_config(**WINDOWED),
    "gemma": tiny_config(backbone="gemma4", key_is_value=True, logit_softcap=20.0, activation="gelu_pytorch_tanh"),
    "headless": tiny_config(
        markov_rank=0, markov_head="none", confidence_head=False, confidence_with_markov=False, attention_bias=True
    ),
    "gated": tiny_config(markov_head="gated", confidence_with_markov=False),
}
MODELS = {name: random_model(config, seed) for seed, (name, config) in enumerate(CONFIGS.items())}
TEXT = [(7 * i * i + 3 * i + 1) % 38 for i in range(40)]
SETTINGS: dict[str, Any] = {
    "temperature": torch.tensor([0.0, 0.6, 1.0, 1e-6, 1.5, 1.0]),
    "top_k": torch.tensor([0, 0, 3, 0, 0, 5]),
    "top_p": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.8, 1.0]),
    "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1]),
    "repetition_penalty": torch.tensor([1.0, 1.3, 1.0, 1.0, 1.0, 1.0]),
    "frequency_penalty": torch.tensor([0.5, 0.0, 0.4, 0.0, 0.0, 0.0]),
    "presence_penalty": torch.tensor([0.0, 0.2, 0.0, 0.0, 0.0, 0.3]),
}
ALL_PARTS = SamplingMode(sampled=True, filters=True, penalties=True, bias=True)


def a_batch(model: DSparkModel, **options: object) -> tuple[DSparkDrafter, RowState]:
    drafter = bound(model, rows=6, **options)  # type: ignore[arg-type]
    for row in range(6):
        feed(drafter, row, TEXT[row : row + 8])
    bias = torch.zeros(6, 40)
    bias[:, 3], bias[2:, 11] = -100.0, 2.0
    texts = [TEXT[row : row + 9] for row in range(6)]
    return drafter, rows_of(texts, prompt_length=4, seed=torch.arange(6) + 70, bias=bias, **SETTINGS)
