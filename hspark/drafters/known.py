"""Which DSpark drafter belongs to which target: the published pairs, and the drafter shipped with this package."""

from __future__ import annotations

from pathlib import Path

# Table 3 of the paper: target -> drafter, both on the Hugging Face hub.
PUBLISHED = {
    "Qwen/Qwen3-4B": "deepseek-ai/dspark_qwen3_4b_block7",
    "Qwen/Qwen3-8B": "deepseek-ai/dspark_qwen3_8b_block7",
    "google/gemma-4-12B-it": "deepseek-ai/dspark_gemma4_12b_block7",
    "CohereLabs/North-Mini-Code-1.0-w4a16": "sdougbrown/North-Mini-Code-1.0-dspark",
    "meta-llama/Llama-3.1-8B-Instruct": "weifanjiang/llama3.1-8b-it.speculators.dspark-ce01tv09-bs8-conf-swa",
}
# The same weights under another name.
ALIASES = {
    "CohereLabs/North-Mini-Code-1.0": "CohereLabs/North-Mini-Code-1.0-w4a16",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
}
PACKAGED = {"smollm2-135m": Path(__file__).parents[1] / "assets" / "dspark-smollm2-135m"}


def known_drafter(target_name: str) -> str | None:
    """The hub id or packaged directory of the drafter known for a target, or None. Case does not matter."""
    names = {name.lower(): name for name in (*PUBLISHED, *ALIASES, *PACKAGED)}
    name = names.get(target_name.lower(), "")
    name = ALIASES.get(name, name)
    if name in PACKAGED:
        return str(PACKAGED[name]) if PACKAGED[name].is_dir() else None
    return PUBLISHED.get(name)
