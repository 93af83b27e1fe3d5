"""Token by token: does every arm emit what vanilla decoding emits, and where not, was it a tie?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from hspark.config import SamplingParams
from hspark.lab.runs import BatchRuns, BenchPrompt, Difference
from hspark.sampling import SamplingState, gumbel_noise, target_log_probs

# How far two kernels' logits commonly lie apart after a whole model, relative to the largest logit: a few units in the
# last place of the 16-bit types, and more of the wide ones, where sums of many terms are what rounds.
NEAR_TIE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
# Margins cost a forward over the prefix each.
MOST_MARGINS = 256


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """The first index at which two outputs differ, an end counting as a token; None if they are equal."""
    for index, (left, right) in enumerate(zip_longest(expected, got)):
        if left != right:
            return index
    return None


def compare(
    batch: BatchRuns,
    prompts: Sequence[BenchPrompt],
    params: Callable[[int], SamplingParams],
    comparable: Callable[[str], bool],
    model: Any,
    tokenizer: Any | None = None,
) -> None:
    """Fills `compared` and `differences` of a batch: every run of every comparable arm against vanilla's first.

    params: of the prompt of an index. comparable: whether an arm's text has to be vanilla's. model: a plain causal LM,
    for the margins. Each (arm, prompt) is reported at most once, at its first repeat that differs.
    """
    expected: dict[int, list[int]] = {}
    for group, run in zip(batch.groups, batch.runs["vanilla"][0], strict=True):
        expected.update(zip(group, run.token_ids, strict=True))
    found: dict[tuple[str, int], Difference] = {}
    for arm, repeats in batch.runs.items():
        if not comparable(arm):
            continue
        batch.compared[arm] = len(expected)
        for repeat, runs in enumerate(repeats):
            for group, run in zip(batch.groups, runs, strict=True):
                for index, got in zip(group, run.token_ids, strict=True):
                    at = first_difference(expected[index], got)
                    if at is not None and (arm, index) not in found:
                        found[arm, index] = Difference(
                            task_id=prompts[index].task_id,
                            arm=arm,
                            batch_size=batch.batch_size,
                            repeat=repeat + 1,
                            position=at,
                            expected=_token(expected[index], at),
                            got=_token(got, at),
                        )
    for number, ((_, index), difference) in enumerate(found.items()):
        text = prompts[index].token_ids + expected[index][: difference.position]
        if number < MOST_MARGINS:
            difference = with_margin(difference, text, params(index), model)
        batch.differences.append(_with_texts(difference, tokenizer))


def _token(tokens: Sequence[int], at: int) -> int | None:
    return tokens[at] if at < len(tokens) else None


def _with_texts(difference: Difference, tokenizer: Any | None) -> Difference:
    if tokenizer is None:
        return difference
    texts = [None if token is None else tokenizer.decode([token]) for token in (difference.expected, difference.got)]
    return replace(difference, expected_text=texts[0], got_text=texts[1])


@torch.inference_mode()
def with_margin(difference: Difference, text: list[int], params: SamplingParams, model: Any) -> Difference:
    """The difference with its margin. text: the token ids before it, prompt included."""
    if difference.expected is None or difference.got is None:
        return difference
    device = model.device
    logits = (
        model(input_ids=torch.tensor([text], device=device), use_cache=False, logits_to_keep=1).logits[0, -1].float()
    )
    scale, scores = float(logits.abs().max()), logits
    if not params.greedy:
        state = SamplingState.defaults(1, device)
        state.temperature[0] = params.temperature
        scores = target_log_probs(logits[None], state, params.mode)[0]
        seed, position = (torch.tensor(value, device=device) for value in (params.seed or 0, len(text)))
        scores = scores + gumbel_noise(seed, position, scores.shape[0])
        scale /= params.temperature
    margin = float(scores[difference.expected] - scores[difference.got])
    return replace(difference, margin=margin, near_tie=abs(margin) <= NEAR_TIE[model.dtype] * scale)
