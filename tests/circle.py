"""A tiny real decoder whose output is known in advance: it goes round in a circle of tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from hspark import HybridSpeculator, SamplingParams
from tests.fixtures import FLAT
from tests.tiny import tiny_llama
from tests.toy_tokenizer import TOY_VOCAB, encode, toy_tokenizer

# No token occurs twice, so a table from token to token can say all of it.
CIRCLE = encode("né🙂 xyz!the")


@functools.cache
def circle_model() -> Any:
    """A real decoder that goes round CIRCLE: what follows depends on the last token alone."""
    assert len(set(CIRCLE)) == len(CIRCLE)
    model = tiny_llama(hidden_size=TOY_VOCAB, vocab_size=TOY_VOCAB, num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(TOY_VOCAB))
        model.lm_head.weight.zero_()
        for token, following in zip(CIRCLE, CIRCLE[1:] + CIRCLE[:1], strict=True):
            model.lm_head.weight[following, token] = 1.0
    return model


def speculator(tokenizer: Any = "toy", **settings: Any) -> HybridSpeculator:
    """Over the circle model, with n-gram drafts that are always right once the circle has closed."""
    settings = {"policy": "ngram_only", "budget": "all", "cost": FLAT, "max_length": 128, **settings}
    given = toy_tokenizer(chat=True) if tokenizer == "toy" else tokenizer
    return HybridSpeculator(copy.deepcopy(circle_model()), given, **settings)


def continuation(start: int, count: int) -> list[int]:
    """What the circle model writes after token CIRCLE[start]."""
    return [CIRCLE[(start + 1 + i) % len(CIRCLE)] for i in range(count)]


def params(cap: int = 30, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=cap, **more)
