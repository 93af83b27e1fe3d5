"""The distribution that comes out of the engine, end to end: sampled drafts, filters, penalties, both verifiers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hspark.config import SamplingParams
from hspark.policy import LossyCombinationError, policy, policy_names, refuse_if_lossy
from tests.fixtures import LawDrafter, ScriptedTarget, build_engine, serve
from tests.plain import Law, random_law, sampling_law

SMALL, LENGTH, DRAWS = 4, 3, 2000
# False-alarm rate of each chi-square test below: 1e-6, by the Wilson-Hilferty approximation of its quantile.
QUANTILE = 4.75


def exact_outputs(law: Law, prompt: tuple[int, ...], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every output of LENGTH tokens, by enumeration."""
    chances = {}
    for output in itertools.product(range(SMALL), repeat=LENGTH):
        chance = 1.0
        for place, token in enumerate(output):
            before = list(output[:place])
            chance *= float(sampling_law(law((*prompt, *before)), prompt, before, params).exp()[token])
        if chance > 0:
            chances[output] = chance
    return chances


def is_plausible(counts: dict[tuple[int, ...], int], exact: dict[tuple[int, ...], float]) -> bool:
    """Chi-square goodness of fit; outcomes that are expected less than five times are taken together."""
    if set(counts) - set(exact):
        return False
    total = sum(counts.values())
    cells = [(counts.get(output, 0), total * chance) for output, chance in exact.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + (
        [(sum(c for c, _ in rare), sum(e for _, e in rare))] if rare else []
    )
    cells = [cell for cell in cells if cell[1] > 0]
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = max(len(cells) - 1, 1)
    bound = freedom * (1 - 2 / (9 * freedom) + QUANTILE * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic <= bound


LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.7, "repetition_penalty": 1.4},
    {"min_p": 0.3, "frequency_penalty": 0.8, "logit_bias": {0: 1.0}},
]


def outcomes(
    law: Law,
    drafter: Any,
    verify: str,
    options: dict[str, Any],
    policy: str = "model_only",
    prompt: tuple[int, ...] = (1, 2),
) -> dict[tuple[int, ...], int]:
    """How often each output came, over DRAWS requests with seeds 0, 1, ..."""
    target = ScriptedTarget(law, SMALL, rows=100, max_length=len(prompt) + LENGTH + 3)
    engine = build_engine(target, policy, model=drafter, verify=verify, budget="all")
    params = {"max_new_tokens": LENGTH, "temperature": 1.0, **options}
    jobs = [(prompt, SamplingParams(seed=seed, **params)) for seed in range(DRAWS)]
    counts: dict[tuple[int, ...], int] = {}
    for output in serve(engine, jobs, watch=False):
        counts[tuple(output.token_ids)] = counts.get(tuple(output.token_ids), 0) + 1
    return counts


@pytest.mark.parametrize(
    ("verify", "options"), [("coupled", LAWS[0])] + [("rejection", options) for options in LAWS], ids=str
)
def test_outputs_follow_the_exact_law(options: dict[str, Any], verify: str) -> None:
    """Sampled drafts from another law than the target's: the joint law of three tokens is the target's.

    The drafter ignores the request's filters and reports what it drew from, which rejection verification corrects for
    and coupled verification never reads.
    """
    law, other = random_law(SMALL, seed=1, order=2, scale=1.0), random_law(SMALL, seed=2, order=1, scale=1.0)
    counts = outcomes(law, LawDrafter(other, SMALL, width=2), verify, options)
    assert is_plausible(counts, exact_outputs(law, (1, 2), SamplingParams(**{"temperature": 1.0, **options})))
    assert not is_plausible(counts, exact_outputs(other, (1, 2), SamplingParams(temperature=1.0))), "the test is blind"


def test_a_wrong_draft_law_is_noticed() -> None:
    """Negative control: reporting a flat law for skewed drafts makes rejection verification accept too often."""

    class Liar(LawDrafter):
        def propose(self, rows: Any, mode: Any) -> Any:
            chain = super().propose(rows, mode)
            return chain._replace(log_probs=torch.full((*chain.tokens.shape, SMALL), 1 / SMALL).log())

    law, other = random_law(SMALL, seed=1, order=2, scale=1.0), random_law(SMALL, seed=2, order=1, scale=1.0)
    counts = outcomes(law, Liar(other, SMALL, width=2), "rejection", {})
    assert not is_plausible(counts, exact_outputs(law, (1, 2), SamplingParams(temperature=1.0)))


def test_sampled_drafts_equal_to_the_target_are_all_accepted() -> None:
    """Draft law = target law under rejection verification: no rejection in 10,000 steps, no NaN."""
    law = random_law(SMALL, seed=3, order=2)
    target = ScriptedTarget(law, SMALL, rows=200, max_length=64)
    drafter = LawDrafter(law, SMALL, width=1)
    engine = build_engine(target, "model_only", model=drafter, verify="rejection", budget="all")
    jobs = [((i % SMALL, 2), SamplingParams(max_new_tokens=50, temperature=1.0, seed=i)) for i in range(400)]
    outputs = serve(engine, jobs, watch=False)
    assert sum(o.metrics.steps for o in outputs) == 10_000
    for output in outputs:
        assert output.finish_reason == "length"
        assert output.metrics.drafters["dspark"].accepted == output.metrics.drafters["dspark"].verified == 25
        assert output.sources[:2] == ["dspark", "target"]


LOOP = (0, 1, 2, 3) * 3  # the n-gram drafter continues it


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("policy_name", [name for name in policy_names() if name != "vanilla"])
def test_every_policy_keeps_the_law_under_rejection(policy_name: str, drafting: str) -> None:
    """Two real drafters, one chain per request, drafts accepted and rejected: three tokens follow the target's law."""
    if not policy(policy_name).is_lossless(drafting, "rejection", 1.0):
        with pytest.raises(LossyCombinationError, match=policy_name):
            refuse_if_lossy(policy(policy_name), drafting, "rejection", 2)
        return
    law, other = random_law(SMALL, seed=1, order=2, scale=1.0), random_law(SMALL, seed=2, order=1, scale=1.0)
    drafter = LawDrafter(other, SMALL, width=2, sampled=drafting == "probabilistic")
    counts = outcomes(law, drafter, "rejection", {}, policy_name, LOOP)
    assert is_plausible(counts, exact_outputs(law, LOOP, SamplingParams(temperature=1.0)))
