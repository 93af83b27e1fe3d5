"""Rotary position embeddings of DSpark drafters: the frequency tables of every dialect found in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from hspark.policy.curves import as_float

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """One rotation, in the words of `rope_parameters` (transformers 5). Fields that a type does not use stay None.

    rope_theta: base of the geometric series of frequencies.
    factor: context extension of linear, llama3 and yarn.
    partial_rotary_factor: share of the frequencies that rotate. Only "proportional" reads it; Qwen3-style drafters
        rotate the whole head even where a copied key says otherwise.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    partial_rotary_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    _REQUIRED = {  # noqa: RUF012 - a constant, not a field
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
        "proportional": ("partial_rotary_factor",),
    }

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type={self.rope_type!r} is not supported; use one of {', '.join(ROPE_TYPES)}")
        if (as_float(self.rope_theta) or 0) <= 1:
            raise ValueError(f"rope_theta={self.rope_theta!r} is not a base; use a finite number above 1")
        required = self._REQUIRED.get(self.rope_type, ())
        for name in (field.name for field in fields(self)[2:] if field.name != "truncate"):
            value = getattr(self, name)
            number = as_float(value)
            if value is None and name not in required:
                continue
            # 0 switches yarn's mscale off.
            if number is None or number < 0 or (number == 0 and not name.startswith("mscale")):
                raise ValueError(f"{name}={value!r} with rope_type={self.rope_type!r}; use a finite number above 0")
        if not isinstance(self.truncate, bool | None):
            raise ValueError(f"truncate={self.truncate!r}; use True, False or None")
        if (self.partial_rotary_factor or 0) > 1:
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor!r} is no share; use at most 1")
        if self.rope_type == "llama3" and not _number(self.high_freq_factor) > _number(self.low_freq_factor):
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor!r}; use a number above low_freq_factor={self.low_freq_factor}"
            )

    @staticmethod
    def from_dict(parameters: Mapping[str, Any]) -> RopeConfig:
        """From a flat `rope_parameters` or `rope_scaling` dict; the old key `type` counts as `rope_type`."""
        known = {field.name for field in fields(RopeConfig)}
        values = {key: value for key, value in parameters.items() if key in known and value is not None}
        values.setdefault("rope_type", parameters.get("type") or "default")
        return RopeConfig(**values)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def frequencies(self, dim: int) -> Tensor:
        """float32 [dim / 2] radians per position, on the CPU, for heads of width `dim`."""
        # The explicit device keeps the table real when the model around it is built on the meta device.
        half = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float()
        plain = 1.0 / (self.rope_theta ** (half / dim))
        if self.rope_type == "linear":
            return plain / _number(self.factor)
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(plain, dim)
        if self.rope_type == "proportional":
            # The series is that of the full width; its tail stands still (zero frequency is the identity).
            rotating = int(_number(self.partial_rotary_factor) * dim // 2)
            return torch.where(torch.arange(dim // 2, device="cpu") < rotating, plain, 0.0)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
        low, high = _number(self.low_freq_factor), _number(self.high_freq_factor)
        turns = _number(self.original_max_position_embeddings) * plain / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * plain / _number(self.factor) + blend * plain

    def _yarn(self, plain: Tensor, dim: int) -> Tensor:
        """YaRN (Peng et al. 2023): a linear ramp over the dimensions between kept and stretched frequencies."""

        def dimension(turns: float) -> float:
            length = _number(self.original_max_position_embeddings)
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.rope_theta))

        low = dimension(32.0 if self.beta_fast is None else self.beta_fast)
        high = dimension(1.0 if self.beta_slow is None else self.beta_slow)
        if self.truncate is None or self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        span = (high - low) or 0.001
        ramp = ((torch.arange(dim // 2, device="cpu").float() - low) / span).clamp(0.0, 1.0)
        return plain / _number(self.factor) * ramp + plain * (1 - ramp)

    @property
    def attention_scaling(self) -> float:
        """What cosine and sine are multiplied by (1 except for yarn)."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(weight: float) -> float:
            factor = _number(self.factor)
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


def _number(value: float | None) -> float:
    if value is None:  # unreachable after validation; it keeps the type checker honest
        raise ValueError("a rope parameter is missing")
    return value


class Rotary(nn.Module):
    """Cosines and sines of absolute positions. The table stays float32 whatever the model is cast to."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig, dim: int) -> None:
        super().__init__()
        self.config, self.dim = config, dim
        self.register_buffer("inv_freq", config.frequencies(dim), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)
        # Casting the model must not round the frequencies: at position 10^4 a bfloat16 frequency is meaningless.
        self.inv_freq = self.config.frequencies(self.dim).to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions int64 [...] -> cosine and sine, each [..., 1, dim] (1: all heads alike), of `dtype`."""
        angles = positions[..., None, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        scaling = self.config.attention_scaling
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates x [..., heads, dim], pairing each dimension of the first half with one of the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
