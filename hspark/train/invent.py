"""Prompts that the target makes up itself, for training without a prompt file."""

from __future__ import annotations

from collections.abc import Callable

from hspark.config import SamplingParams
from hspark.models import LoadedTarget
from hspark.speculator import HybridSpeculator

INVENTED = "invented"  # the kind of task of these prompts
_MARK = "HSPARKMARK"
# Prompts that are asked for at once, in batches, and tries per wanted prompt before giving up.
_WAVES, _TRIES = 4, 6


def invent_prompts(
    target: LoadedTarget,
    count: int,
    *,
    seed: int = 0,
    max_new_tokens: int = 96,
    top_p: float = 0.95,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[str, str]]:
    """`count` distinct (task id, user message) pairs, or as many as come: the target, given its chat template up to
    where a user's message begins, writes that message at temperature 1 (Magpie: Xu et al. 2024, arXiv:2406.08464).

    Messages that do not end within `max_new_tokens` tokens are dropped. The same seed gives the same prompts.
    progress(done, count). The target cannot be called directly any more: the engine has taken it over.
    ValueError for a target without a chat template, or one that does not begin with what stands before the message.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r} invented prompts; use an integer of at least 1")
    prefix, stop = _around_message(target)
    speculator = HybridSpeculator(
        target.model,
        target.tokenizer,
        name=target.name,
        eos_token_ids=target.eos_token_ids,
        lookup=None,
        policy="vanilla",
        max_batch_size=batch_size,
        max_length=len(prefix) + max_new_tokens,
    )
    found: dict[str, None] = {}
    tried, wave = 0, _WAVES * batch_size
    while len(found) < count and tried < _TRIES * count + wave:
        params = [
            SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0, top_p=top_p, stop=stop, seed=seed + number)
            for number in range(tried, tried + wave)
        ]
        for output in speculator.generate([prefix] * wave, params):
            message = (output.text or "").strip()
            if message and output.finish_reason == "stop":
                found[message] = None
        tried += wave
        if progress is not None:
            progress(min(len(found), count), count)
    return [(f"{INVENTED}/{seed}.{number}", message) for number, message in enumerate(list(found)[:count])]


def _around_message(target: LoadedTarget) -> tuple[list[int], tuple[str, ...]]:
    """Token ids of what the template puts before a user's message, and the strings that end one."""
    tokenizer = target.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{target.name} has no chat template to invent prompts with; give a prompt file")
    messages = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    before, mark, after = text.partition(_MARK)
    prefix = list(tokenizer(before, add_special_tokens=False)["input_ids"]) if mark else []
    if not prefix:
        raise ValueError(f"{target.name}'s chat template has nothing before a user's message; give a prompt file")
    end = after.strip()
    # An end that is a special token ends the output by its id; in the text it would not be seen.
    return prefix, (end,) if end and end not in tokenizer.all_special_tokens else ()
