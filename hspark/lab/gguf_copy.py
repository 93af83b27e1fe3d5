"""A GGUF file's weights as plain floats, in a GGUF file again: the same values for an engine that reads no other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from hspark.models.fetch import PARTIAL, file_sha256, make_cache_folder, remove_leftovers

# The float types that both sides know, by their name in GGUF, and the file type that a header states.
_TYPES = {
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.float32: ("F32", "ALL_F32"),
}
FLOAT_TYPES = tuple(str(dtype).removeprefix("torch.") for dtype in _TYPES)
_SET_BY_WRITER = {"general.architecture", "general.file_type", "general.quantization_version"}


def float_copy(source: Path, dtype: torch.dtype) -> Path:
    """The float copy of a .gguf file in the cache, made if need be. dtype: bfloat16, float16 or float32."""
    if dtype not in _TYPES:
        raise ValueError(f"dtype={str(dtype)!r} has no GGUF form; use bfloat16, float16 or float32")
    folder = make_cache_folder("converted")
    name = f"{source.stem}-{file_sha256(source)[:12]}-{_TYPES[dtype][0].lower()}.gguf"
    if not (folder / name).is_file():
        remove_leftovers(folder)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=PARTIAL)
        os.close(handle)
        try:
            write_float_copy(source, Path(temporary), dtype)
            os.chmod(temporary, 0o644)  # temporary files are private to their maker; a cache may be shared
            os.replace(temporary, folder / name)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return folder / name


def write_float_copy(source: Path, path: Path, dtype: torch.dtype) -> None:
    """Writes `source`, metadata and all, with every tensor unpacked and rounded to `dtype`.

    Rounding is that of loading the file into a model of this type, to the nearest. Vectors (norms, biases) are rounded
    in the same way and then stored as float32, the only type that readers take for them.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    type_name, file_type = _TYPES[dtype]
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise ValueError(f"{source} names no architecture; use a .gguf file of a language model")
    writer = gguf.GGUFWriter(path, architecture.contents())
    writer.add_file_type(gguf.LlamaFileType[file_type])
    for field in reader.fields.values():
        if field.name not in _SET_BY_WRITER and not field.name.startswith("GGUF."):
            _copy_field(writer, field)
    kind = gguf.GGMLQuantizationType[type_name]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        rounded = gguf.quants.quantize(values, kind)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, rounded, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(rounded, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_field(writer: Any, field: Any) -> None:
    from gguf import GGUFValueType

    kind = field.types[0]
    item = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
