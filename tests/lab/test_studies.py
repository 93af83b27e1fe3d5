"""Every study on a small made-up table: a valid study, and at least one of its numbers computed in another way."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from hspark.lab.editing import output_distance
from hspark.lab.simulate import simulate
from hspark.lab.simulation import Staleness
from hspark.lab.studies import STUDIES, Lab, LeftOutError, StudyOptions, run_study
from hspark.lab.studies.edit_distance import merged_buckets
from hspark.lab.studies.fits import REMOVABLE, fit_table, graded_steps
from hspark.lab.studies.published import published
from hspark.lab.studies.serving import load, serve, warm_up
from hspark.lab.studies.simulator import exponent
from hspark.lab.studies.staleness import measure
from hspark.lab.studies.statistics import Bootstrap, interval, mean_interval
from hspark.lab.study import STUDY_ORDER, Study
from hspark.policy import AcceptanceEstimator, LinearCost
from hspark.policy.fitting import calibration_error, log_loss_per_step
from tests.lab.made_table import made_table

COST = LinearCost({2: 1.0, 6: 1.1}, {2: 0.02, 6: 0.06})
SETTINGS: dict[str, Any] = {
    "cost": COST,
    "batch_sizes": (2, 6),
    "row_steps": 300,
    "seeds": 3,
    "resamples": 40,
    "overhead": {"never_choose": {"value": 0.97, "low": 0.96, "high": 0.98}},
}


def words(ids: Any) -> str:
    return " ".join(map(str, ids))


@functools.cache
def lab() -> Lab:
    table = made_table()
    programs = {name: words(out.prompt_token_ids) for name, out in zip(table.task_ids, table.recorded(), strict=True)}
    sampled = made_table(8, seed=3, temperature=1.0)
    return Lab(table, StudyOptions(**SETTINGS, programs=programs, decode=words, sampled=sampled))


@functools.cache
def made(name: str) -> Study:
    return run_study(name, lab(), command=f"hspark lab study {name}")


def rows(study: Study, table: int = 0) -> list[dict[str, Any]]:
    """A table's rows by heading; of headings that occur twice, the first."""
    columns = study.tables[table].columns
    return [dict(reversed(list(zip(columns, row, strict=True)))) for row in study.tables[table].rows]


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


def test_an_output_is_never_estimated_from_its_own_prompt() -> None:
    whole = lab()
    fold = whole.folds == whole.folds[0]
    assert 0 < fold.sum() < len(fold)
    others = fit_table(whole.table.select(np.flatnonzero(~fold)))
    inside = fold[whole.table.output]
    expected = others(*whole.table.features()).numpy()
    np.testing.assert_allclose(whole.own[inside], expected[inside], rtol=1e-5)
    assert not np.allclose(whole.own[~inside], expected[~inside])


def test_a_training_table_takes_the_place_of_folds() -> None:
    train = made_table(10, seed=9)
    own = Lab(made_table(), StudyOptions(train=train))
    np.testing.assert_allclose(own.refit(3), fit_table(train, 3)(*own.table.features()).numpy())
    given = Lab(made_table(), StudyOptions(estimator=AcceptanceEstimator.preset("qwen3-4b")))
    np.testing.assert_allclose(given.own, AcceptanceEstimator.preset("qwen3-4b")(*own.table.features()).numpy())


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


@pytest.mark.parametrize("feature", REMOVABLE)
def test_a_fit_without_a_feature_solves_the_equations_of_the_other_columns(feature: str) -> None:
    """At the minimum of the penalised log-loss, X.T (estimate - label) + ridge * weights is 0, column by column."""
    table = made_table()
    fitted = fit_table(table, without=feature)
    columns, errors = [], []
    for n, a, m, accepted, graded in zip(*(column.tolist() for column in graded_steps(table)), strict=True):
        if n >= 5:
            exact = fitted.to("cpu", torch.float64)
            estimate = exact(torch.tensor([n]), torch.tensor([a]), torch.tensor([m]))[0].tolist()
            for k in range(min(graded, 15)):
                columns.append(list(_columns(feature, n, a, m, k).values()))
                errors.append(estimate[k] - float(k < accepted))
    weights = [getattr(fitted.coefficients, name, 0.0) for name in _columns(feature, 5, 0, 0, 0)]
    ridge = np.array([0.0 if isinstance(weight, tuple) else weight for weight in weights])
    assert np.array(columns).T @ np.array(errors) + ridge == pytest.approx(np.zeros(len(ridge)), abs=0.05)
    zero = {"copy length": "kappa", "match length": "w", "full-match bonus": "l"}
    if feature in zero:
        assert getattr(fitted.coefficients, f"{zero[feature]}_rest") == 0.0
    assert (fitted.coefficients.delta == 0.0) == (feature == "agreement")
    assert (len(set(fitted.coefficients.beta)) == 1) == (feature == "position intercepts")
    assert (fitted.coefficients.w_first == fitted.coefficients.w_rest) == (
        feature in ("first-token terms", "match length")
    )


def _columns(feature: str, n: int, a: int, m: int, k: int) -> dict[str, float]:
    """What equation 1 multiplies with its coefficients at draft position k (from 0), without those of a feature."""
    names = {"match length": "w", "full-match bonus": "l", "copy length": "kappa"}
    full = float(n >= 15)
    values = {"w": float(n - 5), "l": full, "kappa": full * math.log(max(min(m, 256), 15) / 15)}
    intercepts = ["beta"] if feature == "position intercepts" else [f"beta {place}" for place in range(15)]
    found = {name: float(name in ("beta", f"beta {k}")) for name in intercepts}
    if feature != "agreement":
        found["delta"] = float(a)
    for name, value in values.items():
        if name == names.get(feature):
            continue
        if feature == "first-token terms":
            found[f"{name}_first"] = value  # one coefficient, which both names hold
        else:
            found |= {f"{name}_first": value * (k == 0), f"{name}_rest": value * (k > 0)}
    return found


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


# -- what they share -------------------------------------------------------------------------------------------------


def test_seconds_are_booked_whole_and_by_slots() -> None:
    own = lab()
    served = serve(own.ready, "proposed", COST, batch_size=6, row_steps=300, budget_delay=2, seed=1)
    run = simulate(own.ready, "proposed", COST, batch_size=6, **load(own.ready, 6, 300, 1)).steady(
        warm_up(own.ready, 2)
    )
    assert served.seconds.sum() == pytest.approx(run.seconds.sum())
    assert served.tokens.sum() == run.tokens.sum()
    assert served.tokens_per_second == pytest.approx(run.tokens_per_second)
    assert served.free_share == pytest.approx(run.free_share)
    np.testing.assert_allclose(served.seconds, 1.1 / 6 + 0.06 * served.slots, rtol=1e-9)
    assert served.output_tokens.sum() == served.tokens.sum()


def test_bootstrap_draws_prompts_whole() -> None:
    values, groups = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 0, 1, 2])
    draws = Bootstrap(groups, resamples=500)
    sums = draws.sums(values)
    assert sums[0] == 15
    possible = {3 * a + 4 * b + 8 * c for a in range(4) for b in range(4 - a) for c in [3 - a - b]}
    assert set(sums[1:].tolist()) <= possible
    assert interval(draws.ratio(values, values)) == (1.0, 1.0, 1.0)
    assert interval(Bootstrap(np.zeros(4, dtype=int)).sums(values)) == (15.0, None, None)


def test_bootstrap_intervals_cover() -> None:
    """Coverage of the mean of 40 draws over 300 trials. A correct 95% interval by percentiles covers about 93%;
    fewer than 87% would be off by four standard errors of 1.5%: a false alarm is below 1e-3."""
    draw = np.random.default_rng(0)
    covered = []
    for trial in range(300):
        data = draw.normal(1.0, 1.0, size=40)
        boot = Bootstrap(np.arange(40), 200, seed=trial)
        found = interval(boot.ratio(data, np.ones(40)))
        assert found.low is not None
        assert found.high is not None
        covered.append(found.low <= 1.0 <= found.high)
    assert 0.87 <= np.mean(covered) < 0.99


def test_mean_interval_is_students() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.value == 3.0
    assert found.high == pytest.approx(3 + 2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert mean_interval([2.0]) == (2.0, None, None)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named() -> None:
    table, alone = made_table(), made_table(6, model=False)
    with pytest.raises(ValueError, match="study='speed' is unknown; use one of acceptance"):
        run_study("speed", table)
    with pytest.raises(ValueError, match="give them when the Lab is made"):
        run_study("ladder", lab(), seeds=2)
    for name in ("policies", "ablations", "edit_distance"):
        with pytest.raises(LeftOutError, match="needs a model drafter's chains"):
            run_study(name, alone)
    with pytest.raises(LeftOutError, match="give the workload file"):
        run_study("edit_distance", table)
    with pytest.raises(LeftOutError, match="no output answers an edit"):
        run_study("edit_distance", table, programs={"other": "x"}, decode=words)
    with pytest.raises(LeftOutError, match="--overhead"):
        run_study("never_choose", table)
    with pytest.raises(LeftOutError, match="holds one prompt"):
        run_study("estimator", table.select([0]))
    with pytest.raises(LeftOutError, match="no output with a token"):
        run_study("acceptance", table.select([]))


def test_published_fits_are_for_the_papers_match_limits() -> None:
    table = made_table()
    other = dataclasses.replace(table, info={**table.info, "ngram": {**table.info["ngram"], "min_match": 3}})
    with pytest.raises(LeftOutError, match="other match limits"):
        run_study("transfer", other)
    assert len(run_study("estimator", other, resamples=10).tables[0].rows) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": ()}, r"batch_sizes=\(\)"),
        ({"batch_sizes": (4, 2)}, r"batch_sizes=\(4, 2\)"),
        ({"batch_sizes": (0, 2)}, "batch_sizes=0 is not usable"),
        ({"row_steps": 0}, "row_steps=0"),
        ({"seeds": 0}, "seeds=0"),
        ({"resamples": -1}, "resamples=-1"),
        ({"budget_delay": -1}, "budget_delay=-1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudyOptions(**options)


def test_outputs_of_one_prompt_share_a_group() -> None:
    table = made_table()
    own = Lab(table.select([0, 1, 0, 2]))
    assert own.prompts.tolist() == [0, 1, 0, 2]
    assert own.prompt_count == 3
    assert own.folds[0] == own.folds[2]
