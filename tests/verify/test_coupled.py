"""Coupled verification: what is emitted is what plain decoding emits, whatever was drafted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspark.core import Chain
from hspark.verify import CoupledVerifier, pack, verifier
from tests.assertions import assert_one_graph
from tests.verify.cases import expected_match, plain_tokens, random_case

COUPLED = verifier("coupled")


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.3, 1.0, 4.0]))
@settings(max_examples=60)
def test_emits_the_tokens_of_plain_decoding(seed: int, sampled: bool, sharp: float) -> None:
    case = random_case(seed, sampled=sampled, sharp=sharp)
    verdict = COUPLED(*case.arguments)
    accepted, tokens = expected_match(case, plain_tokens(case))
    assert verdict.accepted.tolist() == accepted
    assert verdict.token.tolist() == tokens


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_greedy_is_argmax_and_reads_no_noise(seed: int) -> None:
    """Any monotone transform of the logits will do, and no noise is asked for."""

    def refuse(*arguments: object) -> Tensor:
        raise AssertionError("a greedy batch needs no noise")

    case = random_case(seed)
    verdict = CoupledVerifier(refuse)(case.log_probs * 3 - 7, *case.arguments[1:], greedy=True)
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == expected_match(case, case.laws.argmax(-1))


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_greedy_rows_among_sampled_ones_are_exact(name: str) -> None:
    """A one-hot law (0 and -inf) comes out as its argmax; ties were settled when it was made."""
    case = random_case(3, batch=40, sampled=name == "rejection")
    point = torch.full_like(case.laws, -math.inf).scatter_(-1, case.laws.argmax(-1, keepdim=True), 0.0)
    greedy = torch.arange(40) % 2 == 0
    laws = torch.where(greedy[:, None, None], point, case.laws)
    verdict = verifier(name)(laws[case.layout.row, case.layout.offset], *case.arguments[1:])
    accepted, tokens = expected_match(case, laws.argmax(-1))
    for b in range(0, 40, 2):
        assert (int(verdict.accepted[b]), int(verdict.token[b])) == (accepted[b], tokens[b])


@pytest.mark.parametrize("name", ["coupled", "rejection"])
@pytest.mark.parametrize("greedy", [False, True])
def test_rows_do_not_touch_each_other(name: str, greedy: bool) -> None:
    """Each row alone gives what it gave in the batch; rows that do not run change nothing and stay valid."""
    case = random_case(11, batch=5, sampled=True)
    judge = verifier(name)
    together = judge(*case.arguments, greedy=greedy)
    for b in range(5):
        running = torch.arange(5) == b
        layout = pack(case.kept, running, 4, 5)
        law = case.laws[layout.row, layout.offset]
        alone = judge(law, layout, case.chain, case.kept, case.seeds, greedy=greedy)
        assert int(alone.accepted[b]) == int(together.accepted[b])
        assert int(alone.token[b]) == int(together.token[b])
        assert bool(((alone.token >= 0) & (alone.token < 5)).all())


@pytest.mark.parametrize("name", ["coupled", "rejection"])
@pytest.mark.parametrize("greedy", [False, True])
def test_nan_rows_give_valid_tokens_and_spare_the_others(name: str, greedy: bool) -> None:
    case = random_case(5, batch=6, sampled=True)
    right = verifier(name)(*case.arguments, greedy=greedy)
    broken = torch.where((case.layout.row == 2)[:, None], math.nan, case.log_probs)
    partly = case.log_probs.clone()
    partly[case.layout.row == 2, 3] = math.nan
    for log_probs in (broken, partly):
        verdict = verifier(name)(log_probs, *case.arguments[1:], greedy=greedy)
        assert bool(((verdict.token >= 0) & (verdict.token < 5)).all())
        assert bool(((verdict.accepted >= 0) & (verdict.accepted <= case.kept)).all())
        others = torch.arange(6) != 2
        assert torch.equal(verdict.accepted[others], right.accepted[others])
        assert torch.equal(verdict.token[others], right.token[others])


@pytest.mark.parametrize("name", ["coupled", "rejection"])
@pytest.mark.parametrize("greedy", [False, True])
def test_without_drafts_it_is_plain_decoding(name: str, greedy: bool) -> None:
    case = random_case(7, batch=3)
    running = torch.ones(3, dtype=torch.bool)
    none = torch.zeros(3, dtype=torch.int64)
    verdicts = []
    for chain in (Chain.empty(3, 0), Chain.empty(3, 4), case.chain):
        layout = pack(none, running, chain.width, 4)
        law = case.laws[layout.row, 0]
        verdicts.append(verifier(name)(law, layout, chain, none, case.seeds, greedy=greedy))
    for verdict in verdicts:
        assert not bool(verdict.accepted.any())
        assert torch.equal(verdict.token, verdicts[0].token)
    if name == "coupled":
        assert torch.equal(verdicts[0].token, (case.laws.argmax(-1) if greedy else plain_tokens(case))[:, 0])


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_slots_past_the_chain_are_never_accepted(name: str) -> None:
    """A count above the chain's own length is cut to it: filler tokens are not drafts."""
    case = random_case(8, batch=20, sharp=0.0)
    short = case.chain._replace(length=torch.minimum(case.chain.length, torch.tensor(1)))
    kept = torch.full((20,), 4)
    layout = pack(kept, torch.ones(20, dtype=torch.bool), 4, 100)
    verdict = verifier(name)(case.laws[layout.row, layout.offset], layout, short, kept, case.seeds)
    assert bool((verdict.accepted <= short.length).all())


@pytest.mark.parametrize("name", ["coupled", "rejection"])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_compiles_to_one_graph(name: str, greedy: bool, sampled: bool) -> None:
    judge = verifier(name)
    case = random_case(1, sampled=sampled)
    assert_one_graph(lambda *arguments: judge(*arguments, greedy=greedy), *case.arguments)
