"""Names, options, and the table of what preserves the target's distribution."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import Tensor

import hspark.policy
from hspark.core import SOURCE_MODEL, Chain
from hspark.policy import (
    ChainPolicy,
    LossyCombinationError,
    Policy,
    lossy_reason,
    policy,
    policy_names,
    refuse_if_lossy,
    register,
)
from hspark.policy import base as registry
from tests.policy.reference import rows_of
from tests.strategies import QUARTERS, chain_pairs, prices

NAMES = (
    "proposed",
    "expected_length",
    "no_contains",
    "ngram_first",
    "threshold",
    "extension",
    "model_only",
    "ngram_only",
    "vanilla",
)
LOSSY = ("proposed", "expected_length", "no_contains")


def test_the_registry_knows_every_policy() -> None:
    assert set(policy_names()) == set(NAMES)
    for name in NAMES:
        made = policy(name)
        assert isinstance(made, Policy)
        assert made.name == name


def test_an_unknown_name_or_option_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="policy='fastest' is unknown; use one of 'proposed'"):
        policy("fastest")
    with pytest.raises(ValueError, match="'threshold' has no option 'limit'; use 'score'"):
        policy("threshold", limit=3)
    with pytest.raises(ValueError, match="'vanilla' has no option 'score'; it takes no options"):
        policy("vanilla", score=3)
    for score in (-1.0, float("nan"), "4", True):
        with pytest.raises(ValueError, match="score="):
            policy("threshold", score=score)


def test_a_policy_from_outside_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @register
    @dataclass(frozen=True)
    class Shortest(ChainPolicy):
        name: ClassVar[str] = "shortest"

        def __call__(self, model_chain: Chain, free_chain: Chain, price: Tensor | float) -> Chain:
            return policy("model_only")(model_chain, free_chain, price)

    assert policy("shortest").is_lossless("probabilistic", "rejection", 1.0)
    with pytest.raises(ValueError, match="registered already"):
        register(Shortest)


def test_which_drafters_are_used() -> None:
    uses = {name: (policy(name).needs_model, policy(name).needs_free) for name in NAMES}
    alone = {"model_only": (True, False), "ngram_only": (False, True), "vanilla": (False, False)}
    assert uses == {name: alone.get(name, (True, True)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0, 1e-6, 0.7, 1.0])
def test_the_table(name: str, drafting: str, verify: str, temperature: float) -> None:
    loses = name in LOSSY and (drafting, verify) == ("probabilistic", "rejection") and temperature > 1e-5
    assert policy(name).is_lossless(drafting, verify, temperature) is not loses


def test_the_table_refuses_unknown_modes() -> None:
    for arguments, message in (
        (("sampled", "coupled", 1.0), "drafting='sampled' is unknown; use one of 'greedy', 'probabilistic'"),
        (("greedy", "exact", 1.0), "verify='exact' is unknown; use one of 'coupled', 'rejection'"),
        (("greedy", "coupled", -1.0), "temperature=-1.0"),
        (("greedy", "coupled", float("nan")), "temperature=nan"),
    ):
        with pytest.raises(ValueError, match=message):
            policy("vanilla").is_lossless(*arguments)


def _resampled(draw: st.DrawFn, model: Chain, slot: int) -> Chain:
    """The model chain had `slot` been sampled differently: other tokens from there on, other confidences and another
    end after it. What stood before, and the confidence of the slot itself, cannot change."""
    tokens, acceptance, length = model.tokens.clone(), model.acceptance.clone(), model.length.clone()
    for k in range(slot, model.width):
        tokens[0, k] = draw(st.integers(0, 2))
        if k > slot:
            acceptance[0, k] = draw(st.sampled_from(QUARTERS))
    length[0] = draw(st.integers(slot + 1, model.width))
    return Chain.build(tokens, length, acceptance, source=SOURCE_MODEL)


@st.composite
def _two_worlds(draw: st.DrawFn) -> tuple[Chain, Chain, Chain, int]:
    model, free = draw(chain_pairs(max_batch=1))
    slot = draw(st.integers(0, model.width - 1))
    model = model._replace(length=model.length.clamp(min=slot + 1))
    return model, _resampled(draw, model, slot), free, slot


def _same_decision(name: str, worlds: tuple[Chain, Chain, Chain, int], price: float) -> bool:
    """Whether the policy treats `slot` alike in both worlds: same drafter and same survival up to that slot."""
    model, other, free, slot = worlds
    options = {"score": 1.0} if name == "threshold" else {}
    one, two = (rows_of(policy(name, **options)(chain, free, price))[0] for chain in (model, other))
    return (one.source[: slot + 1], one.survival[: slot + 1]) == (two.source[: slot + 1], two.survival[: slot + 1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LOSSY])
@given(worlds=_two_worlds(), price=prices())
@settings(max_examples=60)
def test_lossless_policies_do_not_read_the_token_they_decide_about(
    name: str, worlds: tuple[Chain, Chain, Chain, int], price: float
) -> None:
    """The condition under which rejection verification of sampled drafts is exact (the paper, appendix H)."""
    assert _same_decision(name, worlds, price)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_policies_do_read_it(name: str) -> None:
    """The negative control: for each policy that is refused, a case where the sampled token decides its own fate."""
    cases = st.tuples(_two_worlds(), prices())
    try:
        once = settings(max_examples=1000, phases=[Phase.generate])
        worlds, price = find(cases, lambda case: not _same_decision(name, case[0], case[1]), settings=once)
    except NoSuchExample:
        pytest.fail(f"no case found in which {name} reads the sampled token")
    assert not _same_decision(name, worlds, price)


def test_refusals_name_the_rule_and_the_ways_out() -> None:
    for name in LOSSY:
        with pytest.raises(LossyCombinationError) as refused:
            refuse_if_lossy(policy(name), "probabilistic", "rejection", 2)
        words = str(refused.value)
        for expected in (f"policy={name!r}", "must not depend on that token", 'drafting="greedy"', 'verify="coupled"'):
            assert expected in words
        assert "ngram_first, extension" in words
        assert "allow_lossy=True" in words


def test_fresh_sizing_of_sampled_drafts_is_refused_for_every_policy_that_drafts_with_the_model() -> None:
    for name in ("extension", "ngram_first", "threshold", "model_only"):
        with pytest.raises(LossyCombinationError, match=r"budget_delay=0 .*budget_delay of at least 1.*fixed budget"):
            refuse_if_lossy(policy(name), "probabilistic", "rejection", 0)
        for budget in ("all", 5):
            assert lossy_reason(policy(name), "probabilistic", "rejection", 0, budget=budget) is None
    for name in ("ngram_only", "vanilla"):
        assert lossy_reason(policy(name), "probabilistic", "rejection", 0) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exact_is_not_refused(name: str) -> None:
    for drafting, verify, delay in (
        ("greedy", "rejection", 0),
        ("probabilistic", "coupled", 0),
        ("greedy", "coupled", 2),
    ):
        refuse_if_lossy(policy(name), drafting, verify, delay)
    refuse_if_lossy(policy(name), "probabilistic", "rejection", 0, temperature_positive=False)
    delays: list[Any] = [-1, 1.5, True]
    for wrong in delays:
        with pytest.raises(ValueError, match="budget_delay="):
            refuse_if_lossy(policy(name), "greedy", "coupled", wrong)


def test_the_package_stands_alone() -> None:
    """It imports the shared nouns, sampling, torch and the standard library; no model, cache, tokenizer or engine."""
    allowed = ("hspark.core", "hspark.sampling", "hspark.policy", "torch")
    for file in Path(hspark.policy.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for name in names:
                known = name.split(".")[0] in sys.stdlib_module_names
                assert known or any(name == a or name.startswith(a + ".") for a in allowed), f"{file.name}: {name}"


def test_prices_as_numbers_and_as_tensors_agree() -> None:
    model = Chain.build(torch.tensor([[1, 2]]), torch.tensor([2]), torch.full((1, 2), 0.5), source=SOURCE_MODEL)
    for name in NAMES:
        chosen = policy(name)
        assert rows_of(chosen(model, model, 0.25)) == rows_of(chosen(model, model, torch.tensor(0.25)))


def test_a_policy_is_registered_as_a_class() -> None:
    with pytest.raises(ValueError, match=r"factory=Proposed\(.*\) is a policy; register its class"):
        register(policy("proposed"))
    assert set(policy_names()) == set(NAMES)
