"""What a measurement was made with: machine, threads, versions."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import hspark


def machine_facts(device: torch.device) -> dict[str, Any]:
    """A JSON-ready record of this machine as it is now, load included."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": load_average(),
        "device": _device(device),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "hspark": hspark.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def load_average() -> float | None:
    """Runnable processes over the last minute, where the system tells."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _processor() -> str:
    """The processor's name, as the system gives it."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _device(device: torch.device) -> str:
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def copy_bandwidth(device: torch.device, size: int = 512 << 20, repeats: int = 7) -> float:
    """Bytes per second, read and written together, of copying `size` bytes on `device`: the best of the repeats.

    `size` should be well above every cache of the processor. The threads are torch's.
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    synchronise = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    best = 0.0
    for _ in range(repeats):
        synchronise()
        begun = time.perf_counter()
        target.copy_(source)
        synchronise()
        best = max(best, 2 * size / (time.perf_counter() - begun))
    return best
