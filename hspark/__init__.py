"""hspark: hybrid speculative decoding in plain PyTorch.

    from hspark import HybridSpeculator, SamplingParams

    speculator = HybridSpeculator.from_pretrained("smollm2-135m")
    outputs = speculator.generate("Write a function that adds two numbers.", SamplingParams(max_new_tokens=64))

Names are imported when they are first used, so `hspark.policy` and `hspark.verify` cost nothing but torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hspark.config import EngineConfig, SamplingParams
    from hspark.core import RequestOutput
    from hspark.speculator import HybridSpeculator, StreamChunk

__all__ = ["EngineConfig", "HybridSpeculator", "RequestOutput", "SamplingParams", "StreamChunk"]
__version__ = "0.1.0"

_HOMES = {
    "EngineConfig": "hspark.config",
    "HybridSpeculator": "hspark.speculator",
    "RequestOutput": "hspark.core",
    "SamplingParams": "hspark.config",
    "StreamChunk": "hspark.speculator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hspark' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
