"""A tiny target on disk, with tokenizer and chat template, for tests that start from files."""

from __future__ import annotations

from pathlib import Path

import torch

from hspark.models import LoadedTarget, load_target
from tests.tiny import tiny_llama
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, toy_tokenizer


def save_tiny_target(path: Path, chat: bool = True, max_positions: int = 2048) -> Path:
    """A random decoder over the toy tokenizer's bytes that goes round in circles of four tokens, so n-grams match."""
    model = tiny_llama(1, vocab_size=TOY_VOCAB, max_position_embeddings=max_positions, eos_token_id=TOY_EOS)
    with torch.no_grad():
        for layer in model.model.layers:  # the last token decides what follows
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
        ids = torch.arange(TOY_VOCAB)
        model.lm_head.weight[ids // 4 * 4 + (ids + 1) % 4] = model.model.embed_tokens.weight[ids]
    model.save_pretrained(path)
    toy_tokenizer(chat).save_pretrained(path)
    return path


def load_tiny_target(path: Path) -> LoadedTarget:
    return load_target(path, "float32", "cpu", progress=False)
