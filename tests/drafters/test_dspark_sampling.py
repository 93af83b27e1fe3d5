"""The law that the DSpark drafter reports for each slot, and the noise that it draws with."""

from __future__ import annotations

import math

import pytest
import torch

from hspark.drafters.dspark import committed_counts
from hspark.drafters.dspark_model import DSparkModel
from hspark.sampling import STREAM_COUPLED, STREAM_DRAFT, gumbel_noise, slot_key, target_log_probs
from tests.assertions import assert_valid_chain
from tests.drafters.dspark_cases import GREEDY, SAMPLED, bound, feed, rows_of
from tests.drafters.dspark_models import ALL_PARTS, MODELS, TEXT, a_batch


@pytest.mark.parametrize("noise", ["coupled", "independent"])
def test_reported_law_is_the_processed_law_and_the_noise_is_the_documented_one(model: DSparkModel, noise: str) -> None:
    """Each slot's law is `target_log_probs` of its corrected logits, with the row's own settings and history."""
    drafter, rows = a_batch(model, drafting="probabilistic", noise=noise)
    chain = drafter.propose(rows, ALL_PARTS)
    assert_valid_chain(chain, 40)
    assert chain.log_probs is not None
    anchor = rows.length - 1
    hidden = drafter._block(rows, anchor)
    lead = 1 if model.config.anchor_first else 2
    first = rows.tokens.gather(1, anchor[:, None]).expand(-1, lead)
    logits = model.base_logits(hidden) + model.markov_bias(torch.cat((first, chain.tokens[:, :-1]), 1), hidden)
    text = rows
    for slot in range(chain.width):
        full = torch.full((6, 40), -math.inf).index_copy(1, model.target_ids(), logits[:, lead - 1 + slot])
        expected = target_log_probs(full, rows.sampling, ALL_PARTS, committed_counts(text, 40))
        torch.testing.assert_close(chain.log_probs[:, slot], expected, rtol=1e-4, atol=1e-4)
        if noise == "coupled":
            drawn = gumbel_noise(rows.sampling.seed, anchor + 1 + slot, 40, STREAM_COUPLED)
        else:
            drawn = gumbel_noise(rows.sampling.seed, slot_key(anchor, slot), 40, STREAM_DRAFT)
        assert (expected + drawn).argmax(-1).tolist() == chain.tokens[:, slot].tolist()
        tokens = text.tokens.scatter(1, text.length[:, None], chain.tokens[:, slot : slot + 1])
        text = text._replace(tokens=tokens, length=text.length + 1)
    assert not bool((chain.tokens == 3).any())  # banned by its bias


def test_greedy_rows_draft_the_same_beside_sampled_ones(model: DSparkModel) -> None:
    """Temperature 0 and 1e-6 are greedy: point masses, and the tokens of a greedy drafter under the same settings."""
    drafter, rows = a_batch(model, drafting="probabilistic")
    chain = drafter.propose(rows, ALL_PARTS)
    greedy_drafter, _ = a_batch(model)
    plain = greedy_drafter.propose(rows, ALL_PARTS)
    assert plain.log_probs is None
    assert bool(plain.point_mass.all())
    greedy = torch.tensor([True, False, False, True, False, False])
    assert torch.equal(chain.point_mass, greedy[:, None].expand(chain.tokens.shape))
    assert torch.equal(chain.tokens[greedy], plain.tokens[greedy])
    assert chain.log_probs is not None
    picked = chain.log_probs[greedy].gather(-1, chain.tokens[greedy][..., None])
    assert bool((picked == 0).all())
    unsampled = drafter.propose(rows, ALL_PARTS._replace(sampled=False))
    assert unsampled.log_probs is None
    assert torch.equal(unsampled.tokens[greedy], plain.tokens[greedy])


def test_greedy_drafting_at_a_temperature_is_still_greedy() -> None:
    drafter = bound(MODELS["anchor_first"])
    feed(drafter, 0, TEXT[:8])
    warm = drafter.propose(rows_of([TEXT[:9]], temperature=2.0, seed=5), SAMPLED)
    assert torch.equal(warm.tokens, drafter.propose(rows_of([TEXT[:9]]), GREEDY).tokens)
    assert warm.log_probs is None


def test_coupled_noise_depends_on_the_position_and_independent_noise_on_the_step() -> None:
    """One step later the coupled noise of a position returns; independent noise never does."""
    at = {
        noise: {
            (anchor, slot): bound(MODELS["anchor_first"], drafting="probabilistic", noise=noise)._noise(
                rows_of([TEXT[:9]], seed=1), torch.tensor([anchor]), slot
            )
            for anchor, slot in ((8, 1), (9, 0))
        }
        for noise in ("coupled", "independent")
    }
    assert torch.equal(at["coupled"][8, 1], at["coupled"][9, 0])
    assert not torch.equal(at["independent"][8, 1], at["independent"][9, 0])
    assert not torch.equal(at["independent"][8, 1], at["coupled"][8, 1])
