"""How large DSpark checkpoints are, and what loading one takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_model import DSparkModel
from tests.drafters.dspark_cases import (
    save_model,
    tiny_config,
)

QWEN: dict[str, Any] = {
    "num_layers": 5,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "taps": (1, 9, 17, 25, 33),
    "num_target_layers": 36,
    "block_size": 7,
    "mask_token_id": 151669,
    "markov_rank": 256,
    "markov_head": "vanilla",
    "confidence_head": True,
    "confidence_with_markov": True,
}
LLAMA = QWEN | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "mask_token_id": 128255,
    "taps": (1, 8, 15, 22, 28),
    "num_target_layers": 32,
    "block_size": 8,
    "windows": (2048,) * 5,
}


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (QWEN | {"hidden_size": 2560, "intermediate_size": 9728}, 1_393_133_569),
        (QWEN | {"hidden_size": 4096, "intermediate_size": 12288}, 2_371_081_729),
        (LLAMA, 1_872_054_273),
    ],
    ids=["qwen3-4b", "qwen3-8b", "llama3.1-8b"],
)
def test_published_sizes(settings: dict[str, Any], count: int) -> None:
    """Elements of everything stored, maps included, from the published dimensions, without allocating any."""
    with torch.device("meta"):
        model = DSparkModel(DSparkConfig(**settings))
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == count


PEAK = """
import sys
from hspark.drafters.checkpoint import open_checkpoint

def high_water():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(sys.argv[1])
before = high_water()
model = checkpoint.load()
touched = sum(float(p.flatten()[::512].float().sum()) for p in model.parameters())
print(sum(p.nbytes for p in model.parameters()), high_water() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading_is_about_one_copy(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=512, intermediate_size=1500, vocab_size=8000, mask_token_id=7)
    path = save_model(DSparkModel(config), tmp_path)
    result = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    size, peak = (int(word) for word in result.stdout.split())
    assert size > 50e6
    assert 0.5 * size < peak < 1.3 * size, f"peak {peak / size:.2f} copies"
