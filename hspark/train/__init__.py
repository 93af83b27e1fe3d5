"""Training a DSpark drafter for any supported target: data, losses, loop, export."""

from hspark.train.command import main

__all__ = ["main"]
