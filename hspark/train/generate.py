"""The target's own outputs on training prompts, generated with this package's engine and kept as JSON lines."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hspark.config import SamplingParams
from hspark.engine import Engine
from hspark.lab.outputs import read_outputs
from hspark.models import LoadedTarget
from hspark.policy.curves import whole
from hspark.speculator import HybridSpeculator
from hspark.train.checks import check_number

logger = logging.getLogger(__name__)


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
    A last line of `path` whose writing was interrupted is dropped with a warning, and its prompt answered again.
    ValueError for settings out of range, and for any other line that is not an answer, with its number.
    """
    check_number("sampled_share", sampled_share, lambda share: 0 <= share <= 1, "a share from 0 to 1")
    whole("max_new_tokens", max_new_tokens, 1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    model: Any = target.model
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    max_length = min(max_length, limit)
    if max_new_tokens >= max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt; use less than max_length={max_length}"
        )
    known = _answered(path)
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
            rng = random.Random(f"{seed}:{task_id}")
            temperature = 1.0 if rng.random() < sampled_share else 0.0
            params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=rng.getrandbits(32))
            wanted.append((task_id, message, ids, params))
    # Neighbours of about one length, and sampling's noise only in the steps that need it.
    wanted.sort(key=lambda entry: (entry[3].temperature, len(entry[2])))
    _answer(speculator.engine, wanted, path, progress)
    return path


def _answered(path: Path) -> set[str]:
    """The task ids in an answers file, which then ends with a whole line."""
    if not path.exists():
        return set()
    last = path.read_bytes().rpartition(b"\n")[2]
    if last and _is_json(last):
        with path.open("ab") as lines:
            lines.write(b"\n")
    elif last:
        logger.warning("%s: its last line is incomplete; it is dropped, and its prompt answered again", path)
        os.truncate(path, path.stat().st_size - len(last))
    return {output.task_id for output in read_outputs(path)} if path.stat().st_size else set()


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _answer(
    engine: Engine,
    wanted: Sequence[tuple[str, str, list[int], SamplingParams]],
    path: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Decodes (task id, message, prompt ids, parameters) and writes each as it is done; a failed one is left out."""
    working = [(entry, engine.submit(entry[2], entry[3])) for entry in wanted]
    with path.open("a", encoding="utf-8") as lines:
        while working:
            engine.step()
            done = [(entry, request) for entry, request in working if request.done]
            if not done:
                continue
            working = [(entry, request) for entry, request in working if not request.done]
            for (task_id, message, ids, params), request in done:
                record = {
                    "task_id": task_id,
                    "prompt": message,
                    "temperature": params.temperature,
                    "prompt_token_ids": ids,
                    "output_token_ids": request.token_ids,
                }
                if request.finish_reason != "error":
                    lines.write(json.dumps(record) + "\n")
            lines.flush()
            if progress is not None:
                progress(len(wanted) - len(working), len(wanted))
