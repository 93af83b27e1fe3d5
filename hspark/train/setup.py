"""A new drafter for a target: its shape, and the weights that it starts from.

The draft layers start as copies of the target's last ones, the feature projection as the identity on the last tap, and
the norms of queries and keys (which Llama-style targets lack) at the size that the target's queries and keys have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hspark.drafters.dspark_model import DSparkConfig, DSparkModel
from hspark.drafters.rope import RopeConfig


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly from the second to the second-last one; fewer in a target that is too shallow."""
    last = max(num_layers - 2, 0)
    first = min(1, last)
    if count < 1:
        raise ValueError(f"taps={count!r}; use at least 1")
    places = [last] if count == 1 else [round(first + (last - first) * i / (count - 1)) for i in range(count)]
    return tuple(sorted(set(places)))


def unused_token(tokenizer: Any, vocab_size: int) -> int:
    """An id to stand for MASK: a padding row past the tokenizer's ids, else its last idle special token."""
    if tokenizer is None or len(tokenizer) < vocab_size:
        return vocab_size - 1
    avoid = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special and token not in avoid]
    return max(special) if special else vocab_size - 1


def drafter_config(
    target_config: Any,
    *,
    mask_token_id: int,
    layers: int = 2,
    taps: Sequence[int] | int = 4,
    kv_heads: int | None = None,
    markov_rank: int = 32,
    block_size: int = 7,
) -> DSparkConfig:
    """The shape of a Qwen3-style drafter for a target with this text config, whatever the target's family.

    A soft cap on the target's logits is left out of the drafter and of what it is trained towards: greedy drafts do not
    depend on it.
    taps: layer ids, or how many to spread. kv_heads: as many as the target has query heads by default: the target's few
    value heads are too narrow for features of all its depths.
    """
    text = target_config.get_text_config()
    heads, depth = text.num_attention_heads, text.num_hidden_layers
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in rope.values()):
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    return DSparkConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=_head_dim(text) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        taps=spread_taps(depth, taps) if isinstance(taps, int) else tuple(taps),
        num_target_layers=depth,
        block_size=block_size,
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        markov_head="vanilla" if markov_rank else "none",
        confidence_head=True,
        confidence_with_markov=markov_rank > 0,
        rope=RopeConfig.from_dict(rope) if rope else RopeConfig(),
        # Targets with another norm, such as Cohere's, have no such value or leave it empty.
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6,
        max_positions=text.max_position_embeddings,
    )


def _head_dim(text: Any) -> int | None:
    """The target's head width, if it has one for all layers and says so."""
    try:
        return text.head_dim
    except (AttributeError, RuntimeError, ValueError):  # transformers refuses to name one where layers differ
        return None


def new_drafter(config: DSparkConfig, target: Any, *, samples: Tensor | None = None, seed: int = 0) -> DSparkModel:
    """A drafter with float32 weights that shares the target's tables (cast to the target's dtype, frozen).

    samples: [T, N*H] tapped states, with which the norms of queries and keys are set; without them they start at 1.
    """
    devices = [next(target.parameters()).device]
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        torch.manual_seed(seed)
        model = DSparkModel(config, tables=False)
        for name, weight in model.named_parameters():
            if name == "markov_head.markov_w2.weight" or name.startswith("confidence_head"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
    hidden = config.hidden_size
    with torch.no_grad():
        model.fc.weight[:, :-hidden] *= 0.1
        model.fc.weight[:, -hidden:] = torch.eye(hidden)
        _copy_from_target(model, target, samples)
    model.to(devices[0])
    model.share_tables(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    return model


def _copy_from_target(model: DSparkModel, target: Any, samples: Tensor | None) -> None:
    """Copies whatever fits from the target's last layers; parts of other shapes keep their random start."""
    body, config = target.get_decoder(), model.config
    source = list(body.layers)[-len(model.layers) :]
    _copy(model.norm.weight, body.norm.weight)
    _copy(model.hidden_norm.weight, source[-1].input_layernorm.weight)
    for layer, origin in zip(list(model.layers)[-len(source) :], source, strict=True):
        theirs = dict(origin.named_parameters())
        for name, weight in layer.named_parameters():
            other = theirs.get(name)
            if other is None:
                continue
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                other = _repeat_heads(other, weight, config.head_dim)
            _copy(weight, other)
        if samples is not None and "self_attn.q_norm.weight" not in theirs:
            inputs = samples[:, -config.hidden_size :].float()
            inputs = nn.functional.rms_norm(
                inputs, inputs.shape[-1:], origin.input_layernorm.weight.float().cpu(), config.rms_norm_eps
            )
            for kind in ("q", "k"):
                projection = getattr(origin.self_attn, f"{kind}_proj").weight.float().cpu()
                size = (inputs @ projection.T).view(-1, config.head_dim).square().mean(-1).sqrt().mean()
                getattr(layer.self_attn, f"{kind}_norm").weight.fill_(float(size))


def _copy(weight: Tensor, other: Tensor) -> None:
    if weight.shape == other.shape:
        weight.copy_(other)


def _repeat_heads(other: Tensor, weight: Tensor, dim: int) -> Tensor:
    """The target's key or value heads, each repeated as often as the drafter has more of them."""
    times, rest = divmod(weight.shape[0], other.shape[0])
    if rest or times < 1:
        return other
    return other.view(-1, 1, dim, other.shape[1]).expand(-1, times, -1, -1).reshape(-1, other.shape[1])


def bigram_markov(model: DSparkModel, tokens: Tensor, *, common: int = 4096, smoothing: float = 20.0) -> None:
    """Starts the Markov head from consecutive tokens: a low-rank fit of their pointwise mutual information.

    tokens: int64 [T] of outputs. Halved, because the layers see the anchor too and learn part of the same.
    """
    if model.markov_head is None:
        raise ValueError("this drafter has no Markov head (markov_rank=0)")
    vocab, rank = model.config.vocab_size, model.config.markov_rank
    frequent = torch.bincount(tokens, minlength=vocab).argsort(descending=True)[: min(common, vocab)]
    place = torch.full((vocab,), -1)
    place[frequent] = torch.arange(len(frequent))
    first, second = place[tokens[:-1]], place[tokens[1:]]
    both = (first >= 0) & (second >= 0)
    pairs = first[both] * len(frequent) + second[both]
    counts = torch.bincount(pairs, minlength=len(frequent) ** 2).view(len(frequent), -1).float()
    seen = counts.sum(1, keepdim=True)
    base = (counts.sum(0) + 0.5) / (counts.sum() + 0.5 * len(frequent))
    information = torch.log((counts + smoothing * base) / (seen + smoothing) / base) * seen / (seen + smoothing)
    left, size, right = torch.svd_lowrank(information, q=min(rank, len(frequent)), niter=4)
    half = size.sqrt() / math.sqrt(2)
    device = model.markov_head.markov_w1.weight.device
    with torch.no_grad():
        model.markov_head.markov_w1.weight[frequent, : left.shape[1]] = (left * half).to(device)
        model.markov_head.markov_w2.weight[frequent, : left.shape[1]] = (right * half).to(device)
