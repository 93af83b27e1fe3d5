"""What puts an engine's rows right: after a step that was interrupted, and after logits that held NaN."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hspark.engine import Engine


def resume(engine: Engine) -> None:
    """After an interrupted step: every row goes back to what its request has been told, and nothing is in flight.

    A step that was enqueued is lost. Its tokens come again: what a request emits is a function of its own text. Its
    word on NaNs is lost as well, so all that is not known to be valid is zeroed.
    """
    engine.in_flight.clear()
    engine.suspended.clear()
    engine.waiting = deque(request for request in engine.waiting if request not in engine.owners)
    for row, owner in enumerate(engine.owners):
        if owner is None or owner.done:
            engine.release_row(row)
            engine.target.buffers.clear(row, 0)
            continue
        engine.write_row(row, owner)
        length = len(owner.prompt) + len(owner.token_ids)
        engine.rows.tokens[row, :length] = torch.tensor(owner.prompt + owner.token_ids, device=engine.device)
        engine.rows.length[row] = length
        engine.target.buffers.clear(row, length - 1 if engine.ready(owner) else owner.prefilled)
        if engine.ready(owner):
            engine.start_row(row)


def scrub(engine: Engine, row: int) -> None:
    """Zeroes what NaNs may have left in a row's keys and values: even where masked, they poison a weighted sum.

    What the row's present owner has been told stays. A step that failed with drafts, or for a request that has ended,
    says nothing about that owner: it repeats from its newest token, without drafts, all that is in flight.
    """
    owner, valid = engine.owners[row], 0
    if owner is not None:
        engine.suspended.add(row)
        engine.speculate[row] = False
        valid = owner.prefilled
        if engine.ready(owner):
            valid = len(owner.prompt) + len(owner.token_ids) - 1
            engine.rows.length[row] = valid + 1
    engine.target.buffers.clear(row, valid)
    engine.void_before[row] = engine.step_number
