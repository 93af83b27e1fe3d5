"""One target over several processes: what has to be the same in all of them.

Under tensor parallelism every process runs the same engine on the same requests, and the target's layers talk to each
other. Logits arrive whole, and equal, everywhere, so every decision made from them is the same everywhere too, as long
as nothing else differs: seeds that were drawn, and costs that were measured, are those of the first process.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


def is_sharded(model: Any) -> bool:
    """Whether a model's weights are spread over processes."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def whole_tensor(weight: Tensor) -> Tensor:
    """A weight in one piece, gathered from the processes if it is spread over them."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def from_first_rank(value: Value, sharded: bool) -> Value:
    """What the first process has, in all of them; `value` itself where the model is not spread over processes."""
    if not sharded:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def world_size() -> int:
    """Processes that torchrun has started, this one included. ValueError outside torchrun."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        raise ValueError(
            "tensor_parallel=True needs one process per device; start the program with "
            "torchrun --nproc-per-node=N program.py"
        )
    return int(os.environ["WORLD_SIZE"])


def own_device(device: torch.device) -> torch.device:
    """The device of this process among those of the machine."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))


def check_divisible(config: Any, processes: int) -> None:
    """ValueError, naming what does not divide, for a model that cannot be cut into so many parts."""
    text = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(text, name, None)
        if size is not None and size % processes:
            raise ValueError(
                f"tensor_parallel=True over {processes} processes does not fit this model: {name}={size} cannot be "
                f"divided by {processes}; use a number of processes that divides it"
            )
