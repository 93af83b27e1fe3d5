"""What the tests of the DSpark drafter share: the reference vectors, tiny checkpoints on disk, targets and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hspark.core import RowState
from hspark.drafters.base import TargetInfo
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_model import Attention, DSparkModel, Layer
from hspark.sampling import SamplingMode, SamplingState

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = sorted(path.name for path in VECTORS.iterdir() if path.is_dir())
GREEDY = SamplingMode()
SAMPLED = SamplingMode(sampled=True)

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "taps": (0, 2),
    "num_target_layers": 4,
    "block_size": 5,
    "mask_token_id": 39,
    "markov_rank": 4,
    "markov_head": "vanilla",
    "confidence_head": True,
    "confidence_with_markov": True,
    "max_positions": 512,
}


def tiny_config(**changes: Any) -> DSparkConfig:
    return DSparkConfig(**{**TINY, **changes})


def random_model(config: DSparkConfig, seed: int = 0, scale: float = 0.5) -> DSparkModel:
    """A drafter of random weights, lively enough that its drafts differ from place to place."""
    generator = torch.Generator().manual_seed(seed)
    model = DSparkModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else scale * noise)
    if config.reduced:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.drafts].sort().values
        model.d2t.copy_(ids - torch.arange(config.drafts))
        model.t2d.zero_()[ids] = True
    return model.eval()


def save_model(
    model: DSparkModel, directory: Path, layout: str = "deepspec", drop: tuple[str, ...] = (), **keys: Any
) -> Path:
    """Writes a checkpoint. `drop` leaves tensors out; `keys` replace entries of config.json (None removes them)."""
    directory.mkdir(parents=True, exist_ok=True)
    values = model.config.to_dict(layout) | keys
    values = {key: value for key, value in values.items() if value is not None or key not in keys}
    (directory / "config.json").write_text(json.dumps(values))
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items() if name not in drop}
    save_file(tensors, directory / "model.safetensors")
    return directory


def target_info(config: DSparkConfig, tables: bool = False, **changes: Any) -> TargetInfo:
    """A target that the drafter fits. tables: random ones, shared by `embed_tokens` and `lm_head` as modules."""
    values: dict[str, Any] = {
        "name": "tiny",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_target_layers or 8,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "embed_tokens": None,
        "lm_head": None,
    } | changes
    if tables:
        torch.manual_seed(5)
        values["embed_tokens"] = nn.Embedding(values["vocab_size"], values["hidden_size"])
        values["lm_head"] = nn.Linear(values["hidden_size"], values["vocab_size"], bias=False)
    return TargetInfo(**values)


def bound(
    source: Any, rows: int = 1, max_length: int = 64, target: TargetInfo | None = None, **options: Any
) -> DSparkDrafter:
    """A drafter bound to a fitting target; `source` is a checkpoint directory or a network in memory."""
    drafter = (
        DSparkDrafter.from_pretrained(source, **options)
        if isinstance(source, str | Path)
        else DSparkDrafter(source, **options)
    )
    drafter.bind(target or target_info(drafter.config), rows, max_length)
    return drafter


def rows_of(texts: list[list[int]], max_length: int = 64, prompt_length: int = 1, **sampling: Any) -> RowState:
    """Rows with these committed tokens. sampling: one value per row, or one for all, by field of SamplingState."""
    count = len(texts)
    tokens = torch.zeros(count, max_length, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    state = SamplingState.defaults(count)
    for name, value in sampling.items():
        like = getattr(state, name)
        new = torch.as_tensor(value)
        state = state._replace(**{name: new if like is None else new.to(like.dtype).expand(count).clone()})
    return RowState(
        tokens=tokens,
        length=torch.tensor([len(text) for text in texts]),
        prompt_length=torch.full((count,), prompt_length),
        limit=torch.full((count,), max_length),
        running=torch.ones(count, dtype=torch.bool),
        sampling=state,
    )


def attention_of(model: DSparkModel, layer: int = 0) -> Attention:
    return cast(Layer, model.layers[layer]).self_attn


def features_of(config: DSparkConfig, tokens: list[int], start: int = 0) -> Tensor:
    """What a target would show of tokens at positions start..: [T, N*H], a function of token and position alone."""
    width = len(config.taps) * config.hidden_size
    rows = []
    for offset, token in enumerate(tokens):
        generator = torch.Generator().manual_seed(token * 1000 + start + offset)
        rows.append(torch.randn(width, generator=generator))
    return torch.stack(rows) if rows else torch.zeros(0, width)


def feed(drafter: DSparkDrafter, row: int, tokens: list[int], start: int = 0) -> None:
    """The target processes `tokens` of one row at positions start.. ."""
    count = len(tokens)
    drafter.observe(
        features_of(drafter.config, tokens, start), torch.full((count,), row), torch.arange(start, start + count)
    )


def vector_case(name: str) -> tuple[Path, dict[str, Tensor]]:
    return VECTORS / name, load_file(VECTORS / name / "io.safetensors")
