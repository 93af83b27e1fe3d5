"""Reading the two `config.json` layouts of DSpark checkpoints, DeepSpec's and speculators'.

`config.json` is parsed here and nowhere else: going through a general configuration class loses or reshapes keys
(per-layer head sizes, nested rope parameters) depending on its version. Tap numbers are converted here, once: a
speculators id names the same tensor as a DeepSpec id one lower.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.rope import RopeConfig
from hspark.policy.curves import as_float

logger = logging.getLogger(__name__)

ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4", "DSparkDraftModel": "qwen3"}
# Far beyond any drafter: layers are built, and frequencies computed, before a shape can tell that they are wrong.
MAX_LAYERS, MAX_HEAD_DIM = 10_000, 1 << 16

Shapes = Mapping[str, Sequence[int]]


class ConfigError(ValueError):
    """A `config.json` that does not describe a DSpark drafter; the message names the file, the key and the value."""


class ReadConfig(NamedTuple):
    """A drafter's settings, the layout they were read from, and the target's name if the file gives one."""

    config: DSparkConfig
    layout: str
    target_name: str | None


class _Reader:
    """Typed access to a parsed config, looking in `fallbacks` for keys that are absent or null."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "", *fallbacks: Mapping[str, Any]) -> None:
        self.source, self.prefix = source, prefix
        self.levels = (values, *fallbacks)

    def get(self, key: str, default: Any = None) -> Any:
        return next((level[key] for level in self.levels if level.get(key) is not None), default)

    def fail(self, key: str, expected: str) -> ConfigError:
        value = self.get(key)
        found = "is missing" if value is None else f"is {value!r}"
        return ConfigError(f"{self.source}: {self.prefix}{key} {found}; expected {expected}")

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = 2**31 - 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer of at least {low}, at most {high}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float) -> float:
        value = as_float(self.get(key, default))
        if value is None:
            raise self.fail(key, "a finite number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def entries(self, key: str, kind: type, words: str) -> list[Any]:
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self.fail(key, f"a list of {words}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return value

    def section(self, key: str) -> _Reader:
        return _Reader(self.mapping(key), self.source, f"{self.prefix}{key}.")

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise self.fail(key, "a list of integers")
        return tuple(value)


def read_config(values: Mapping[str, Any], source: str = "config.json", shapes: Shapes | None = None) -> ReadConfig:
    """The drafter that a parsed `config.json` describes.

    source: the file's name, for errors. shapes: {tensor name: shape} of the checkpoint, from which absent keys about
    heads and sizes are taken; without it their documented defaults hold. ConfigError for anything else.
    """
    shapes = shapes or {}
    kind = values.get("speculators_model_type")
    read = _read_deepspec if kind is None else _read_speculators
    try:
        return read(values, source, shapes)
    except ConfigError:
        raise
    except ValueError as error:  # the checks of DSparkConfig and RopeConfig name the key but not the file
        raise ConfigError(f"{source}: {error}") from error


def _read_deepspec(values: Mapping[str, Any], source: str, shapes: Shapes) -> ReadConfig:
    prefixed = {k.removeprefix("dspark_"): v for k, v in values.items() if k.startswith("dspark_")}
    nested = _Reader(values, source).mapping("dflash_config")
    reader = _Reader(values, source, "", prefixed, nested)
    for key in ("causal", "use_swa"):
        if nested.get(key):
            raise ConfigError(
                f"{source}: dflash_config.{key} is {nested[key]!r}; expected false, the layout has no such mask"
            )
    named = [name for name in reader.entries("architectures", str, "names") if name in ARCHITECTURES]
    if not named:
        raise reader.fail("architectures", f"one of {', '.join(ARCHITECTURES)}, or a key speculators_model_type")
    backbone = ARCHITECTURES[named[0]]
    gemma = backbone == "gemma4"
    if any(kind != "full_attention" for kind in reader.entries("layer_types", str, "names")):
        logger.warning("%s: layer_types asks for windows; drafters of this layout always attend to everything", source)
    sizes = _sizes(reader, shapes)
    if gemma:
        sizes.update(_gemma_heads(reader, shapes))
    config = DSparkConfig(
        backbone=backbone,
        **sizes,
        **_heads(reader, shapes, sizes["hidden_size"], default_rank=0),
        taps=reader.integers("target_layer_ids"),
        num_target_layers=reader.optional_integer("num_target_layers"),
        block_size=reader.integer("block_size", low=1),
        mask_token_id=reader.integer("mask_token_id"),
        draft_vocab_size=_draft_vocabulary(reader, shapes, sizes["vocab_size"]),
        rope=_rope(reader, "full_attention"),
        activation=reader.get("hidden_activation", "gelu_pytorch_tanh") if gemma else reader.get("hidden_act", "silu"),
        logit_softcap=(reader.number("final_logit_softcapping", 0.0) or None) if gemma else None,
    )
    return ReadConfig(config, "deepspec", None)


def _read_speculators(values: Mapping[str, Any], source: str, shapes: Shapes) -> ReadConfig:
    reader = _Reader(values, source)
    kind = values["speculators_model_type"]
    if kind not in ("dspark", "dflash"):
        raise reader.fail("speculators_model_type", '"dspark" or "dflash"')
    if reader.get("transformer_layer_config") is None:
        raise reader.fail("transformer_layer_config", "an object")
    inner = reader.section("transformer_layer_config")
    sizes = _sizes(inner, shapes)
    hidden = sizes["hidden_size"]
    if reader.integer("target_hidden_size", hidden) != hidden:
        raise reader.fail("target_hidden_size", f"null or {hidden}, the drafter's own hidden_size")
    block = reader.integer("block_size", 8, low=1)
    windows = _windows(inner, sizes["num_layers"])
    if any(windows) and reader.get("sliding_window_non_causal") is None:
        logger.warning("%s: sliding_window_non_causal is missing; taking windowed layers as causal in a block", source)
    target_name = reader.section("speculators_config").section("verifier").text("name_or_path")
    config = DSparkConfig(
        **sizes,
        **_heads(reader, shapes, hidden, default_rank=256 if kind == "dspark" else 0),
        taps=tuple(i - 1 for i in reader.integers("aux_hidden_state_layer_ids")),
        block_size=block,
        anchor_first=_anchor_first(reader, block),
        mask_token_id=reader.integer("mask_token_id"),
        draft_vocab_size=_draft_vocabulary(reader, shapes, sizes["vocab_size"]),
        rope=_rope(inner, "sliding_attention", "full_attention"),
        activation=inner.get("hidden_act", "silu"),
        windows=windows,
        windowed_blocks_causal=not reader.flag("sliding_window_non_causal", False),
    )
    return ReadConfig(config, "speculators", target_name)


def _sizes(reader: _Reader, shapes: Shapes) -> dict[str, Any]:
    """The backbone's keys that both layouts share."""
    hidden, heads = reader.integer("hidden_size", low=1), reader.integer("num_attention_heads", low=1)
    return {
        "hidden_size": hidden,
        "intermediate_size": reader.integer("intermediate_size", low=1),
        "num_layers": reader.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": reader.integer("num_key_value_heads", heads, low=1),
        "head_dim": reader.integer("head_dim", hidden // heads, low=1, high=MAX_HEAD_DIM),
        "vocab_size": reader.integer("vocab_size", low=1),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "attention_bias": reader.flag("attention_bias", False),
        "max_positions": reader.optional_integer("max_position_embeddings"),
    }


def _gemma_heads(reader: _Reader, shapes: Shapes) -> dict[str, Any]:
    """Gemma 4 drafters use the head sizes of the target's global layers; where exports fold them away, tensors tell."""
    shared = reader.flag("attention_k_eq_v", False)
    norm, key = shapes.get("layers.0.self_attn.q_norm.weight"), shapes.get("layers.0.self_attn.k_proj.weight")
    dim = reader.integer("global_head_dim", norm[0] if norm else None, low=1, high=MAX_HEAD_DIM)
    name = "num_global_key_value_heads" if shared else "num_key_value_heads"
    return {
        "head_dim": dim,
        "num_kv_heads": reader.integer(name, key[0] // dim if key else None, low=1),
        "key_is_value": shared,
    }


def _heads(reader: _Reader, shapes: Shapes, hidden: int, default_rank: int) -> dict[str, Any]:
    """Markov and confidence head; keys that are absent are read off the tensors, or take the layout's default."""
    embedding, projection = shapes.get("markov_head.markov_w1.weight"), shapes.get("confidence_head.proj.weight")
    if shapes:
        default_rank = embedding[-1] if embedding else 0
    rank = reader.integer("markov_rank", default_rank)
    kind = reader.get("markov_head_type", "vanilla")
    confident = reader.flag("enable_confidence_head", projection is not None if shapes else default_rank > 0)
    wide = projection[-1] > hidden if projection else rank > 0
    return {
        "markov_rank": rank,
        "markov_head": kind if rank else "none",
        "confidence_head": confident,
        "confidence_with_markov": confident and reader.flag("confidence_head_with_markov", wide),
    }


def _draft_vocabulary(reader: _Reader, shapes: Shapes, vocab: int) -> int:
    """Vd: the rows of a head or of the map, where stored, else the config's word, else the whole vocabulary."""
    for name in ("lm_head.weight", "markov_head.markov_w2.weight", "d2t"):
        if shapes.get(name):
            return shapes[name][0]
    return reader.integer("draft_vocab_size", vocab, low=1)


def _rope(reader: _Reader, *kinds: str) -> RopeConfig:
    """The rotation: the entry of the first kind that `rope_parameters` nests, else the flat dict, else older keys.

    A nested entry wins over flat keys beside it: some published files carry a meaningless `rope_type` and
    `rope_theta: null` on the level of the entries.
    """
    flat = dict(reader.mapping("rope_parameters") or reader.mapping("rope_scaling"))
    for kind in kinds:
        if isinstance(flat.get(kind), Mapping):
            flat = dict(flat[kind])
            break
    if flat.get("rope_theta") is None:
        flat["rope_theta"] = reader.number("rope_theta", 10000.0)
    return RopeConfig.from_dict(flat)


def _windows(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    kinds = reader.get("layer_types", ["full_attention"] * layers)
    valid = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in valid for kind in kinds):
        raise reader.fail("layer_types", f"a list of {layers} entries, each one of {', '.join(valid)}")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = reader.integer("sliding_window", low=1)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _anchor_first(reader: _Reader, block: int) -> bool:
    """The block layout. A wrong guess does not crash, acceptance just collapses: so it is guessed last, and said."""
    methods = reader.section("speculators_config").entries("proposal_methods", Mapping, "objects")
    tokens = methods[0].get("speculative_tokens") if methods else None
    if reader.get("sample_from_anchor") is not None:
        stated = reader.flag("sample_from_anchor", True)
        if tokens in (block, block - 1) and stated != (tokens == block):
            logger.warning(
                "%s: sample_from_anchor is %r, but speculative_tokens=%r of block_size=%d belongs to the other layout; "
                "following sample_from_anchor. If hardly anything is accepted, it is the wrong one.",
                reader.source,
                stated,
                tokens,
                block,
            )
        return stated
    if tokens in (block, block - 1):
        return tokens == block
    logger.warning(
        "%s: sample_from_anchor is missing and speculative_tokens is %r; assuming that slot 0 of a block drafts "
        "nothing (bonus-anchor). If hardly anything is accepted, set sample_from_anchor to true in that file.",
        reader.source,
        tokens,
    )
    return False
