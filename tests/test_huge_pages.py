"""Moving memory onto huge pages changes where it lies, not what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hspark import huge_pages


def test_memory_keeps_its_contents() -> None:
    table = torch.arange(3 << 20)
    moved = huge_pages.use_huge_pages()
    assert moved >= 0
    assert moved % (1 << 21) == 0
    assert torch.equal(table, torch.arange(3 << 20))


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_nothing_is_done_where_the_system_says_never(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(huge_pages, "_SETTING", file)
    assert huge_pages.use_huge_pages() == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_ranges_are_whole_huge_pages() -> None:
    ranges = huge_pages._anonymous_ranges()
    assert all(start < end and start % (1 << 21) == 0 and end % (1 << 21) == 0 for start, end in ranges)
