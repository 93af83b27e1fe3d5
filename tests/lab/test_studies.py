"""Every study on a small made-up table: a valid study, and at least one of its numbers computed in another way."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from hspark.lab.editing import output_distance
from hspark.lab.simulate import simulate
from hspark.lab.simulation import Staleness
from hspark.lab.studies import STUDIES, LeftOutError, run_study
from hspark.lab.studies.edit_distance import merged_buckets
from hspark.lab.studies.fits import REMOVABLE, graded_steps
from hspark.lab.studies.published import published
from hspark.lab.studies.simulator import exponent
from hspark.lab.studies.staleness import measure
from hspark.lab.study import STUDY_ORDER, Study
from hspark.policy import AcceptanceEstimator
from hspark.policy.fitting import calibration_error, log_loss_per_step
from tests.lab.made_studies import COST, lab, made, rows, words
from tests.lab.made_table import made_table

# -- all studies -----------------------------------------------------------------------------------------------------


def test_the_registry_has_the_studies_of_a_report_in_their_order() -> None:
    assert tuple(STUDIES) == STUDY_ORDER


# That against the engine needs a benchmark, and has tests of its own.
@pytest.mark.parametrize("name", [name for name in STUDIES if name != "against_engine"])
def test_every_study_is_whole_and_survives_json(name: str) -> None:
    study = made(name)
    assert (study.name, study.title, study.command) == (name, STUDIES[name].title, f"hspark lab study {name}")
    assert study.question.endswith("?")
    assert study.finding.endswith(".")
    assert "nan" not in study.finding
    assert all(table.rows for table in study.tables if table.title != "n-gram drafts by kind of match")
    assert study.plots or name == "never_choose"
    assert study.data["outputs"] == 12
    assert study.data["prompts"] == 12
    record = json.loads(json.dumps(study.to_dict(), allow_nan=False))
    assert Study.from_dict(record).to_dict() == record
    if study.source:
        assert study.source.startswith("The paper")


@pytest.mark.parametrize(
    "name", ["acceptance", "estimator", "ladder", "transfer", "staleness", "context_length", "simulator"]
)
def test_studies_of_n_grams_alone_need_no_model_drafter(name: str) -> None:
    study = run_study(name, made_table(6, model=False), cost=COST, batch_sizes=(2,), row_steps=100, resamples=10)
    assert study.finding
    assert "model_only" not in str(study.tables)


# -- study by study --------------------------------------------------------------------------------------------------


def test_acceptance_by_counting() -> None:
    table = lab().table
    drafted = graded = accepted = 0
    for m, output in enumerate(table.recorded()):
        for i in range(len(output.output_token_ids)):
            at = int(table.start[m]) + i
            rest = output.output_token_ids[i:]
            chain = table.free_tokens[at, : table.free_length[at]].tolist()
            if len(chain) >= 3 and len(rest) >= 3:
                drafted += 1
                if tuple(chain[:2]) == rest[:2]:
                    graded += 1
                    accepted += chain[2] == rest[2]
    row = next(r for r in rows(made("acceptance")) if "n-gram" in r["chains"] and r["position"] == 3)
    assert (row["drafted"], row["graded"]) == (drafted, graded)
    assert row["acceptance"] == pytest.approx(accepted / graded)
    assert row["survival"] == pytest.approx(accepted / drafted)
    first = [r for r in rows(made("acceptance"), 1) if r["position"] == 1]
    whole = next(r for r in rows(made("acceptance")) if "n-gram" in r["chains"] and r["position"] == 1)
    assert sum(r["graded"] for r in first) == whole["graded"]


def test_estimator_scores_are_those_of_fitting() -> None:
    table = lab().table
    steps = graded_steps(table)
    preset = AcceptanceEstimator.preset("qwen3-8b")
    row = next(r for r in rows(made("estimator")) if "qwen3-8b" in r["coefficients"])
    assert row["log-loss (nats per matched step)"] == pytest.approx(log_loss_per_step(preset, steps), rel=1e-5)
    assert row["ECE"] == pytest.approx(calibration_error(preset, steps), rel=1e-4)
    graded = np.arange(table.model_width) < table.graded("model")[:, None]
    right = np.arange(table.model_width) < table.model_accepted[:, None]
    bias = table.model_acceptance[graded].mean() - right[graded].mean()
    assert abs(bias) - 1e-6 <= made("estimator").data["confidence_ece"] < 0.1


def test_ladder_throughput_is_relative_to_the_full_estimator() -> None:
    found = rows(made("ladder"))
    assert [row["rung"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1]["ngram_only, throughput over rung 6"] == 1.0
    assert found[0]["ngram_only, the paper (table 6)"] == published()["ladder"]["relative_throughput"]["1"]
    share = float(lab().grades.label.mean())
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    per_step = entropy * len(lab().grades.row) / lab().matched.sum()
    # One intercept for all, fitted on other prompts, cannot do better than the share itself.
    assert per_step <= found[0]["log-loss (nats per matched step)"] < 1.1 * per_step


def test_transfer_compares_the_same_simulations() -> None:
    own = lab()
    batch, name = 6, "ngram_only"
    speeds = []
    for estimates in (own.presets["gemma4-12b"], own.own):
        parts = [own.serve_prepared(own.prepared(estimates), name, batch, seed=seed) for seed in (0, 1)]
        speeds.append(sum(p.tokens.sum() for p in parts) / sum(p.seconds.sum() for p in parts))
    wanted = (batch, name, "gemma4-12b")
    row = next(r for r in rows(made("transfer")) if (r["batch"], r["policy"], r["coefficients of"]) == wanted)
    assert row["throughput over own fit"] == pytest.approx(speeds[0] / speeds[1])
    assert row["95% low"] <= row["throughput over own fit"] <= row["95% high"]


def test_edit_distance_buckets_and_speed_up() -> None:
    table = lab().table
    distance = [output_distance(words(out.prompt_token_ids), words(out.output_token_ids)) for out in table.recorded()]
    found = rows(made("edit_distance"))
    assert sum(row["outputs"] for row in found if row["drafting"] == "hybrid") == 12
    assert len(made("edit_distance").tables[1].rows) == 1  # twelve outputs do not make two buckets of eight
    assert found[0]["mean distance (%)"] == pytest.approx(100 * np.mean(distance))
    # Vanilla decoding takes C(0) for a token of each row.
    each = lab().serve_prepared(lab().prepared(outputs=np.arange(12)), "proposed", 2)
    row = next(row for row in found if row["drafting"] == "hybrid")
    assert row["speed-up over vanilla"] == pytest.approx(each.tokens_per_second / (2 / 1.0))


def test_buckets_are_merged_until_they_hold_enough() -> None:
    distance = np.array([0.01] * 3 + [0.07] * 5 + [0.12] * 8 + [0.31] * 2 + [np.nan])
    parts = merged_buckets(distance)
    assert [(part.name, len(part.outputs)) for part in parts] == [("0-10%", 8), ("10-35%", 10)]
    assert parts[0].mean == pytest.approx((3 * 0.01 + 5 * 0.07) / 8)
    assert [part.name for part in merged_buckets(np.array([0.5, 0.9]))] == ["0-95%"]
    assert sorted(np.concatenate([part.outputs for part in parts]).tolist()) == list(range(18))


def test_policies_over_the_model_drafter_alone() -> None:
    found = rows(made("policies"))
    assert {(row["T"], row["batch"]) for row in found} == {(0, 2), (0, 6), (1, 2), (1, 6)}
    for row in found:
        if row["policy"] == "model_only":
            assert row["throughput over model_only"] == 1.0
        if row["policy"] == "vanilla":
            assert row["over vanilla"] == 1.0
            assert row["tokens per step"] == 1.0
    row = next(row for row in found if (row["T"], row["batch"], row["policy"]) == (0, 2, "ngram_first"))
    first, model = (lab().serve(name, 2).tokens_per_second for name in ("ngram_first", "model_only"))
    assert row["throughput over model_only"] == pytest.approx(first / model)


def test_ablations_hold_the_mean_over_orders() -> None:
    study = made("ablations")
    found = {row["taken out"]: row for row in rows(study)}
    assert set(found) == {"contains rule", "slot price", *REMOVABLE}
    without, whole = (
        [lab().serve(name, 6, seed=seed).tokens_per_second for seed in range(3)] for name in ("no_contains", "proposed")
    )
    ratios = np.array(without) / np.array(whole)
    row = found["contains rule"]
    assert row["throughput over all of it"] == pytest.approx(np.mean(ratios))
    half = 4.303 * np.std(ratios, ddof=1) / math.sqrt(3)
    assert row["95% high, orders"] == pytest.approx(np.mean(ratios) + half)
    assert row["throughput ratio, the paper"] == 0.976


def test_never_choose_reads_its_measurement() -> None:
    study = made("never_choose")
    assert rows(study)[0]["ratio"] == 0.97
    assert "3.0%" in study.finding
    for report in ({}, {"never_choose": None}, {"never_choose": {"value": "fast"}}):
        with pytest.raises(LeftOutError, match=r"no never_choose\.value"):
            run_study("never_choose", made_table(), overhead=report)


def test_staleness_of_normal_miscounts_follows_the_law() -> None:
    """Independent normal miscounts of known width: the half-normal law holds, and its negative control does not.

    False alarms: the ratio's standard error is 0.6 / 0.8 / sqrt(2000) = 1.7%, and 7% is four of them: below 1e-4.
    """
    draw = np.random.default_rng(4)
    run = simulate(lab().ready, "vanilla", COST, batch_size=6, copies=40)
    steps = 4000
    miscount = draw.normal(0.0, 2.0, size=(steps, 1, 16))
    ones = np.ones((steps, 1))

    def measured(values: Any) -> Any:
        stale = Staleness(ones, 100 * ones, 0.99 * ones, ones, values)
        return measure(dataclasses.replace(run, requests=np.full((steps, 1), 16), staleness=stale), 50)

    row = measured(miscount)
    assert row.sigma == pytest.approx(2.0, rel=0.02)
    assert row.predicted == pytest.approx(math.sqrt(2 / math.pi) * row.sigma * 4)
    assert row.ratio.value == pytest.approx(1.0, abs=0.07)
    assert row.spread == pytest.approx(1.0, abs=0.07)
    assert row.lost.value == pytest.approx(0.01)
    assert row.relative == pytest.approx(row.observed / 100)
    together = measured(np.repeat(miscount[:, :, :1], 16, axis=2))  # requests that err together
    assert together.ratio.value > 3
    short = measured(miscount - 0.5)  # a batch that is short by 8, one standard deviation, on average
    assert short.drift == pytest.approx(-8, abs=0.5)
    assert short.ratio.value == pytest.approx(1.61, abs=0.07)
    assert short.shifted.value == pytest.approx(1.0, abs=0.05)


def test_staleness_sees_what_the_simulation_says() -> None:
    found = rows(made("staleness"))
    assert [row["batch"] for row in found[:3]] == [2, 6, 24]
    row = next(row for row in found if (row["drafting"], row["batch"]) == ("hybrid", 2))
    assert row["observed / predicted"] == pytest.approx(row["shortfall observed"] / row["shortfall predicted"])
    assert 0 <= row["goodput lost (%)"] < 100
    with pytest.raises(LeftOutError, match="budget_delay"):
        run_study("staleness", made_table(), budget_delay=0, cost=COST)


def test_context_buckets_hold_the_positions() -> None:
    study = made("context_length")
    found = [row for row in rows(study) if row["policy"] == "proposed"]
    assert sum(row["positions"] for row in found) == lab().table.positions
    served = lab().serve("proposed", 2)
    context = lab().table.prompt_length[served.output] + served.position
    low, high = study.data["edges"][:2]
    inside = (context >= low) & (context < high)
    assert found[0]["tokens per step"] == pytest.approx(served.tokens[inside].mean())


def test_simulator_counts_what_it_does() -> None:
    found = rows(made("simulator"))
    assert all(row["row-steps"] == row["batch"] * row["steps"] for row in found)
    assert exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert exponent([1], [1.0]) is None
