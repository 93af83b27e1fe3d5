"""The target's own outputs on training prompts, generated with this package's engine and kept as JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hspark.config import SamplingParams
from hspark.models import LoadedTarget
from hspark.speculator import HybridSpeculator


def generate_outputs(
    target: LoadedTarget,
    prompts: Sequence[tuple[str, str]],
    path: str | Path,
    *,
    max_new_tokens: int = 320,
    sampled_share: float = 0.3,
    batch_size: int = 32,
    max_length: int = 1536,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Answers every (task id, user message) and appends one line each to `path`; answered ones are not repeated.

    A share of `sampled_share` is answered at T = 1, the rest greedily; which ones depends on the seed and the task id.
    Lines hold task_id, prompt, temperature, prompt_token_ids and output_token_ids. Prompts that leave no room for the
    answer in `max_length` tokens (or in the target's context, if that is shorter) are passed over. Returns `path`.
    progress(done, total) in prompts. The target cannot be called directly any more: the engine has taken it over.
    """
    if not 0 <= sampled_share <= 1:
        raise ValueError(f"sampled_share={sampled_share!r}; use a share from 0 to 1")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    model: Any = target.model
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    max_length = min(max_length, limit)
    known = set()
    if path.exists():
        known = {json.loads(line)["task_id"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
    speculator = HybridSpeculator(
        model,
        target.tokenizer,
        name=target.name,
        eos_token_ids=target.eos_token_ids,
        lookup="ngram",
        policy="ngram_only",
        max_batch_size=batch_size,
        max_length=max_length,
    )
    wanted = []
    for task_id, message in prompts:
        ids = speculator.encode([{"role": "user", "content": message}])
        if task_id not in known and len(ids) + max_new_tokens <= max_length:
            wanted.append((task_id, message, ids))
    wanted.sort(key=lambda entry: len(entry[2]))
    with path.open("a", encoding="utf-8") as lines:
        for start in range(0, len(wanted), 4 * batch_size):
            part = wanted[start : start + 4 * batch_size]
            rngs = [random.Random(f"{seed}:{task_id}") for task_id, _, _ in part]
            temperatures = [1.0 if rng.random() < sampled_share else 0.0 for rng in rngs]
            params = [
                SamplingParams(max_new_tokens=max_new_tokens, temperature=t, seed=rng.getrandbits(32))
                for t, rng in zip(temperatures, rngs, strict=True)
            ]
            outputs = speculator.generate([ids for _, _, ids in part], params)
            for (task_id, message, ids), temperature, output in zip(part, temperatures, outputs, strict=True):
                record = {
                    "task_id": task_id,
                    "prompt": message,
                    "temperature": temperature,
                    "prompt_token_ids": ids,
                    "output_token_ids": output.token_ids,
                }
                lines.write(json.dumps(record) + "\n")
            lines.flush()
            if progress is not None:
                progress(min(start + len(part), len(wanted)), len(wanted))
    return path
