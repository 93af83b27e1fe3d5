"""The paper's numbers that studies are set beside, shipped with the package."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_ASSET = Path(__file__).resolve().parents[2] / "assets" / "published.json"


@cache
def published() -> dict[str, Any]:
    """By study: numbers, and under "from" which table or section of the paper they are of."""
    return json.loads(_ASSET.read_text(encoding="utf-8"))
