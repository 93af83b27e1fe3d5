"""The device's record of the rows, and the static sizes that steps over them come in."""

from __future__ import annotations

import torch
from torch import Tensor

from hspark.core import RowState
from hspark.sampling import SamplingState

# Packed sizes of a verification that are measured at start-up and, on an accelerator or compiled, padded to.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def packed_sizes(rows: int, width: int) -> tuple[int, ...]:
    """The packed sizes in use for `rows` rows with chains of `width`, up to every slot of every row."""
    most = rows * (width + 1)
    return (*(size for size in SIZES if size < most), most)


def new_rows(rows: int, max_length: int, device: torch.device) -> RowState:
    """All rows free. `tokens` has one column more than max_length: the dump column."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return RowState(
        tokens=zeros(rows, max_length + 1),
        length=torch.ones(rows, dtype=torch.int64, device=device),
        prompt_length=zeros(rows),
        limit=zeros(rows),
        running=zeros(rows, dtype=torch.bool),
        sampling=SamplingState.defaults(rows, device),
    )
