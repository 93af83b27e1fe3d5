"""Reading DSpark checkpoints: a directory (or hub repository) with `config.json` and safetensors, in either layout.

`open_checkpoint` reads the config and the tensor headers and checks them against each other without touching a weight.
`Checkpoint.load` then reads every weight once, straight into its place: peak memory is one copy of the drafter.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hspark.drafters.base import TargetInfo
from hspark.drafters.checkpoint_files import (
    CheckpointError,
    Stored,
    locate,
    read_headers,
    read_object,
    read_tensors,
    some,
)
from hspark.drafters.confidence import Calibration
from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_model import DSparkModel
from hspark.drafters.layouts import ConfigError, read_config
from hspark.drafters.limits import DraftLimits
from hspark.parallel import whole_tensor

logger = logging.getLogger(__name__)

TABLES = ("embed_tokens.weight", "lm_head.weight")
MAPS = ("d2t", "t2d")
# Extras of other exporters and of training; the drafter has no use for them.
IGNORED = re.compile(r"mask_embedding(\.weight)?|verifier_(lm_head|norm)\.weight|rotary_emb\.inv_freq")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Vocabularies of one tokenizer differ by padding to a multiple of something; beyond this it is another tokenizer.
MAX_PADDING = 1024


class TargetMismatchError(ValueError):
    """A drafter that does not fit the target it is to draft for."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened and checked checkpoint: its settings, and where each tensor that the drafter uses lies.

    maps: d2t and t2d of a reduced draft vocabulary, else empty.
    """

    path: Path
    config: DSparkConfig
    layout: str
    target_name: str | None
    tensors: Mapping[str, Stored]
    maps: Mapping[str, Tensor]
    calibration: Calibration
    limits: DraftLimits = field(default_factory=DraftLimits)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the weights are stored in."""
        return FLOATS[self.tensors["fc.weight"].dtype]

    def load(
        self,
        target: TargetInfo | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> DSparkModel:
        """The drafter's network, in evaluation mode and frozen.

        target: supplies tables that the checkpoint lacks, and its dtype and device unless these are given. Tables that
        equal the target's are shared with it. Without a target, missing tables stay missing (see `share_tables`).
        CheckpointError if a weight cannot be read, TargetMismatchError if the target does not fit.
        """
        if target is not None:
            self.check_fit(target)
        dtype = dtype or (target.dtype if target else self.dtype)
        device = torch.device(device or (target.device if target else "cpu"))
        with torch.device("meta"):
            model = DSparkModel(self.config, tables=False)
        weights = {name: tensor.to(device) for name, tensor in self.maps.items()}
        for name, tensor in read_tensors(self.tensors, lambda name: name not in TABLES):
            weights[name] = tensor.to(device, dtype)
        model.load_state_dict(weights, strict=True, assign=True)
        model = model.to(device=device, dtype=dtype)
        for name in TABLES:
            self._load_table(model, name, target)
        return model.eval().requires_grad_(False)

    def _load_table(self, model: DSparkModel, name: str, target: TargetInfo | None) -> None:
        """embed_tokens or lm_head: the stored one, or the target's where it is missing, blank or the same."""
        device, dtype = model.fc.weight.device, model.fc.weight.dtype
        table = dict(read_tensors(self.tensors, lambda stored: stored == name)).get(name)
        table = None if table is None or _is_blank(table) else table
        shared = target_table(target, name)
        if shared is not None:
            fits = shared.dtype == dtype and shared.device == device
            ids = model.target_ids() if name == TABLES[1] else torch.arange(self.config.vocab_size)
            if table is None or (fits and _same(table, shared, ids)):
                model.share_tables(**{name.removesuffix(".weight"): shared.to(device, dtype)})
                return
        if table is not None:
            model.set_table(name.removesuffix(".weight"), table.to(device, dtype))
        elif target is not None:
            raise TargetMismatchError(
                f"{self.path}: {name} is not stored, and target {target.name!r} has no plain table to use in its place"
            )

    def check_fit(self, target: TargetInfo) -> None:
        """TargetMismatchError unless this drafter can draft for `target`; a warning if it was made for another one."""
        check_fit(self.config, target, str(self.path))
        if self.layout == "deepspec":
            refuse_final_tap(self.config, target.num_layers, str(self.path))
        for name in TABLES:
            table = target_table(target, name)
            if name not in self.tensors and table is not None and table.shape[0] < self.config.vocab_size:
                raise TargetMismatchError(
                    f"{self.path}: {name} is not stored, and the table of target {target.name!r} has "
                    f"{table.shape[0]} rows; expected at least vocab_size={self.config.vocab_size}"
                )
        if self.target_name and self.target_name.split("/")[-1].lower() not in target.name.lower():
            logger.warning("%s was made for %s and drafts for %s", self.path, self.target_name, target.name)


def check_fit(config: DSparkConfig, target: TargetInfo, source: str) -> None:
    """TargetMismatchError unless sizes, depth, taps and vocabulary of drafter and target go together."""

    def refuse(name: str, own: object, theirs: object, accepted: str) -> TargetMismatchError:
        return TargetMismatchError(
            f"{source}: the drafter has {name}={own}, target {target.name!r} has {theirs}; {accepted}"
        )

    if config.hidden_size != target.hidden_size:
        raise refuse("hidden_size", config.hidden_size, target.hidden_size, "use a drafter made for this target")
    if config.num_target_layers not in (None, target.num_layers):
        raise refuse(
            "num_target_layers", config.num_target_layers, target.num_layers, "use a drafter made for this target"
        )
    if config.taps[-1] >= target.num_layers:
        layers = f"layers 0..{target.num_layers - 1}"
        raise refuse("taps", list(config.taps), layers, "use a drafter made for this target")
    if abs(config.vocab_size - target.vocab_size) > MAX_PADDING:
        accepted = f"they may differ by padding (up to {MAX_PADDING}), not by tokenizer"
        raise refuse("vocab_size", config.vocab_size, target.vocab_size, accepted)


def open_checkpoint(path: str | PathLike[Any]) -> Checkpoint:
    """Opens the checkpoint in a local directory, or in a hub repository when no such directory exists.

    CheckpointError or ConfigError, naming the file, the key and what was expected, for anything that does not fit.
    """
    directory = locate(path)
    source = directory / "config.json"
    values = read_object(source)
    tensors = read_headers(directory)
    read = read_config(values, str(source), {name: stored.shape for name, stored in tensors.items()})
    if read.layout == "deepspec" and read.config.num_target_layers is not None:
        refuse_final_tap(read.config, read.config.num_target_layers, str(source))
    used = _match(directory, read.config, tensors)
    return Checkpoint(
        path=directory,
        config=read.config,
        layout=read.layout,
        target_name=read.target_name,
        tensors={name: stored for name, stored in used.items() if name not in MAPS},
        maps=_read_maps(read.config, used) if read.config.reduced else {},
        calibration=Calibration.load_beside(directory),
        limits=DraftLimits.load_beside(directory, read.config.width, read.config.vocab_size),
    )


def refuse_final_tap(config: DSparkConfig, depth: int, source: str) -> None:
    """The DeepSpec layout leaves the last layer's output ambiguous: its training taps it raw, its evaluation normed."""
    if config.taps[-1] == depth - 1:
        raise ConfigError(
            f"{source}: target_layer_ids is {list(config.taps)}; expected layers below the final one ({depth - 1}), "
            "whose output this layout does not define"
        )


def target_table(target: TargetInfo | None, name: str) -> Tensor | None:
    """The target's raw table [V, H] of that name; a target without an output head is taken to tie it."""
    if target is None:
        return None
    module: nn.Module | None = target.embed_tokens
    if name == TABLES[1] and target.lm_head is not None:
        module = target.lm_head
        if getattr(module, "bias", None) is not None:
            return None
    weight = getattr(module, "weight", None)
    return whole_tensor(weight) if isinstance(weight, Tensor) else None


def _is_blank(table: Tensor) -> bool:
    """True for a table of NaN, which some exporters leave in place of one to be taken from the target."""
    return bool(table[:1].isnan().all())


def _same(table: Tensor, shared: Tensor, ids: Tensor, chunk: int = 8192) -> bool:
    """Whether `table`, cast to the other's type, equals the rows `ids` of `shared`; compared in pieces, not copied."""
    if shared.shape[1] != table.shape[1] or int(ids.max()) >= shared.shape[0]:
        return False
    for start in range(0, table.shape[0], chunk):
        part = slice(start, start + chunk)
        picked = shared[ids[part].to(shared.device)]
        if not torch.equal(table[part].to(picked.device, picked.dtype), picked):
            return False
    return True


def _read_maps(config: DSparkConfig, tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    """d2t and t2d, checked, and each made from the other where one is missing."""
    vocab, drafts = config.vocab_size, config.drafts
    stored = dict(read_tensors(tensors, lambda name: name in MAPS))
    name = "d2t" if "d2t" in stored else "t2d"
    source = tensors[name].file
    order = torch.arange(drafts)
    ids = stored["d2t"].long() + order if name == "d2t" else stored["t2d"].bool().nonzero()[:, 0]
    if ids.shape[0] != drafts:
        raise CheckpointError(f"{source}: t2d marks {ids.shape[0]} tokens; expected {drafts}, the rows of the head")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise CheckpointError(f"{source}: d2t maps draft tokens to ids {low}..{high}; expected ids in 0..{vocab - 1}")
    if ids.unique().shape[0] != drafts:
        raise CheckpointError(f"{source}: d2t maps several draft tokens to one id; expected {drafts} different ids")
    marks = torch.zeros(vocab, dtype=torch.bool)
    marks[ids] = True
    if "t2d" in stored and not torch.equal(marks, stored["t2d"].bool()):
        raise CheckpointError(f"{source}: t2d and d2t disagree on which tokens can be drafted")
    return {"d2t": ids - order, "t2d": marks}


def _match(directory: Path, config: DSparkConfig, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The stored tensors that the drafter uses; CheckpointError for missing, unexpected and misshapen ones."""
    if config.num_layers > len(tensors):  # before so many layers are built
        raise CheckpointError(
            f"{directory}: num_hidden_layers is {config.num_layers}, and there are {len(tensors)} tensors in all"
        )
    try:
        with torch.device("meta"):
            expected = {name: list(t.shape) for name, t in DSparkModel(config).state_dict().items()}
    except RuntimeError as error:  # a tensor of more elements than can be counted
        raise ConfigError(f"{directory}: config.json gives sizes that no tensor can have ({error})") from error
    optional = set(TABLES)
    if config.reduced:
        optional |= {"t2d"} if "d2t" in tensors else {"d2t"} if "t2d" in tensors else set()
    else:
        if any(bool(tensor.any()) for name, tensor in read_tensors(tensors, lambda name: name == "d2t")):
            raise CheckpointError(
                f"{directory}: d2t is not zero; expected no map, as all {config.drafts} ids are drafted"
            )
        tensors = {name: stored for name, stored in tensors.items() if name not in MAPS}
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in tensors and name not in optional]
    if missing:
        raise CheckpointError(f"{directory}: missing tensors: {some(missing)}")
    unexpected = [name for name in tensors if name not in expected and not IGNORED.fullmatch(name)]
    if unexpected:
        raise CheckpointError(f"{directory}: tensors that config.json does not account for: {some(unexpected)}")
    used = {name: stored for name, stored in tensors.items() if name in expected}
    for name, stored in used.items():
        if stored.shape != expected[name]:
            raise CheckpointError(f"{stored.file}: {name} has shape {stored.shape}; expected {expected[name]}")
        if name not in MAPS and stored.dtype not in FLOATS:
            raise CheckpointError(f"{stored.file}: {name} is stored as {stored.dtype}; expected {', '.join(FLOATS)}")
    return used
