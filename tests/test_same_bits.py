"""In bfloat16, on a CPU with AMX, a token has the same bits whatever else a step holds: near-ties do not flip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hspark.target import CausalTarget
from tests.processor import AMX
from tests.test_target import LENGTH, verify_step
from tests.tiny import VOCAB, tiny_llama

ROWS, WIDTH = 4, 15
# Drafts of each row. 11 slots with three heads each are one query more than a block of 32.
PACKS = [[15, 15, 15, 15], [10, 10, 10, 10], [10, 0, 0, 0], [3, 7, 0, 15], [0, -1, -1, -1], [15, -1, 15, -1]]

pytestmark = pytest.mark.skipif(not AMX, reason="kernels for this processor do not keep to one order")


def build(heads: int, kv_heads: int) -> CausalTarget:
    """Eight layers as wide as those of the default model, with its head size."""
    sizes: dict[str, Any] = {"hidden_size": heads * 64, "intermediate_size": 1536, "num_hidden_layers": 8}
    model = tiny_llama(num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes)
    return CausalTarget(model.bfloat16(), ROWS, LENGTH)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 2)])
@pytest.mark.parametrize("exact_size", [False, True], ids=["padded", "exact"])
def test_verifying_drafts_has_the_bits_of_plain_decoding(heads: int, kv_heads: int, exact_size: bool) -> None:
    target = build(heads, kv_heads)
    text = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    length = torch.tensor([9, 40, 23, 31])
    for row in range(ROWS):
        target.prefill(text[row, : length[row] - 1], row, 0)
    nothing = text.new_zeros(ROWS, 0)
    plain = []  # one token of each row at a time
    for step in range(WIDTH + 1):
        logits, _, layout = verify_step(target, text, length - 1 + step, nothing, torch.zeros(ROWS, dtype=torch.int64))
        plain.append(logits[layout.index[:, 0]])
    drafts = torch.stack([text[row, length[row] : length[row] + WIDTH] for row in range(ROWS)])
    for slots in PACKS:
        running = torch.tensor(slots) >= 0
        anchor, kept = torch.where(running, length - 1, -1), torch.tensor(slots).clamp(min=0)
        span = (0, 1 + int(running.nonzero().max())) if exact_size else None
        logits, _, layout = verify_step(target, text, anchor, drafts, kept, span)
        for row in running.nonzero()[:, 0].tolist():
            for offset in range(slots[row] + 1):
                assert torch.equal(logits[layout.index[row, offset]], plain[offset][row]), (slots, row, offset)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "expected"),
    [(9, 3, 11, 12), (9, 3, 10, 10), (9, 3, 1, 1), (4, 4, 1, 2), (4, 4, 2, 2), (8, 2, 16, 16)],
)
def test_no_query_is_left_over_by_itself(heads: int, kv_heads: int, queries: int, expected: int) -> None:
    """Heads that share keys are queries of one row to the attention's kernel, which takes 32 of them at a time."""
    rows = torch.arange(ROWS).repeat_interleave(queries)
    offsets = torch.arange(queries).repeat(ROWS)
    index = torch.arange(ROWS * queries).view(ROWS, queries)
    place = (rows, offsets, rows >= 0, index, torch.full((ROWS,), 5), LENGTH)
    plan = build(heads, kv_heads).plan(*place, full=True)
    assert plan.grid.shape == (ROWS, expected)
    assert plan.dense == (expected == queries)
