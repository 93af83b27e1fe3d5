"""Huge pages for a model's weights on Linux.

A decode step on a CPU reads every weight once. With pages of 4 KiB the processor looks up a page every 4 KiB of that,
which costs more than the reading: measured on a virtual machine, linear layers took 1.5 to 1.8 times as long. Where the
kernel leaves the choice to programs (`madvise`, the usual setting) this file makes it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h; the second since Linux 6.1
_HUGE = 1 << 21
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages() -> int:
    """Moves this process's large anonymous memory onto huge pages, now and where it grows; returns the bytes moved.

    Call it when the weights are loaded. Memory that was never touched stays unpopulated. 0, and nothing done, where the
    system has no transparent huge pages or does not let programs ask for them.
    """
    if not sys.platform.startswith("linux") or not _allowed():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for start, end in _anonymous_ranges():
        if libc.madvise(start, end - start, _MADV_HUGEPAGE):
            continue
        # Fails, without harm, where part of the range holds nothing yet, and on older kernels, which do it in time.
        if not libc.madvise(start, end - start, _MADV_COLLAPSE):
            moved += end - start
        elif ctypes.get_errno() == errno.ENOMEM:
            break
    logger.debug("%d MiB moved onto huge pages", moved >> 20)
    return moved


def _allowed() -> bool:
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _anonymous_ranges() -> list[tuple[int, int]]:
    """Writable private memory of this process, without files behind it, cut to whole huge pages."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split(maxsplit=5)
        if access != "rw-p" or inode != "0" or (name and name[0] != "[heap]"):
            continue
        start, end = (int(bound, 16) for bound in span.split("-"))
        start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if end > start:
            ranges.append((start, end))
    return ranges
