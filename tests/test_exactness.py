"""Parts that a user made are judged by what they do: nothing lossy runs unless that was allowed, and it is marked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hspark import HybridSpeculator
from hspark.core import SOURCE_FREE, Chain
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.verify import RejectionVerifier
from tests.circle import params
from tests.fixtures import FLAT, PatternDrafter
from tests.plain import model_law, plain_decode
from tests.tiny import VOCAB, tiny_llama

SAMPLED: dict[str, Any] = {"drafting": "probabilistic", "verify": "rejection", "policy": "model_only"}


def made(drafter: Any, **settings: Any) -> HybridSpeculator:
    settings = {"cost": FLAT, "max_length": 64, "lookup": None, **settings}
    return HybridSpeculator(tiny_llama(), None, drafter=drafter, **settings)


def sampling(noise: str, drafting: str = "probabilistic") -> CausalLMDrafter:
    return CausalLMDrafter(tiny_llama(2), length=2, drafting=drafting, noise=noise)


def test_drafting_is_what_the_drafter_does() -> None:
    """Left at its default, the setting would call sampled drafts greedy, and allow what only greedy drafts allow."""
    for drafter, setting in ((sampling("independent"), "greedy"), (sampling("independent", "greedy"), "probabilistic")):
        own = drafter.drafting
        with pytest.raises(ValueError, match=rf"drafting='{setting}', but the drafter was made with drafting='{own}'"):
            made(drafter, **{**SAMPLED, "drafting": setting})
    assert made(sampling("independent"), **SAMPLED).engine.sizing.delay == 2, "fresh sizing would read the samples"


def test_noise_that_returns_is_refused_under_rejection() -> None:
    with pytest.raises(ValueError, match=r"noise='coupled' with verify='rejection' changes the output distribution"):
        made(sampling("coupled"), **SAMPLED)
    allowed = made(sampling("coupled"), allow_lossy=True, **SAMPLED)
    assert allowed.generate([[1, 2]], params(3, temperature=1.0))[0].lossy
    exact = made(sampling("coupled"), **{**SAMPLED, "verify": "coupled"})
    assert not exact.generate([[1, 2]], params(3, temperature=1.0))[0].lossy


class SampledFree(PatternDrafter):
    """A model-free drafter that says of its tokens that they were sampled."""

    drafting = "greedy"

    def propose(self, rows: Any, mode: Any) -> Chain:
        chain = super().propose(rows, mode)
        law = torch.zeros(*chain.tokens.shape, VOCAB).log_softmax(-1)
        return chain.replace(point_mass=torch.zeros_like(chain.point_mass), log_probs=law)


def test_sampled_chains_of_a_model_free_drafter_are_refused() -> None:
    """Nothing would keep policy and budget from reading them."""
    settings: dict[str, Any] = {"policy": "ngram_only", "verify": "rejection"}
    sampled = SampledFree({}, VOCAB, source=SOURCE_FREE)
    own = params(8, temperature=0.8, seed=3)
    with pytest.warns(UserWarning, match="proposed sampled tokens .log_probs."):
        (output,) = made(None, **{**settings, "lookup": sampled, "verify": "coupled"}).generate([[1, 2]], own)
    assert output.token_ids == plain_decode(model_law(tiny_llama()), [1, 2], own).ids
    assert output.metrics.drafters == {}
    sampled.drafting = "probabilistic"
    with pytest.raises(ValueError, match=r"lookup=.*drafting='probabilistic'.*give it as drafter="):
        made(None, **{**settings, "lookup": sampled})


class Foreign:
    """Somebody's verifier."""

    name = "foreign"

    def __call__(self, *args: Any, **options: Any) -> Any:
        return RejectionVerifier()(*args, **options)


def test_a_foreign_verifier_runs_with_a_model_drafter_and_is_taken_for_one_that_reads_drafts() -> None:
    drafter = sampling("independent", "greedy")
    exact = made(copy.deepcopy(drafter), verify=Foreign(), policy="proposed")
    assert (
        exact.generate([[1, 2, 3]], params(6))[0].token_ids
        == plain_decode(model_law(tiny_llama()), [1, 2, 3], params(6)).ids
    )
    with pytest.raises(ValueError, match="changes the output distribution"):
        made(sampling("independent"), verify=Foreign(), policy="proposed", drafting="probabilistic", lookup="ngram")
