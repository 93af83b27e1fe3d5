"""Bringing a step's outcome to the host while the device goes on."""

from __future__ import annotations

from typing import Any

import torch

from hspark.step import Outcome


class Readback:
    """An outcome on its way to the host.

    On an accelerator the copies go into pinned memory, behind the step on its stream, and an event says when they have
    arrived; nothing waits before `wait` is called, and the device's tensors may be overwritten by later steps. Where
    the host is the device there is nothing to copy.
    """

    def __init__(self, outcome: Outcome) -> None:
        self._event: Any | None = None
        self._outcome = outcome
        device = outcome.count.device
        if device.type != "cpu":
            copies: Any = (None if t is None else t.to("cpu", non_blocking=True) for t in outcome)
            self._outcome = Outcome(*copies)
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> Outcome:
        """The outcome in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._outcome
