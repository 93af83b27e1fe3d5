"""Drafters: what proposes the tokens that the target verifies."""

from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.ngram import NgramDrafter

__all__ = ["DSparkDrafter", "NgramDrafter"]
