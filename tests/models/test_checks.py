"""Every way of cutting a file short is found, and whole files pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hspark.models import ModelFileError
from hspark.models.checks import check_directory, check_gguf, check_safetensors
from tests.models.model_files import END_OF_TURN, toy_llama, write_directory, write_gguf
from tests.toy_tokenizer import TOY_EOS


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def directory_bytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_directory(tmp_path_factory.mktemp("whole"))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def directory(tmp_path: Path, directory_bytes: dict[str, bytes]) -> Path:
    for name, content in directory_bytes.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_whole_gguf_file_says_what_it_is(tiny_gguf: Path) -> None:
    summary = check_gguf(tiny_gguf)
    assert summary.architecture == "llama"
    assert summary.name == "tiny llama"
    assert summary.parameters == sum(p.numel() for p in toy_llama().parameters())
    assert tiny_gguf.stat().st_size - 32 < summary.required_size <= tiny_gguf.stat().st_size
    assert summary.end_token_ids == (END_OF_TURN, TOY_EOS)


@settings(max_examples=60)
@given(data=st.data())
def test_every_truncation_of_a_gguf_file_is_found(tiny_gguf: Path, scratch: Path, data: st.DataObject) -> None:
    content = tiny_gguf.read_bytes()
    keep = data.draw(st.integers(0, check_gguf(tiny_gguf).required_size - 1))
    cut = scratch / "cut.gguf"
    cut.write_bytes(content[:keep])
    with pytest.raises(ModelFileError, match=r"truncated|not a GGUF file"):
        check_gguf(cut)


@settings(max_examples=60)
@given(data=st.data())
def test_every_truncation_of_a_safetensors_file_is_found(
    directory_bytes: dict[str, bytes], scratch: Path, data: st.DataObject
) -> None:
    content = directory_bytes["model.safetensors"]
    cut = scratch / "cut.safetensors"
    cut.write_bytes(content)
    check_safetensors(cut)
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ModelFileError, match="truncated"):
        check_safetensors(cut)


@given(content=st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(scratch: Path, content: bytes) -> None:
    file = scratch / "garbage"
    for check, prefix in ((check_gguf, b""), (check_gguf, b"GGUF\x03\0\0\0"), (check_safetensors, b"")):
        file.write_bytes(prefix + content)
        with pytest.raises(ModelFileError):
            check(file)


def test_a_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "a-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="one part of a model split"):
        check_gguf(tmp_path / "a-00001-of-00002.gguf")


def test_a_whole_directory_passes(directory: Path) -> None:
    check_directory(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_truncated_json_file_is_named(directory: Path, name: str) -> None:
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError, match=rf"{name} is truncated or corrupt"):
        check_directory(directory)


def test_a_directory_without_config_or_weights_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "elsewhere")
    with pytest.raises(ModelFileError, match="no weights"):
        check_directory(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"no config\.json$"):
        check_directory(directory)
    write_gguf(directory / "some.gguf")
    with pytest.raises(ModelFileError, match=r"it holds some\.gguf: pass that file's path"):
        check_directory(directory)


def test_a_missing_shard_is_named(directory: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"names model-00002\.safetensors, which is not there"):
        check_directory(directory)
