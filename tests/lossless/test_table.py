"""The table of what is lossless, as the output of the suite, and the mistakes that the same suite must catch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspark.policy import Policy, policy
from hspark.verify import (
    RejectionVerifier,
    Rule,
    check,
    exact_distribution,
    target_distribution,
    total_variation,
    verifier,
)
from hspark.verify.controls import Control, controls
from hspark.verify.examples import SHAPES, Shape, random_sizing, random_world
from hspark.verify.sampled import Sampler, histogram
from hspark.verify.statistics import chi_square
from hspark.verify.suite import Cell, check_control, lossless_table, main, table_policies


@pytest.fixture(scope="module")
def table() -> list[Cell]:
    return lossless_table(3, sampled=1, samples=3000)


def test_the_table_is_complete_and_every_claim_holds(table: list[Cell]) -> None:
    """Total variation below 1e-10 in all examples of the cells that claim exactness, 0.01 exceeded in the others."""
    assert len(table) == 9 * 9 + 1
    for cell in table:
        assert cell.holds, cell
        assert cell.report.examples >= 3


def test_the_table_is_the_published_one(table: list[Cell]) -> None:
    """Lossy: the rules that read samples, and fresh sizing, both with sampled drafts under rejection at T > 0 only."""
    lossy = {(cell.policy, cell.sizing) for cell in table if not cell.claimed}
    reading = {"proposed", "expected_length", "no_contains"}
    drafting = {chosen.name for chosen in table_policies() if chosen.needs_model}
    assert lossy == {(name, "late") for name in reading} | {(name, "fresh") for name in drafting}
    for cell in table:
        if not cell.claimed:
            assert (cell.temperature, cell.drafting, cell.verify) == (">0", "probabilistic", "rejection")


@given(st.integers(0, 2**32), st.sampled_from(SHAPES[:5]), st.sampled_from(table_policies()), st.booleans())
@settings(max_examples=25)
def test_greedy_drafts_keep_the_law_under_every_policy_and_sizing(
    seed: int, shape: Shape, chosen: Policy, fresh: bool
) -> None:
    world = random_world(seed, shape)
    law = exact_distribution(world, chosen, sizing=random_sizing(seed, world, fresh=fresh))
    assert total_variation(law, target_distribution(world)) < 1e-10


@given(
    st.integers(0, 2**32),
    st.sampled_from(SHAPES),
    st.sampled_from([chosen for chosen in table_policies() if chosen.is_lossless("probabilistic", "rejection", 1.0)]),
)
@settings(max_examples=25)
def test_sampled_drafts_keep_the_law_under_policies_that_do_not_read_them(
    seed: int, shape: Shape, chosen: Policy
) -> None:
    world = random_world(seed, shape)
    law = exact_distribution(world, chosen, drafting="probabilistic", sizing=random_sizing(seed, world))
    assert total_variation(law, target_distribution(world)) < 1e-10


@given(
    st.integers(0, 2**32),
    st.sampled_from(SHAPES),
    st.sampled_from(table_policies()),
    st.sampled_from([("greedy", False), ("probabilistic", False), ("probabilistic", True)]),
    st.booleans(),
)
@settings(max_examples=40)
def test_coupled_output_is_plain_decoding_token_for_token(
    seed: int, shape: Shape, chosen: Policy, drafts: tuple[str, bool], fresh: bool
) -> None:
    """Any drafts whatever: greedy, sampled with noise of their own, sampled with the shared noise; any sizing."""
    world = random_world(seed, shape)
    sizing = random_sizing(seed, world, fresh=fresh)
    sampler = Sampler(world, verifier("coupled"), chosen, drafting=drafts[0], coupled=drafts[1], sizing=sizing)
    seeds = torch.randint(2**62, (200, world.requests), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(sampler.run(seeds), sampler.plain(seeds))


# --- Negative controls ---

CONTROLS = {control.name: control for control in controls()}


def test_every_named_mistake_has_a_control() -> None:
    assert set(CONTROLS) >= {
        "no_residual",
        "resample_on_mismatch",
        "residual_minus_drafted_token",
        "soft_law_for_argmax",
        "shared_noise",
        "off_by_one_bonus",
        "kept_by_own_token",
        "draft_noise_by_position",
    }


@pytest.mark.parametrize("name", CONTROLS)
def test_mistakes_are_rejected(name: str) -> None:
    """By enumeration, where the mistake is in the rule, and by the samples of the wrong code, always."""
    report = check_control(CONTROLS[name], examples=4, sampled=4, samples=10_000)
    assert not report.lossless
    assert report.worst_p_value is not None
    assert report.worst_p_value < 1e-6 / report.tests
    if CONTROLS[name].rule is not None:
        assert report.worst_total_variation is not None
        assert report.worst_total_variation > 0.01


@pytest.mark.parametrize("name", CONTROLS)
def test_the_right_code_passes_where_the_mistakes_fail(name: str) -> None:
    control = CONTROLS[name]
    right = Control(name, RejectionVerifier(), policy("model_only"), control.drafting, Rule(), world=control.world)
    report = check_control(right, examples=3, sampled=3, samples=5000)
    assert report.lossless, report.failures


@pytest.mark.parametrize("name", [name for name, control in CONTROLS.items() if control.rule is not None])
def test_wrong_code_and_wrong_rule_are_the_same_mistake(name: str) -> None:
    """Samples of the wrong verifier follow the law that the wrong rule gives: the enumeration speaks about the code."""
    control = CONTROLS[name]
    for seed in (0, 1):  # single requests
        world = random_world(seed, SHAPES[seed])
        sizing = random_sizing(seed, world)
        law = exact_distribution(world, control.policy, drafting=control.drafting, sizing=sizing, rule=control.rule)
        sampler = Sampler(world, control.verifier, control.policy, drafting=control.drafting, sizing=sizing)
        counts = histogram(sampler.run(torch.arange(10_000)[:, None] + 10**6 * seed), world.outputs)
        assert chi_square(counts, law) > 1e-6


def test_command_line_prints_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import hspark.verify.suite as suite

    options: dict[str, Any] = {"drafting": "greedy", "greedy_target": False}
    report = check("rejection", "proposed", examples=1, samples=3000, **options)
    cell = Cell(">0", "greedy", "rejection", "proposed", "late", True, report)
    caught = check_control(CONTROLS["no_residual"], examples=2, sampled=0)
    monkeypatch.setattr(suite, "lossless_table", lambda *arguments, **options: [cell])
    monkeypatch.setattr(suite, "check_controls", lambda *arguments, **options: [caught])
    assert main(["--examples", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["holds"] is True
    assert record["cells"][0]["report"]["examples"] == 1
    assert record["controls"][0]["rejected"] is True
    assert main(["--examples", "1"]) == 0
    text = capsys.readouterr().out
    assert "holds" in text
    assert "rejected" in text
    monkeypatch.setattr(suite, "check_controls", lambda *arguments, **options: [cell.report])
    assert main(["--examples", "1"]) == 1  # a control that passes is a failure of the suite
    for wrong in ("--examples=0", "--sampled=-1", "--sampled=0", "--samples=0"):
        with pytest.raises(SystemExit) as stopped:
            main([wrong])
        assert stopped.value.code == 2
        assert f"{wrong} is out of range; use at least 1" in capsys.readouterr().err
