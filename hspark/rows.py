"""The device's record of the rows, and the static sizes that steps over them come in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hspark.config import SamplingParams
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


def write_request(
    rows: RowState, row: int, prompt: list[int], params: SamplingParams, seed: int, vocab_size: int
) -> RowState:
    """Everything that the device needs to know of a request, except its keys and values, written into one row.

    Returns the rows: the same tensors, with a table of biases [R, V] from the first request on that asks for one.
    """
    device = rows.tokens.device
    # A copy from pageable memory would wait until the device has done all that is enqueued.
    tokens = torch.tensor(prompt, pin_memory=device.type == "cuda")
    rows.tokens[row, : len(prompt)] = tokens.to(device, non_blocking=True)
    rows.length[row] = len(prompt)
    rows.prompt_length[row] = len(prompt)
    rows.limit[row] = min(len(prompt) + params.max_new_tokens, rows.tokens.shape[1] - 1)
    sampling = rows.sampling
    values = {name: getattr(params, name) for name in SamplingState._fields if name not in ("seed", "bias")}
    for name, value in {**values, "seed": seed}.items():
        getattr(sampling, name)[row] = value
    if params.logit_bias and sampling.bias is None:
        sampling = sampling._replace(bias=torch.zeros(rows.tokens.shape[0], vocab_size, device=device))
    if sampling.bias is not None:
        sampling.bias[row] = 0.0
        for token, value in (params.logit_bias or {}).items():
            sampling.bias[row, token] = value
    return rows._replace(sampling=sampling)


def check_row(rows: RowState, row: int, owner: Any, ready: bool, settled: bool, capacity: int) -> None:
    """RuntimeError if a row does not hold what its request has been told. owner: the `Request` in it, or None.

    ready: its prompt is processed. settled: no step is in flight, so that lengths and texts must agree.
    """
    length, running = int(rows.length[row]), bool(rows.running[row])
    if owner is None:
        if running or length != 1:
            raise RuntimeError(f"row {row} is free, but running={running} and length={length}")
        return
    text = owner.prompt + owner.token_ids
    if owner.done:
        raise RuntimeError(f"row {row} still holds request {owner.number}, which has ended")
    if running != ready:
        raise RuntimeError(f"row {row}: running={running}, but {owner.prefilled} tokens are prefilled")
    if settled and (length != len(text) or rows.tokens[row, :length].tolist() != text):
        raise RuntimeError(f"row {row} holds other tokens than request {owner.number}")
    if length > int(rows.limit[row]) or length > capacity:
        raise RuntimeError(f"row {row} has length {length}, past its limit")
