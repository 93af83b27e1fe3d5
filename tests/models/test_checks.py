"""Every way of cutting a file short is found, and whole files pass."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

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


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


STRING, FLOAT, INT, ARRAY, BOOL = 8, 6, 5, 9, 7


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("deep", struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQ", ARRAY, 1) * 5000, "nested more than 8 deep"),
        ("many", struct.pack("<IIQ", ARRAY, STRING, 2**62), "header cannot be read"),
        ("general.alignment", struct.pack("<I", STRING) + _text("abc"), r"general\.alignment is 'abc'"),
        ("general.alignment", struct.pack("<Ii", INT, 0), r"general\.alignment is 0; .* an integer from 1 up"),
        ("split.count", struct.pack("<I", STRING) + _text("two"), r"split\.count is 'two'"),
        ("split.count", struct.pack("<I?", BOOL, True), r"split\.count is True"),
        ("tokenizer.ggml.eos_token_id", struct.pack("<If", FLOAT, 1.5), r"eos_token_id is 1\.5"),
        ("tokenizer.ggml.eot_token_id", struct.pack("<IIQI", ARRAY, INT, 1, 7), "eot_token_id is an array"),
    ],
)
def test_metadata_of_another_type_is_a_named_error(tmp_path: Path, key: str, value: bytes, message: str) -> None:
    file = tmp_path / "odd.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text(key) + value)
    with pytest.raises(ModelFileError, match=rf"odd\.gguf is .*corrupt: .*{message}"):
        check_gguf(file)


def test_a_gguf_tensor_of_many_dimensions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _text("t") + struct.pack("<I", 9) + bytes(200))
    with pytest.raises(ModelFileError, match=r"odd\.gguf is truncated or corrupt.*'t' has 9 dimensions"):
        check_gguf(file)


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_header_is_a_named_error_or_harmless(tiny_gguf: Path, scratch: Path, data: st.DataObject) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    size = len(content) - sum(p.numel() for p in toy_llama().parameters()) * 4
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, size - 1))] = data.draw(st.integers(0, 255))
    damaged = scratch / "damaged.gguf"
    damaged.write_bytes(content)
    message = str(damaged)
    try:
        check_gguf(damaged)
    except ModelFileError as error:
        message = str(error)
    assert str(damaged) in message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(header=VALUES | st.fixed_dictionaries({"a": VALUES | st.fixed_dictionaries({"data_offsets": VALUES})}))
def test_a_safetensors_header_of_another_shape_is_a_named_error(scratch: Path, header: Any) -> None:
    content = json.dumps(header).encode()
    file = scratch / "odd.safetensors"
    file.write_bytes(struct.pack("<Q", len(content)) + content + b"data")
    with pytest.raises(ModelFileError, match=r"odd\.safetensors is truncated or corrupt"):
        check_safetensors(file)


@pytest.mark.parametrize("offsets", [[0, "x"], ["0", 4], [4], [0, 4, 8], 4, None, [0, 4.0], [0, True]])
def test_data_offsets_that_are_no_two_integers_are_a_named_error(tmp_path: Path, offsets: Any) -> None:
    content = json.dumps({"a": {"data_offsets": offsets}}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(struct.pack("<Q", len(content)) + content + b"data")
    with pytest.raises(ModelFileError, match=r"odd\.safetensors is truncated or corrupt"):
        check_safetensors(file)


def test_json_that_is_nested_too_deep_is_a_named_error(directory: Path) -> None:
    deep = b"[" * 100_000
    (directory / "odd.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    with pytest.raises(ModelFileError, match=r"odd\.safetensors is truncated or corrupt"):
        check_directory(directory)
    (directory / "config.json").write_bytes(b'{"a":' + deep)
    with pytest.raises(ModelFileError, match=r"config\.json is truncated or corrupt"):
        check_directory(directory)


@pytest.mark.parametrize("shards", [{"a": 3}, {"a": None, "b": "x"}, {"a": ["x"]}, [1], "x", None])
def test_an_index_of_another_shape_is_a_named_error(directory: Path, shards: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelFileError, match=r"index\.json is corrupt"):
        check_directory(directory)


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
    write_gguf(directory / "some.GGUF")
    with pytest.raises(ModelFileError, match=r"it holds some\.GGUF: pass that file's path"):
        check_directory(directory)


def test_a_missing_shard_is_named(directory: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"names model-00002\.safetensors, which is not there"):
        check_directory(directory)
