"""A byte-level tokenizer made in memory: every character beyond ASCII takes several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("a", "b"), ("ab", "c")]
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@cache
def toy_tokenizer(chat: bool = False) -> Any:
    """Ids: 256 bytes, then the merges, then <eos>. `chat` adds a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, *(a + b for a, b in MERGES), "<eos>"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


TOY_VOCAB = 256 + len(MERGES) + 1
TOY_EOS = TOY_VOCAB - 1


def encode(text: str) -> list[int]:
    return list(toy_tokenizer()(text)["input_ids"])


def decode(ids: Sequence[int]) -> str:
    """The text of all ids at once, special tokens left out."""
    return toy_tokenizer().decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
