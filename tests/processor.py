"""What this machine's processor can do, where a test depends on it."""

from pathlib import Path

_FACTS = Path("/proc/cpuinfo")
# Matrix units for bfloat16: what the order of sums in packed layers was examined on.
AMX = _FACTS.exists() and " amx_bf16 " in _FACTS.read_text(errors="replace")
