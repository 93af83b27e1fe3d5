"""llama.cpp as an arm of a benchmark, through llama-cpp-python (the optional extra `peers`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing torch would take part in llama.cpp's start-up time and memory
    from hspark.config import SamplingParams
    from hspark.lab.arms import Watch
    from hspark.lab.runs import GroupRun

# Draft tokens of its prompt lookup; its own default.
LOOKUP_TOKENS = 10
# How llama.cpp numbers the types that keys and values are stored in. The 16-bit one is its default.
_KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 1}


def missing_llama() -> str | None:
    """Why llama.cpp cannot be run here, or None if it can."""
    try:
        import llama_cpp  # noqa: F401
    except ImportError as error:
        return f"llama-cpp-python is not installed ({error}); it is the extra `pip install 'hspark[peers]'`"
    except (OSError, RuntimeError) as error:  # its shared library does not load
        return f"llama-cpp-python does not load: {error}"
    return None


class CountedLookup:
    """A prompt-lookup drafter of llama.cpp that counts its calls: one before every forward but the prompt's."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.calls = drafter, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.drafter(*args, **kwargs)


def open_llama(
    path: Path, capacity: int, dtype: str, threads: int, *, on_cpu: bool, lookup: bool
) -> tuple[Any, CountedLookup | None]:
    """Loads a .gguf file for up to `capacity` tokens of prompt and output; returns the model and its drafter, if any.

    dtype: the name of the type of the weights, after which that of keys and values goes.
    """
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafter = CountedLookup(LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)) if lookup else None
    llama = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=capacity + LOOKUP_TOKENS + 1,  # its lookup drafts past the last token that is asked for
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0 if on_cpu else -1,
        type_k=_KV_TYPES[dtype],
        type_v=_KV_TYPES[dtype],
        draft_model=drafter,
        logits_all=lookup,  # lookup needs them; without asking, room for them ends at one batch of tokens
        verbose=False,
    )
    return llama, drafter


class LlamaArm:
    """An arm that is llama.cpp, greedy, one prompt after the other, on the token ids that the other arms get.

    llama: a llama_cpp.Llama. lookup: the drafter that it was given, or None.
    """

    def __init__(self, llama: Any, eos_token_ids: tuple[int, ...], lookup: CountedLookup | None = None) -> None:
        self.llama, self.ends, self.lookup = llama, frozenset(eos_token_ids), lookup

    @classmethod
    def open(
        cls, path: Path, capacity: int, dtype: str, threads: int, ends: tuple[int, ...], *, on_cpu: bool, lookup: bool
    ) -> LlamaArm:
        """An arm on what `open_llama` opens."""
        llama, drafter = open_llama(path, capacity, dtype, threads, on_cpu=on_cpu, lookup=lookup)
        return cls(llama, ends, drafter)

    def run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], watch: Watch | None = None
    ) -> GroupRun:
        """As SpeculatorArm.run; there are no steps to watch. ValueError for params that are not greedy."""
        from hspark.lab.runs import GroupRun

        run = GroupRun([], 0.0, 0.0, 0)
        for prompt, own in zip(prompts, params, strict=True):
            if not own.greedy:
                raise ValueError(f"temperature={own.temperature!r}: llama.cpp is measured greedily; use 0")
            ends = frozenset() if own.ignore_eos else self.ends
            self.llama.reset()  # else it would keep the beginning that two prompts share
            calls = 0 if self.lookup is None else self.lookup.calls
            tokens: list[int] = []
            begun = first = time.perf_counter()
            for token in self.llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
                if not tokens:
                    first = time.perf_counter()
                tokens.append(int(token))
                if token in ends or len(tokens) >= own.max_new_tokens:
                    break
            run.seconds += time.perf_counter() - begun
            run.prefill_seconds += first - begun
            run.token_ids.append(tokens)
            run.decode_tokens += len(tokens) - 1
            run.forwards += len(tokens) - 1 if self.lookup is None else self.lookup.calls - calls
        return run
