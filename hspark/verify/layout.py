"""The packed layout of one verification: which slot of which row lies where among the T packed tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """T packed slots of B rows. Slot k of a row is input token k of its verification: 0 the anchor, k > 0 draft k.

    row:    int64 [T] row of each packed slot (0 in padding).
    offset: int64 [T] slot number within the row, 0..W (0 in padding).
    valid:  bool  [T] False in padding.
    index:  int64 [B, W + 1] packed index of slot k of row b, clamped into 0..T-1 where the slot is not packed.
    """

    row: Tensor
    offset: Tensor
    valid: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nothing here uses


def pack(kept: Tensor, running: Tensor, width: int, size: int) -> Layout:
    """Packs 1 + kept slots of every running row, rows in order, into `size` slots; the rest is padding.

    kept: int64 [B] draft slots to verify per row, 0..width. running: bool [B]; other rows get no slot.
    width: W. size: T, static; the caller guarantees sum(1 + kept over running rows) <= size.
    Example: kept [2, 0, 1], all running, size 8: row 0 0 0 1 2 2 . .   offset 0 1 2 0 0 1 . .
    """
    count = torch.where(running, kept + 1, 0)
    end = count.cumsum(0)
    start = end - count
    slot = torch.arange(size, device=kept.device)
    valid = slot < end[-1]
    row = torch.searchsorted(end, slot, right=True).clamp(max=kept.shape[0] - 1)
    row = torch.where(valid, row, 0)
    offset = torch.where(valid, slot - start[row], 0)
    index = (start[:, None] + torch.arange(width + 1, device=kept.device)).clamp(max=size - 1)
    return Layout(row, offset, valid, index)
