"""What a speculator needs beside its weights, and whether that fits.

    peak = weights + keys and values + drafter's context + logits
    keys and values    sum over layers of rows * (max_length + 1) * kv_heads * (key_dim + value_dim) * bytes of the type
    drafter's context  the same for its layers (DSpark), or its own keys and values (a draft model)
    logits             4 * rows * (width + 1) * vocabulary * 4 bytes: logits, law, noise and their sum, in float32

Keys and values come first and are the one part that the caller's max_batch_size and max_length decide, so they are
checked, with the logits, before anything is allocated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# Draft slots that a row may have, where the check comes before the drafters are known.
USUAL_WIDTH = 15
# Of a control group: its limit, what is used, and in memory.stat the part of it that is given back when needed.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),  # version 2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device` without swapping, where the system tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu" and sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min([int(line.split()[1]) * 1024, *_free_in_groups()])
    return None


def _free_in_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Bytes left below each memory limit of the control groups that this process is in, such as a container's."""
    free = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit, used, cache) = (root / "memory", _GROUP_FILES[1]) if controllers else (root, _GROUP_FILES[0])
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):  # a container may see its own group as the top one, whatever the path
            numbers = [_read(folder / name).strip() for name in (limit, used)]
            if all(number.isdecimal() for number in numbers):  # a limit may also be "max"
                entries = dict(entry.split() for entry in _read(folder / "memory.stat").splitlines())
                free.append(max(0, int(numbers[0]) - int(numbers[1]) + int(entries.get(cache, 0))))
            if folder == top:
                break
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def logits_bytes(rows: int, vocab_size: int, width: int = USUAL_WIDTH) -> int:
    """Bytes of the largest tensors of a step in which every slot is verified."""
    return 4 * rows * (width + 1) * vocab_size * 4


def check_memory(kv_bytes: int, rows: int, max_length: int, vocab_size: int, device: torch.device) -> None:
    """ValueError, naming max_batch_size and max_length, if keys, values and logits will not fit."""
    free = free_memory(device)
    needed = kv_bytes + logits_bytes(rows, vocab_size)
    if free is None or needed <= free:
        return
    room = max(0.0, free - logits_bytes(rows, vocab_size)) / max(kv_bytes, 1)
    raise ValueError(
        f"max_batch_size={rows} and max_length={max_length} need {needed / 2**30:.1f} GiB of keys, values and logits, "
        f"and {free / 2**30:.1f} GiB are free on {device}; use a smaller product, for example max_batch_size="
        f"{max(1, int(rows * room))} or max_length={max(2, int(max_length * room))}"
    )
