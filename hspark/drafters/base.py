"""What the engine asks of a drafter, whether it is a model or a table of n-grams."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hspark.core import Chain, RowState
from hspark.sampling import SamplingMode


class TargetInfo(NamedTuple):
    """What a drafter may need to know of the target it drafts for.

    embed_tokens and lm_head are the target's own modules, shared, never copied; None for a target without them.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    embed_tokens: nn.Module | None
    lm_head: nn.Module | None


@runtime_checkable
class Drafter(Protocol):
    """A drafter proposes one chain per row, on the device, without reading anything back to the host.

    name: "ngram", "dspark", ...; it appears in `RequestOutput.sources` and in metrics.
    width: the longest chain it proposes (static).
    taps: target layers whose outputs it reads: index i is the output of decoder layer i, -1 the embedding output;
          empty for a drafter that reads tokens only.
    """

    name: str
    width: int
    taps: tuple[int, ...]

    def bind(self, target: TargetInfo, max_batch_size: int, max_length: int) -> None:
        """Allocates whatever is kept per row. ValueError if the drafter does not fit the target."""
        ...

    def observe(self, features: Tensor, row: Tensor, position: Tensor) -> None:
        """Takes the tapped hidden states [T, len(taps) * H] of packed target tokens at (row [T], position [T]).

        Called after every target forward, prompt chunks included. Positions whose token is later rejected are observed
        again with the right token before they count. Padding arrives with position = max_length (a dump column).
        """
        ...

    def propose(self, rows: RowState, mode: SamplingMode) -> Chain:
        """One chain for every row, from committed tokens alone. Rows that are not running get any chain."""
        ...


@runtime_checkable
class PromptReader(Protocol):
    """A drafter that processes prompts by itself, beside or instead of reading the target's hidden states."""

    def prefill(self, tokens: Tensor, row: int, start: int) -> None:
        """Takes a chunk int64 [T] of the prompt in one row, at positions start.., before its first `propose`."""
        ...
