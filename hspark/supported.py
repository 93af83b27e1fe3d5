"""Which causal LMs run on static KV buffers. Every other one is refused by name, and is left as it was.

A model is looked at, and then probed: it runs one token on its own code, with the attention function taken over, which
sees what each layer asks of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hspark.kv_buffers import ATTENTION_NAME, LayerShape, Probe, StateNotPassedError, UnsupportedModelError

# Layer kinds whose state cannot be rolled back by overwriting positions.
_STATEFUL = ("mamba", "ssm", "rwkv", "recurrent", "linear_attention", "conv", "hybrid", "chunked", "compressed")
# What decoders call their list of layers: most families, and those of GPT-2's time.
_LAYER_LISTS = ("layers", "h")
_WAY_OUT = (
    "use a decoder-only model whose every layer calls transformers' attention interface, as those of the Llama, "
    "Mistral, Qwen3 and Gemma 3 families do"
)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's list of layers; UnsupportedModelError if there is none."""
    decoder = model.get_decoder()
    for name in _LAYER_LISTS:
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers; {_WAY_OUT}")


def check_architecture(model: Any, max_length: int) -> None:
    """UnsupportedModelError for what a model's class and config rule out. max_length: positions of a row."""
    name = type(model).__name__
    if not hasattr(model, "config") or not hasattr(model, "get_decoder"):
        raise UnsupportedModelError(f"{name} is not a transformers model; {_WAY_OUT}")
    if getattr(model.config.get_text_config(), "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; use a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head; load the model with AutoModelForCausalLM")
    _refuse_state(model)
    _refuse_changing_rope(model, max_length)


def _refuse_state(model: Any) -> None:
    kinds = {str(kind) for kind in getattr(model.config.get_text_config(), "layer_types", None) or ()}
    bad = sorted(kind for kind in kinds if any(word in kind for word in _STATEFUL))
    if bad or getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps state that cannot be rolled back after a rejected draft "
            f"({', '.join(bad) or 'recurrent or convolutional state'}); use a model with attention layers only"
        )


def _refuse_changing_rope(model: Any, max_length: int) -> None:
    """Refuses rotary frequencies that follow the largest position of a forward.

    A forward holds every row, drafts included, and stored keys are never rotated anew: a row's text would depend on
    the others'. Where no position can reach the length at which the frequencies change, they are constants.
    """
    for kind, limit in changing_ropes(model.config.get_text_config()):
        if max_length > limit:
            name = type(model).__name__
            way_out = f"use max_length={limit} or less" if limit >= 2 else "use a model with another rope_type"
            raise UnsupportedModelError(
                f"max_length={max_length}: the rotary frequencies of {name} (rope_type={kind!r}) change for a whole "
                f"batch when one text in it passes {limit} positions; {way_out}"
            )


def changing_ropes(config: Any) -> Iterator[tuple[str, int]]:
    """(rope type, positions up to which it is constant) of all rotary embeddings that change beyond a length."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One dictionary for all layers, or one for each type of layer.
    for entry in (parameters, *parameters.values()):
        kind = entry.get("rope_type", entry.get("type")) if isinstance(entry, Mapping) else None
        if kind == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            yield kind, int(entry.get("original_max_position_embeddings") or own or 0)
        elif "dynamic" in str(kind):
            yield str(kind), int(config.max_position_embeddings)


@torch.inference_mode()
def probe_layers(model: Any, max_length: int) -> list[LayerShape]:
    """Takes over the model's attention; returns what each layer asks of it.

    UnsupportedModelError, with the model's own attention back in place, if the buffers cannot give that.
    """
    own = getattr(model.config.get_text_config(), "_attn_implementation", None) or "eager"
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        shapes = _probe(model)
        _refuse_hidden_window(model, shapes, max_length)
        return shapes
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        model.set_attn_implementation(own)
        if isinstance(error, UnsupportedModelError):
            raise
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on static KV buffers ({type(error).__name__}: {reason}); {_WAY_OUT}"
        ) from error


def _probe(model: Any) -> list[LayerShape]:
    layers, decoder = decoder_layers(model), model.get_decoder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)

    def run() -> list[LayerShape]:
        probe = Probe()
        decoder(input_ids=token, position_ids=token, use_cache=False, hspark=probe)
        if sorted(probe.layers) != list(range(len(layers))):
            raise UnsupportedModelError(
                f"{type(model).__name__} has {len(layers)} layers, but layers {sorted(probe.layers)} called the "
                f"attention interface; {_WAY_OUT}"
            )
        return [probe.layers[i] for i in range(len(layers))]

    try:
        return run()
    except StateNotPassedError:
        hooks = [hook for layer in layers for hook in _pass_state(layer)]
    try:
        return run()
    except Exception:
        for hook in hooks:
            hook.remove()
        raise


def _pass_state(layer: nn.Module) -> list[Any]:
    """Hooks that hand the step's state to a layer's attention, where the layer's own code drops keyword arguments."""
    passing: dict[str, Any] = {}

    def receive(_module: nn.Module, _args: tuple, kwargs: dict) -> None:
        passing["hspark"] = kwargs.get("hspark")

    def hand_on(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "hspark": passing.pop("hspark", None)}

    attentions = [module for module in layer.modules() if hasattr(module, "layer_idx") and module is not layer]
    return [
        layer.register_forward_pre_hook(receive, with_kwargs=True),
        *(attention.register_forward_pre_hook(hand_on, with_kwargs=True) for attention in attentions),
    ]


def _refuse_hidden_window(model: Any, shapes: list[LayerShape], max_length: int) -> None:
    """Refuses a sliding window that is only in the attention mask, which these buffers make themselves.

    A window that no text can outgrow hides nothing, and one that the config's class does not declare is a leftover of
    another family, which the model's code does not read.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if "sliding_window" not in getattr(type(config), "__dataclass_fields__", ("sliding_window",)):
        return
    if not isinstance(window, int) or window >= max_length or getattr(config, "use_sliding_window", True) is False:
        return
    kinds = getattr(config, "layer_types", None)
    if kinds:
        hidden = any("sliding" in str(k) and shape.window is None for k, shape in zip(kinds, shapes, strict=False))
    else:
        hidden = all(shape.window is None for shape in shapes)
    if hidden:
        name = type(model).__name__
        raise UnsupportedModelError(
            f"max_length={max_length}: the config of {name} has sliding_window={window}, but its layers do not ask "
            f"attention for it; use max_length={window} or less, or another model"
        )
