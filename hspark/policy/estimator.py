"""Calibrated acceptance of model-free drafts: equation 1 of the paper, its published coefficients, and its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hspark.policy.curves import as_float, whole

_ASSET = Path(__file__).resolve().parent.parent / "assets" / "estimators.json"
_KIND = "acceptance-estimator"
_LIMITS = ("min_match", "max_match", "copy_cap", "width")


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of equation 1: one intercept per draft position, and one weight per match feature.

    beta: beta_1..beta_L. w: match length. delta: agreement. l: bonus of a full match. kappa: logarithm of the copy
    length of a full match. w, l and kappa differ between the first draft position and the rest.
    """

    beta: tuple[float, ...]
    w_first: float = 0.0
    w_rest: float = 0.0
    delta: float = 0.0
    l_first: float = 0.0
    l_rest: float = 0.0
    kappa_first: float = 0.0
    kappa_rest: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.beta, str) or not isinstance(self.beta, list | tuple) or not self.beta:
            raise ValueError(f"beta={self.beta!r} is not usable; use a list of at least 1 number, one per position")
        object.__setattr__(self, "beta", tuple(_finite(f"beta[{i}]", value) for i, value in enumerate(self.beta)))
        for field in fields(self)[1:]:
            object.__setattr__(self, field.name, _finite(field.name, getattr(self, field.name)))


class AcceptanceEstimator:
    """Equation 1: the probability that draft position k of a match is accepted, given that all before it were.

    min_match, max_match, copy_cap: the limits of the drafter that the coefficients were fitted for (5, 15 and 256 in
    the paper). width: L, draft positions estimated; by default one per intercept. Positions beyond the last intercept
    use the last one. provenance: where the coefficients come from, JSON-ready; saved with them.

    Immutable. The coefficients are tensors on one device: move them with `.to(device)` before a step runs there.
    """

    def __init__(
        self,
        coefficients: Coefficients,
        *,
        min_match: int = 5,
        max_match: int = 15,
        copy_cap: int = 256,
        width: int | None = None,
        provenance: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.coefficients = coefficients
        self.min_match = whole("min_match", min_match, 1)
        self.max_match = whole("max_match", max_match, self.min_match)
        self.copy_cap = whole("copy_cap", copy_cap, self.max_match)
        self.width = whole("width", len(coefficients.beta) if width is None else width, 1)
        self.provenance = dict(provenance or {})
        self.device, self.dtype = torch.device(device), dtype

        def table(values: list[float]) -> Tensor:
            return torch.tensor(values[: self.width], device=device, dtype=dtype)

        rest = self.width - 1
        self._beta = table([*coefficients.beta, *[coefficients.beta[-1]] * self.width])
        self._w = table([coefficients.w_first, *[coefficients.w_rest] * rest])
        self._l = table([coefficients.l_first, *[coefficients.l_rest] * rest])
        self._kappa = table([coefficients.kappa_first, *[coefficients.kappa_rest] * rest])
        self._delta = torch.tensor(coefficients.delta, device=device, dtype=dtype)

    def __call__(self, match_length: Tensor, agreement: Tensor, copy_length: Tensor) -> Tensor:
        """h_k, float32 [B, L]; survival is its running product.

        match_length: n, int64 [B]. agreement: a, 0/1 or bool [B]. copy_length: m, int64 [B], read only where
        n = max_match. Rows without a match (n below min_match) get numbers without meaning, never NaN.
        """
        return self.logits(match_length, agreement, copy_length).sigmoid()

    def logits(self, match_length: Tensor, agreement: Tensor, copy_length: Tensor) -> Tensor:
        """The argument of the logistic function in equation 1, [B, L]; arguments as for calling the estimator."""
        beyond = (match_length - self.min_match)[:, None].to(self.dtype)
        full = (match_length >= self.max_match)[:, None]
        copied = copy_length.clamp(self.max_match, self.copy_cap)[:, None].to(self.dtype)
        long_copy = self._l + self._kappa * (copied / self.max_match).log()
        always = self._beta + self._w * beyond + self._delta * agreement[:, None].to(self.dtype)
        return always + torch.where(full, long_copy, 0.0)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> AcceptanceEstimator:
        """The same estimator on another device or in another precision."""
        return self._copy(device=device or self.device, dtype=dtype or self.dtype)

    def with_width(self, width: int) -> AcceptanceEstimator:
        """The same estimator for chains of `width` positions; those beyond the last intercept use the last one."""
        return self._copy(width=width)

    def _copy(self, **changes: Any) -> AcceptanceEstimator:
        names = ("coefficients", *_LIMITS, "provenance", "device", "dtype")
        return AcceptanceEstimator(**({name: getattr(self, name) for name in names} | changes))

    def __repr__(self) -> str:
        source = self.provenance.get("source", "unknown source")
        return f"AcceptanceEstimator({source}, width={self.width}, {self.coefficients})"

    @classmethod
    def fit(cls, steps: Any, level: int = 6, **options: Any) -> AcceptanceEstimator:
        """Fits the coefficients to graded steps; see `hspark.policy.fitting.fit` for arguments and result."""
        from hspark.policy.fitting import fit

        return fit(steps, level, **options)

    # Named coefficients

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        """The names that `preset` accepts: published fits, and the paper's ladder of simpler ones (table 7)."""
        return tuple(_presets()["presets"])

    @classmethod
    def preset(cls, name: str) -> AcceptanceEstimator:
        """The shipped coefficients called `name`. ValueError for an unknown name, listing the valid ones.

        beta_8 of "llama3.1-8b" is as the paper prints it, -0.420; it may be a misprint for 0.420 (see its provenance).
        """
        presets = _presets()["presets"]
        if name not in presets:
            raise ValueError(f"estimator={name!r} is unknown; use one of {', '.join(map(repr, presets))}")
        return _from_record(presets[name], f"preset {name!r}")

    @classmethod
    def for_target(cls, target: str) -> tuple[AcceptanceEstimator, str]:
        """The estimator for a target model, and a sentence that says which one it is and why.

        target: a hub id, a directory or a preset's name. A target is known by the last part of its name, whatever the
        case: "/models/Qwen3-8B" is Qwen/Qwen3-8B. Others get the fit for Qwen3-4B.
        """
        wanted = _last_part(target)
        shipped = _presets()
        for name, record in shipped["presets"].items():
            if target.lower() == name or wanted in (name, *map(_last_part, record["targets"])):
                remark = record["provenance"].get("remark")
                note = f"estimator: {name!r}, fitted for {target} ({record['provenance']['source']})"
                return cls.preset(name), f"{note}; {remark}" if remark else note
        default = shipped["default"]
        return cls.preset(default), (
            f"estimator: no coefficients are known for {target}, using those of {default!r}; survivals may be "
            "miscalibrated. "
            f"Fit your own with AcceptanceEstimator.fit, or name one of {', '.join(shipped['presets'])}"
        )

    @classmethod
    def resolve(cls, estimator: str | os.PathLike[str], target: str) -> tuple[AcceptanceEstimator, str]:
        """The estimator meant by "auto" (see `for_target`), a preset's name or the path of a saved one, and a note."""
        if estimator == "auto":
            return cls.for_target(target)
        if estimator in cls.preset_names():
            return cls.preset(str(estimator)), f"estimator: {str(estimator)!r}, as asked for"
        if not Path(estimator).exists():
            raise ValueError(
                f"estimator={str(estimator)!r} is neither a file nor a preset; use 'auto', the path of a saved "
                f"estimator, or one of {', '.join(map(repr, cls.preset_names()))}"
            )
        return cls.load(estimator), f"estimator: loaded from {estimator}"

    # Files

    def to_record(self) -> dict[str, Any]:
        """The JSON form: coefficients, limits of the drafter, width, provenance."""
        coefficients = asdict(self.coefficients) | {"beta": list(self.coefficients.beta)}
        limits = {key: getattr(self, key) for key in _LIMITS}
        return {"kind": _KIND, "coefficients": coefficients, **limits, "provenance": self.provenance}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file that `load` reads."""
        Path(path).write_text(json.dumps(self.to_record(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AcceptanceEstimator:
        """The estimator saved at `path`. ValueError naming the file, the key that is wrong, and what is accepted."""
        where = f"estimator file {str(path)!r}"
        try:
            record = json.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"{where} cannot be read ({error.strerror}); use a file written by save()") from error
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}); use a file written by save()") from error
        if not isinstance(record, dict) or record.get("kind") != _KIND:
            kind = record.get("kind") if isinstance(record, dict) else None
            raise ValueError(f"{where}: key 'kind' is {kind!r}; use a file written by save(), of kind {_KIND!r}")
        return _from_record(record, where)


def _from_record(record: Mapping[str, Any], where: str) -> AcceptanceEstimator:
    """The estimator of a JSON record; ValueError that starts with `where` and names the key."""
    known = {"kind", "coefficients", "provenance", "targets", *_LIMITS}
    coefficients = record.get("coefficients")
    names = [field.name for field in fields(Coefficients)]
    if set(record) - known:
        raise ValueError(f"{where} has unknown keys {sorted(set(record) - known)}; use {sorted(known)}")
    if not isinstance(coefficients, dict) or set(coefficients) != set(names):
        raise ValueError(
            f"{where}: key 'coefficients' is {coefficients!r}; use an object with exactly the keys {names}"
        )
    if not isinstance(record.get("provenance", {}), dict):
        raise ValueError(f"{where}: key 'provenance' is {record['provenance']!r}; use an object")
    try:
        return AcceptanceEstimator(
            Coefficients(**coefficients),
            provenance=record.get("provenance"),
            **{key: record[key] for key in _LIMITS if key in record},
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _finite(name: str, value: Any) -> float:
    number = as_float(value)
    if number is None:
        raise ValueError(f"{name}={value!r} is not usable; use a finite number")
    return number


def _last_part(name: str) -> str:
    """ "Qwen/Qwen3-4B" and "/models/Qwen3-4B/" → "qwen3-4b"."""
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()


@cache
def _presets() -> dict[str, Any]:
    return json.loads(_ASSET.read_text())
