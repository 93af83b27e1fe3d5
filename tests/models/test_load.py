"""Targets load from every kind of source with the same weights, and bad input is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hspark.models import (
    KnownModel,
    ModelFileError,
    ModelUnavailableError,
    UnknownModelError,
    end_token_ids,
    load_target,
    pretrained,
    resolve_device,
    resolve_dtype,
)
from tests.models.model_files import END_OF_TURN, toy_llama, write_directory, write_gguf
from tests.toy_tokenizer import TOY_EOS, encode


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return _logits(toy_llama())


def test_a_directory(tmp_path: Path, expected: Tensor) -> None:
    target = load_target(write_directory(tmp_path / "my-model"), "float32", "cpu")
    assert target.name == "my-model"
    assert target.path == tmp_path / "my-model"
    assert (target.dtype, target.device) == (torch.float32, torch.device("cpu"))
    assert target.eos_token_ids == (TOY_EOS,)
    assert target.tokenizer("the thing")["input_ids"] == encode("the thing")
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    torch.testing.assert_close(_logits(target.model), expected)


def test_a_gguf_file_equals_the_model_it_was_made_from(tiny_gguf: Path, cache: Path, expected: Tensor) -> None:
    target = load_target(tiny_gguf, "float32", "cpu", progress=False)
    assert target.name == "tiny"
    assert target.path == tiny_gguf
    assert target.eos_token_ids == (END_OF_TURN, TOY_EOS)
    assert target.tokenizer("the thing")["input_ids"] == encode("the thing")
    assert all(type(m) is nn.Linear for n, m in target.model.named_modules() if n.endswith(("_proj", "lm_head")))
    torch.testing.assert_close(_logits(target.model), expected)


def test_a_known_model_loads_by_name(tiny: KnownModel, cache: Path, expected: Tensor) -> None:
    target = load_target("tiny", "float32", "cpu", progress=False)
    assert target.name == "tiny"
    assert target.path == cache / "models" / "tiny.gguf"
    torch.testing.assert_close(_logits(target.model), expected)


def test_a_second_start_reads_the_converted_copy(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, expected: Tensor
) -> None:
    first = load_target(tiny_gguf, torch.bfloat16, "cpu", progress=False)
    (copy,) = (cache / "converted").iterdir()
    assert "bfloat16" in copy.name
    read: list[Any] = []

    def spy(source: Any, *arguments: Any) -> nn.Module:
        read.append(source)
        return pretrained.load_causal_lm(source, *arguments)

    monkeypatch.setattr("hspark.models.load.load_causal_lm", spy)
    monkeypatch.setattr("hspark.models.convert.load_causal_lm", None)
    second = load_target(tiny_gguf, torch.bfloat16, "cpu", progress=False)
    assert read == [copy]
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_corrupt_converted_copy_is_made_anew(
    tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str], expected: Tensor
) -> None:
    load_target(tiny_gguf, "float32", "cpu", progress=False)
    (weights,) = (cache / "converted").glob("*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-8] ^= 255  # one flipped byte: the size is right, the hash is not
    weights.write_bytes(content)
    target = load_target(tiny_gguf, "float32", "cpu", progress=False)
    assert "is corrupt or truncated; making it anew" in capsys.readouterr().err
    torch.testing.assert_close(_logits(target.model), expected)


def test_without_a_writable_cache_a_gguf_file_still_loads(
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    expected: Tensor,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HSPARK_CACHE", str(tmp_path / "file"))
    target = load_target(tiny_gguf, "float32", "cpu", progress=False)
    assert "no converted copy of tiny.gguf is kept" in capsys.readouterr().err
    torch.testing.assert_close(_logits(target.model), expected)
    assert target.tokenizer("the")["input_ids"] == encode("the")


def test_loading_is_quiet(tmp_path: Path, tiny_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_directory(tmp_path / "model")
    capfd.readouterr()
    load_target(tmp_path / "model", "float32", "cpu")
    load_target(tiny_gguf, "float32", "cpu")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("source", ["directory", "gguf"])
def test_without_a_tokenizer_the_reason_is_kept_and_said(
    tmp_path: Path, cache: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    if source == "directory":
        path = write_directory(tmp_path / "model", tokenizer=False)
    else:
        path = write_gguf(tmp_path / "model.gguf", tokenizer=False)
    for _ in range(2):  # the second time from the converted copy
        caplog.clear()
        target = load_target(path, "float32", "cpu", progress=False)
        assert target.tokenizer is None
        assert target.tokenizer_problem is not None
        assert "tokenizer" in target.tokenizer_problem
        assert caplog.messages == [f"model is loaded without a tokenizer: {target.tokenizer_problem}"]


def test_a_tokenizer_that_cannot_be_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_directory(tmp_path / "model")
    (path / "tokenizer.json").write_text("{}")
    target = load_target(path, "float32", "cpu")
    assert target.tokenizer is None
    assert "could not be loaded" in str(target.tokenizer_problem)
    assert caplog.messages == [f"model is loaded without a tokenizer: {target.tokenizer_problem}"]


@pytest.mark.parametrize("kept", [True, False], ids=["converted", "read anew"])
def test_the_suffix_of_a_gguf_file_may_be_in_capitals(
    tiny_gguf: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, expected: Tensor, kept: bool
) -> None:
    path = tmp_path / "TINY.GGUF"
    path.write_bytes(tiny_gguf.read_bytes())
    if not kept:
        monkeypatch.setattr("hspark.models.convert.MAX_CONVERTED_BYTES", 0)
    target = load_target(path, "float32", "cpu", progress=False)
    torch.testing.assert_close(_logits(target.model), expected)
    assert target.tokenizer("the")["input_ids"] == encode("the")
    assert target.eos_token_ids == load_target(tiny_gguf, "float32", "cpu", progress=False).eos_token_ids


def test_end_tokens_are_collected_from_everywhere(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model")
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [7, 5, 100_000]}))
    assert load_target(path, "float32", "cpu").eos_token_ids == (5, 7, TOY_EOS)


def test_end_tokens_of_a_model_and_tokenizer() -> None:
    model = toy_llama()
    assert end_token_ids(model) == (TOY_EOS,)
    model.generation_config.eos_token_id = [7, 5, 100_000, -1]
    assert end_token_ids(model, SimpleNamespace(eos_token_id=9)) == (5, 7, 9, TOY_EOS)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert end_token_ids(model, SimpleNamespace(eos_token_id=None)) == ()
    assert end_token_ids(model, more=(4, 2, 100_000)) == (2, 4)
    for wrong in ("</s>", 1.5, [3, None], True):
        with pytest.raises(ValueError, match=r"eos_token_id=.* of SimpleNamespace is not a token id"):
            end_token_ids(model, SimpleNamespace(eos_token_id=wrong))


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_directory(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks 1 of the weights.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(path, "float32", "cpu")


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model")
    (path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}))
    with pytest.raises(ModelFileError, match="could not be loaded as a causal language model"):
        load_target(path, "float32", "cpu")


def test_truncated_files_are_refused_before_loading(tmp_path: Path, tiny_gguf: Path, cache: Path) -> None:
    path = write_directory(tmp_path / "model")
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ModelFileError, match="truncated or corrupt"):
        load_target(path)
    (tmp_path / "cut.gguf").write_bytes(tiny_gguf.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="is truncated"):
        load_target(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    "name", ["smollm2", "SmolLM2-135M", "gpt-five", "./missing/dir", "missing.gguf", "a/b/c", "", " "]
)
def test_an_unknown_name_lists_what_is_accepted(name: str) -> None:
    with pytest.raises(UnknownModelError, match=r"'smollm2-135m'.*\.gguf file.*directory.*'owner/name'"):
        load_target(name)


def test_a_close_name_is_suggested() -> None:
    with pytest.raises(UnknownModelError, match="Did you mean 'smollm2-135m'"):
        load_target("smolm2-135")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"neither a \.gguf file nor a directory"):
        load_target(tmp_path / "model.onnx")


@pytest.mark.parametrize("name", [None, 3, ["smollm2-135m"]])
def test_a_name_of_another_type_is_refused(name: Any) -> None:
    with pytest.raises(UnknownModelError, match="is not a name or path"):
        load_target(name)


def test_a_hub_id_without_a_hub_is_a_quick_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrained, "hub_is_offline", lambda: True)
    with pytest.raises(ModelUnavailableError, match="somebody/no-such-model is not in the local Hugging Face cache"):
        load_target("somebody/no-such-model", "float32", "cpu")
    assert capfd.readouterr().err == ""


def test_dtypes() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) in (torch.bfloat16, torch.float32)
    assert resolve_dtype("bfloat16", cpu) == resolve_dtype(torch.bfloat16, cpu) == torch.bfloat16
    for wrong in ("fp32", "int8", torch.int64, None, 16):
        with pytest.raises(ValueError, match=r"dtype=.* use 'auto', 'float32', 'bfloat16', 'float16', 'float64'"):
            resolve_dtype(wrong, cpu)  # type: ignore[arg-type]


def test_auto_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert resolve_dtype("auto", torch.device("cpu")) == torch.bfloat16
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True}, raising=False)
    assert resolve_dtype("auto", torch.device("cpu")) == torch.bfloat16


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    for wrong in ("gpu", "cuda:99", "meta", None, 1.5):
        with pytest.raises(ValueError, match="device="):
            resolve_device(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_default_model_loads_and_answers() -> None:
    """Uses the user's own cache, so that the model is fetched at most once."""
    target = load_target("smollm2-135m", "float32", "cpu")
    assert target.eos_token_ids == (2,)
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    model: Any = target.model
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in target.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
