"""A tiny target on disk, with tokenizer and chat template, for tests that start from files."""

from __future__ import annotations

from pathlib import Path

from hspark.models import LoadedTarget, load_target
from tests.tiny import tiny_llama
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, toy_tokenizer


def save_tiny_target(path: Path, chat: bool = True, max_positions: int = 2048) -> Path:
    """A random 3-layer decoder over the toy tokenizer's bytes. Its outputs soon repeat, so that n-grams match."""
    model = tiny_llama(1, vocab_size=TOY_VOCAB, max_position_embeddings=max_positions, eos_token_id=TOY_EOS)
    model.save_pretrained(path)
    toy_tokenizer(chat).save_pretrained(path)
    return path


def load_tiny_target(path: Path) -> LoadedTarget:
    return load_target(path, "float32", "cpu", progress=False)
