"""Training data: the target's own outputs, and what the target computed over them, kept on disk.

A `FeatureStore` is a folder with every token of every sequence, its tapped hidden states and its final hidden state, as
flat memory-mapped arrays: T tokens in all, N taps, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hspark.lab.outputs import RecordedOutput
from hspark.train.blocks import Batch, sample_anchors, spaced_anchors
from hspark.train.files import write_whole

MIN_SUPERVISED = 14  # shorter outputs teach next to nothing and are dropped, as in the reference recipe


def group_of(task_id: str, prompt: str) -> str:
    """What must not be split between training and held-out outputs: the code in a prompt's text, else the task.

    Variants of a task share it: of an id like "chat/39-7" the part before the last hyphen counts.
    """
    code = re.search(r"```.*?```", prompt, flags=re.DOTALL)
    text = (
        code.group(0) if code else task_id.rsplit("-", 1)[0] if "/" in task_id.rsplit("-", 1)[0] else task_id or prompt
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_held_out(group: str, share: float) -> bool:
    """A fixed pseudo-random choice of about `share` of all groups."""
    return int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) < share * 2**32


class FeatureStore:
    """Memory-mapped sequences with the target's hidden states. Made by `create`, filled by `fill`, read by `batch`.

    tokens: int32 [T]. taps: bfloat16 [T, N*H]. final: bfloat16 [T, H]. done: uint8 [sequences], 1 once filled.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index_path = self.folder / "index.json"
        if not index_path.is_file():
            raise ValueError(f"{folder} is not a feature store: it has no index.json")
        index = json.loads(index_path.read_text())
        self.taps_of: tuple[int, ...] = tuple(index["taps"])
        self.hidden_size: int = index["hidden_size"]
        self.offsets: list[int] = index["offsets"]
        self.prompt_lengths: list[int] = index["prompt_lengths"]
        self.groups: list[str] = index["groups"]
        self.task_ids: list[str] = index["task_ids"]
        self.temperatures: list[float] = index["temperatures"]
        total, width = self.offsets[-1], len(self.taps_of) * self.hidden_size
        self.tokens = self._map("tokens.bin", total, torch.int32)
        self.taps = self._map("taps.bin", total * width, torch.bfloat16).view(total, width)
        self.final = self._map("final.bin", total * self.hidden_size, torch.bfloat16).view(total, -1)
        self.done = self._map("done.bin", len(self), torch.uint8)

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def _map(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(self.folder / name), shared=True, size=size, dtype=dtype)

    def length(self, index: int) -> int:
        """Tokens of sequence `index`, prompt and output."""
        return self.offsets[index + 1] - self.offsets[index]

    @property
    def supervised(self) -> int:
        """Output tokens in all."""
        return self.offsets[-1] - sum(self.prompt_lengths)

    @classmethod
    def create(
        cls,
        folder: str | Path,
        outputs: Sequence[RecordedOutput],
        groups: Sequence[str],
        taps: Sequence[int],
        hidden_size: int,
    ) -> FeatureStore:
        """A store for these outputs, each with its group, with nothing filled in; one that holds the same is reopened.

        Outputs of fewer than 14 tokens are left out.
        """
        kept = [(o, g) for o, g in zip(outputs, groups, strict=True) if len(o.output_token_ids) >= MIN_SUPERVISED]
        if not kept:
            raise ValueError(f"no output has {MIN_SUPERVISED} tokens or more; there is nothing to train on")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sequences = [(*output.prompt_token_ids, *output.output_token_ids) for output, _ in kept]
        offsets = [0]
        for sequence in sequences:
            offsets.append(offsets[-1] + len(sequence))
        index = {
            "taps": list(taps),
            "hidden_size": hidden_size,
            "offsets": offsets,
            "prompt_lengths": [len(output.prompt_token_ids) for output, _ in kept],
            "groups": [group for _, group in kept],
            "task_ids": [output.task_id for output, _ in kept],
            "temperatures": [output.temperature or 0.0 for output, _ in kept],
        }
        path = folder / "index.json"
        if path.exists():
            if json.loads(path.read_text()) != index:
                raise ValueError(f"{folder} already holds features of other outputs or taps; use another folder")
            return cls(folder)
        torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32).numpy().tofile(
            folder / "tokens.bin"
        )
        write_whole(path, json.dumps(index))
        return cls(folder)

    @torch.inference_mode()
    def fill(self, target: Any, *, max_tokens: int = 4096, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs the target over every sequence that is not done yet, in batches of at most `max_tokens` padded tokens.

        target: a transformers causal LM. Interrupted work goes on where it stopped. progress(done, total) in tokens.
        """
        body, device = target.get_decoder(), next(target.parameters()).device
        scale = getattr(target.config.get_text_config(), "logit_scale", None) or 1.0  # of Cohere's logits
        states: dict[int, Tensor] = {}

        def keep(tap: int) -> Callable[..., None]:
            return lambda module, inputs, output: states.__setitem__(
                tap, output if torch.is_tensor(output) else output[0]
            )

        modules = {tap: body.get_input_embeddings() if tap < 0 else body.layers[tap] for tap in self.taps_of}
        handles = [module.register_forward_hook(keep(tap)) for tap, module in modules.items()]
        try:
            order = sorted((i for i in range(len(self)) if not self.done[i]), key=self.length)
            finished, total = 0, sum(map(self.length, order))
            while order:
                count = 1
                while count < len(order) and (count + 1) * self.length(order[count]) <= max_tokens:
                    count += 1
                now, order = order[:count], order[count:]
                ids = torch.zeros(count, self.length(now[-1]), dtype=torch.int64)
                for row, i in enumerate(now):
                    ids[row, : self.length(i)] = self.tokens[self.offsets[i] : self.offsets[i + 1]]
                # Padding on the right: causal attention keeps it away from the tokens before it.
                final = body(input_ids=ids.to(device), use_cache=False).last_hidden_state * scale
                for row, i in enumerate(now):
                    span, n = slice(self.offsets[i], self.offsets[i + 1]), self.length(i)
                    self.final[span] = final[row, :n].to("cpu", torch.bfloat16)
                    parts = [states[tap][row, :n].to("cpu", torch.bfloat16) for tap in self.taps_of]
                    self.taps[span] = torch.cat(parts, dim=-1)
                    self.done[i] = 1
                finished += sum(map(self.length, now))
                if progress is not None:
                    progress(finished, total)
        finally:
            for handle in handles:
                handle.remove()

    def batch(
        self,
        indices: Sequence[int],
        anchors: int,
        generator: torch.Generator | None,
        device: torch.device | str = "cpu",
        *,
        prompts: bool = False,
    ) -> Batch:
        """Sequences [G] with up to `anchors` random anchors each (evenly spaced ones when `generator` is None).

        prompts: anchors may lie in the prompt, too.
        """
        length = max(map(self.length, indices))
        tokens = torch.zeros(len(indices), length, dtype=torch.int64)
        loss_mask = torch.zeros(len(indices), length, dtype=torch.bool)
        taps = torch.zeros(len(indices), length, self.taps.shape[1], dtype=self.taps.dtype)
        final = torch.zeros(len(indices), length, self.hidden_size, dtype=self.final.dtype)
        for row, i in enumerate(indices):
            span, n = slice(self.offsets[i], self.offsets[i + 1]), self.length(i)
            tokens[row, :n] = self.tokens[span]
            loss_mask[row, 0 if prompts else self.prompt_lengths[i] : n] = True
            taps[row, :n] = self.taps[span]
            final[row, :n] = self.final[span]
        if generator is None:
            places, keep = spaced_anchors(loss_mask, anchors)
        else:
            places, keep = sample_anchors(loss_mask, anchors, generator)
        return Batch(*(t.to(device) for t in (tokens, loss_mask, taps, final, places, keep)))
