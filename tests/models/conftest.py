"""A cache of its own, and a package index of one local folder, for every test of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hspark.models import KNOWN_MODELS, KnownModel
from tests.models.model_files import write_gguf, write_wheel


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HSPARK_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny(index: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model named "tiny" whose wheel lies in the index."""
    known = write_wheel(index, tiny_gguf)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", known)
    return known
