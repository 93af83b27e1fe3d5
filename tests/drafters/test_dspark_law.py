"""The law that a probabilistic drafter reports is the law that it draws from: histograms over many noise seeds.

Each chi-square test of `ALARM` level is a pure function of fixed seeds, so it cannot flicker; the level says how
surprising its passing would be for a wrong sampler. The control draws from a slightly different law and must fail.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hspark.core import Chain
from hspark.sampling import SamplingMode
from hspark.verify.statistics import chi_square
from tests.drafters.dspark_cases import bound, feed, random_model, rows_of, tiny_config

ALARM = 1e-6  # each test below makes fewer than ten comparisons: false alarms in less than one of 100,000 runs
ROWS = 6000
TEXT = [1, 5, 9, 13, 2]
MODEL = random_model(tiny_config(block_size=3, num_layers=1), seed=8, scale=0.3)


def draw(noise: str, temperature: float, top_k: int = 0, first_seed: int = 0) -> Chain:
    """The same request in every row, with different noise seeds."""
    drafter = bound(MODEL, rows=ROWS, max_length=8, drafting="probabilistic", noise=noise)
    feed(drafter, 0, TEXT[:-1])
    for buffer in drafter.buffers:
        for tensor in buffer:
            tensor.copy_(tensor[:1].expand_as(tensor))
    seeds = first_seed + torch.arange(ROWS)
    rows = rows_of([TEXT] * ROWS, 8, temperature=temperature, top_k=top_k, seed=seeds)
    return drafter.propose(rows, SamplingMode(sampled=True, filters=top_k > 0))


def compare(tokens: Tensor, law: Tensor) -> float:
    return chi_square(torch.bincount(tokens, minlength=law.shape[-1]), law)


@pytest.mark.parametrize("noise", ["coupled", "independent"])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 0), (1.3, 6)])
def test_reported_law_is_the_sampled_law(noise: str, temperature: float, top_k: int) -> None:
    chain = draw(noise, temperature, top_k)
    assert chain.log_probs is not None
    law = chain.log_probs.exp()
    torch.testing.assert_close(law[:, 0], law[:1, 0].expand_as(law[:, 0]))
    assert compare(chain.tokens[:, 0], law[0, 0]) > ALARM
    # The second slot's law depends on the first token: compare within each common first token. (Noise shared between
    # the slots would fail here.)
    common = torch.bincount(chain.tokens[:, 0]).argsort(descending=True)[:4]
    for token in common:
        picked = chain.tokens[:, 0] == token
        assert compare(chain.tokens[picked, 1], law[picked, 1][0]) > ALARM
    drawn = law.gather(-1, chain.tokens[..., None])
    assert bool((drawn > 0).all()), "a token outside the reported support was drawn"


def test_a_wrong_law_is_noticed() -> None:
    """Control: the same draws against the law of a temperature 15 % higher, and against the unfiltered law."""
    chain, other = draw("coupled", 0.7), draw("coupled", 0.8)
    assert other.log_probs is not None
    assert compare(chain.tokens[:, 0], other.log_probs[0, 0].exp()) < ALARM
    filtered = draw("coupled", 1.3, top_k=6)
    whole = draw("coupled", 1.3)
    assert whole.log_probs is not None
    assert compare(filtered.tokens[:, 0], whole.log_probs[0, 0].exp()) < ALARM
