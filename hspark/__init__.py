"""hspark: hybrid speculative decoding in plain PyTorch.

from hspark import HybridSpeculator, SamplingParams

speculator = HybridSpeculator.from_pretrained("smollm2-135m")
outputs = speculator.generate("Write a function that adds two numbers.", SamplingParams(max_new_tokens=64))
"""

from hspark.config import EngineConfig, SamplingParams
from hspark.core import RequestOutput
from hspark.speculator import HybridSpeculator, StreamChunk

__all__ = ["EngineConfig", "HybridSpeculator", "RequestOutput", "SamplingParams", "StreamChunk"]
__version__ = "0.1.0"
