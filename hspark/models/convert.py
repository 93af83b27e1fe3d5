"""GGUF files as ready-made safetensors directories, kept in the cache.

Reading a GGUF file through transformers takes many seconds, most of them spent on its token lists in Python, and is
repeated at every start. The first start therefore writes the unpacked model and its tokenizer to the cache once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from hspark.models.checks import GgufSummary
from hspark.models.fetch import PARTIAL, ModelUnavailableError, file_sha256, make_cache_folder, remove_leftovers
from hspark.models.pretrained import load_causal_lm, load_tokenizer, quiet

# Larger models are loaded from the .gguf file every time: unpacked they would take several times its size on disk.
MAX_CONVERTED_BYTES = 4 << 30
_MANIFEST = "hspark.json"


def converted_directory(
    path: Path, summary: GgufSummary, digest: str, dtype: torch.dtype, progress: bool = True
) -> Path | None:
    """The converted form of a .gguf file with SHA-256 `digest` for one dtype, made if need be.

    None when no second copy can be kept: the model is too large for that, the disk has no room, or the cache cannot be
    written (which is said). A directory whose files do not have the hashes that were noted when it was written is made
    anew.
    """
    size = summary.parameters * dtype.itemsize
    if size > MAX_CONVERTED_BYTES:
        return None
    try:
        folder = make_cache_folder("converted")
        final = folder / _folder_name(path, digest, dtype)
        if final.is_dir():
            if _is_intact(final):
                return final
            print(f"hspark: {final} is corrupt or truncated; making it anew", file=sys.stderr)
            _discard(final)
        remove_leftovers(folder)
        if shutil.disk_usage(folder).free > 2 * size:
            return _convert_into(final, path, dtype, digest, progress)
        problem = f"less than {2 * size / 1e6:.0f} MB free in {folder}"
    except (OSError, ModelUnavailableError) as error:
        problem = str(error)
    print(f"hspark: no converted copy of {path.name} is kept ({problem}); every start reads it anew", file=sys.stderr)
    return None


def tokenizer_problem(directory: Path) -> str | None:
    """Why the converted directory has no tokenizer, or None when it has one."""
    return json.loads((directory / _MANIFEST).read_text())["tokenizer_problem"]


def _folder_name(path: Path, digest: str, dtype: torch.dtype) -> str:
    """The transformers version is part of the name: its unpacking and its tokenizer files may change with it."""
    import transformers

    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem)[:60]
    version = ".".join(transformers.__version__.split(".")[:2])
    return f"{stem}-{digest[:12]}-{str(dtype).removeprefix('torch.')}-transformers{version}"


def _convert_into(final: Path, path: Path, dtype: torch.dtype, digest: str, progress: bool) -> Path:
    temporary = Path(tempfile.mkdtemp(dir=final.parent, prefix=PARTIAL))
    try:
        _convert(path, dtype, temporary, digest, progress)
        try:
            os.rename(temporary, final)
        except OSError:
            # Another process finished first; its directory holds the same bytes.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _convert(path: Path, dtype: torch.dtype, into: Path, digest: str, progress: bool) -> None:
    stages = "{desc} {n_fmt}/{total_fmt} [{elapsed}]{postfix}"
    title = f"{path.name}: preparing for this and later starts"
    with tqdm(total=3, desc=title, bar_format=stages, disable=None if progress else True, leave=False) as bar:
        bar.set_postfix_str("weights")
        model = load_causal_lm(path, dtype, torch.device("cpu"))
        bar.update()
        bar.set_postfix_str("tokenizer")
        tokenizer, problem = load_tokenizer(path)
        bar.update()
        bar.set_postfix_str("writing")
        _save(model, tokenizer, into)
        files = {file.name: file_sha256(file) for file in sorted(into.iterdir())}
        manifest = {"source": path.name, "source_sha256": digest, "tokenizer_problem": problem, "files": files}
        (into / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        bar.update()
    # Temporary files are private to their maker; a cache may be shared.
    into.chmod(0o755)
    for file in into.iterdir():
        file.chmod(0o644)


def _save(model: nn.Module, tokenizer: Any, into: Path) -> None:
    with quiet():
        model.save_pretrained(into)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(into)


def _is_intact(directory: Path) -> bool:
    try:
        files = json.loads((directory / _MANIFEST).read_text())["files"]
        return all(file_sha256(directory / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _discard(directory: Path) -> None:
    """Renames before deleting, so that no other process finds half a directory under its proper name."""
    grave = Path(tempfile.mkdtemp(dir=directory.parent, prefix=PARTIAL))
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.rename(directory, grave / "old")
    shutil.rmtree(grave, ignore_errors=True)
