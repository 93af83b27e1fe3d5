"""Budgets sized from survivals that are some steps old: miscounts, shortfalls, goodput lost (table 16, appendix O)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from hspark.lab.simulate import simulate
from hspark.lab.simulation import Simulation
from hspark.lab.studies.lab import Lab
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.studies.plotting import interval_series
from hspark.lab.studies.published import published
from hspark.lab.studies.serving import warm_up
from hspark.lab.studies.statistics import Array, Bootstrap, Interval, divided, interval
from hspark.lab.study import Plot, Series, Study, Table

ARMS = {"model_only": "model drafter", "ngram_only": "n-gram", "proposed": "hybrid"}
# Mean of the shortfall given that there is one, for a normal miscount: the half-normal's, 0.80.
HALF_NORMAL = math.sqrt(2 / math.pi)
# Steps that a size is measured over at least, and steps that are drawn together as they depend on each other.
STEPS, BLOCK = 400, 20
# The largest batch of the paper, above which the law is tried once more.
LARGEST = 4


class Row(NamedTuple):
    """One arm at one batch size; tokens are expected accepted drafts.

    steps: full-batch steps. requests: mean number of those with survivals of their own. sigma: standard deviation of a
    request's miscount. drift: mean miscount of the batch, 0 in the law. spread: standard deviation of the batch's over
    sigma sqrt(B). predicted: HALF_NORMAL sigma sqrt(requests). observed: mean shortfall of the steps that have one.
    ratio: observed / predicted. shifted: observed over the shortfall of a normal miscount with the mean `drift`.
    relative: observed over expected accepted drafts. lost: mean goodput lost.
    """

    steps: int
    requests: float
    sigma: float
    drift: float
    spread: float
    predicted: float
    observed: float
    ratio: Interval
    shifted: Interval
    relative: float
    lost: Interval


def measure(run: Simulation, resamples: int) -> Row:
    """From a simulation with staleness, cut to its full-batch steps."""
    stale = run.staleness
    assert stale is not None
    busy = (run.requests > 0) & (stale.known_requests > 0)
    if not busy.any():
        raise LeftOutError(f"staleness: a batch of {run.batch_size} is never full on this table; use a smaller one")
    step, replica = np.nonzero(busy)
    blocks = np.unique(np.stack([replica, step // BLOCK]), axis=1, return_inverse=True)[1].reshape(-1)
    bootstrap = Bootstrap(blocks, resamples)
    own = stale.miscount[busy].astype(np.float64)
    known = (~np.isnan(own)).sum(axis=1).astype(np.float64)
    total, squares = np.nansum(own, axis=1), np.nansum(own**2, axis=1)
    short = total < 0
    mean = bootstrap.ratio(total, known)
    sigma = np.sqrt(np.maximum(bootstrap.ratio(squares, known) - mean**2, 0))
    requests = bootstrap.ratio(known, np.ones_like(known))
    observed = bootstrap.ratio(-total * short, short.astype(np.float64))
    predicted = HALF_NORMAL * sigma * np.sqrt(requests)
    expected = bootstrap.ratio(stale.fresh_expected[busy], np.ones_like(known))
    lost = bootstrap.ratio(stale.goodput_lost[busy], np.ones_like(known))
    drift = bootstrap.ratio(total, np.ones_like(known))
    shifted = shortfall(drift, sigma * np.sqrt(requests))
    root = float(sigma[0]) * math.sqrt(float(requests[0]))
    return Row(
        steps=len(step),
        requests=float(requests[0]),
        sigma=float(sigma[0]),
        drift=float(drift[0]),
        spread=float(total.std()) / root if root else math.nan,
        predicted=float(predicted[0]),
        observed=float(observed[0]),
        ratio=interval(divided(observed, predicted)),
        shifted=interval(divided(observed, shifted)),
        relative=float(divided(observed, expected)[0]),
        lost=interval(lost),
    )


def shortfall(mean: Array, deviation: Array) -> Array:
    """E[-D | D < 0] of normal miscounts D, float64; at mean 0 HALF_NORMAL * deviation (equation 5)."""
    place = torch.from_numpy(divided(mean, deviation))
    density = torch.exp(-(place**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(deviation * (density / torch.special.ndtr(-place)).numpy() - mean)


def staleness(lab: Lab) -> Study:
    if not lab.options.budget_delay:
        raise LeftOutError("staleness needs a budget_delay of at least 1, or there is nothing stale")
    sizes = lab.options.batch_sizes
    sizes = (*sizes, LARGEST * sizes[-1])
    arms = ARMS if lab.has_model else {"ngram_only": ARMS["ngram_only"]}
    found = {name: {size: _measured(lab, name, size) for size in sizes} for name in arms}
    paper = published()["staleness"]
    rows: list[list[Any]] = []
    for name, by_size in found.items():
        theirs = {row[0]: row for row in paper[name]}
        for size, row in by_size.items():
            printed = theirs.get(size)
            shown = [None] * 3 if printed is None else [printed[1], printed[3] / printed[2], printed[4]]
            rows.append([ARMS[name], size, row.steps, row.sigma, row.drift, row.spread, row.predicted, row.observed,
                         *row.ratio, row.shifted.value, 100 * row.relative, 100 * row.lost.value, *shown])  # fmt: skip
    columns = ["drafting", "batch", "steps", "σ of a request's miscount", "mean miscount of the batch",
               "σ of the batch over σ√B", "shortfall predicted", "shortfall observed", "observed / predicted",
               "95% low", "95% high", "observed / predicted with the mean", "shortfall (% of expected)",
               "goodput lost (%)", "σ, the paper", "observed / predicted, the paper",
               "goodput lost (%), the paper"]  # fmt: skip
    return Study(
        name="staleness",
        title="",
        source="",
        question="What is lost when the budget is sized from survivals that are some steps old?",
        finding=_finding(found),
        tables=[
            Table(
                "Stale sizing against fresh sizing",
                columns,
                rows,
                "Shortfalls in expected accepted drafts of the batch. Predicted: √(2/π) σ √B, with B the requests that "
                "have survivals of their own; it takes the batch's mean miscount as 0; with the mean, a normal "
                "miscount of the mean measured. The mean is not 0 because a request's miscounts add up to its first "
                "survivals less its last, and requests that end while they copy begin without a match. Intervals over "
                f"blocks of {BLOCK} steps. Budgets are sized from survivals {lab.options.budget_delay} steps old. "
                f"{lab.cost_note}",
            )
        ],
        plots=_plots(found, paper),
        data={"rows": {name: {str(size): row._asdict() for size, row in each.items()} for name, each in found.items()}},
    )


def _measured(lab: Lab, policy: str, size: int) -> Row:
    delay, table = lab.options.budget_delay, lab.table
    warm = warm_up(lab.ready, delay)
    replicas = max(1, min(64, lab.options.row_steps // (size * STEPS)))
    # Enough requests to keep all rows busy, if every step delivered a token more than the longest chain.
    longest = 1 + max(table.model_width, table.free_width)
    each = 2 + (STEPS + warm) * longest / (table.positions / table.outputs)
    run = simulate(
        lab.ready,
        policy,
        lab.cost,
        batch_size=size,
        budget_delay=delay,
        copies=math.ceil(replicas * size * each / table.outputs),
        shuffle=0,
        replicas=replicas,
        max_steps=STEPS + warm,
        staleness=True,
    )
    return measure(run.steady(warm), lab.options.resamples)


def _plots(found: dict[str, dict[int, Row]], paper: dict[str, Any]) -> list[Plot]:
    short, lost = [], []
    for name, by_size in found.items():
        x: list[float | str] = [float(size) for size in by_size]
        short.append(Series(f"{ARMS[name]}, observed", x, [row.observed for row in by_size.values()]))
        short.append(Series(f"{ARMS[name]}, predicted", x, [row.predicted for row in by_size.values()]))
        lost.append(interval_series(ARMS[name], x, [row.lost.scaled(100) for row in by_size.values()]))
        theirs = paper[name]
        sizes: list[float | str] = [float(row[0]) for row in theirs]
        lost.append(Series(f"paper, {ARMS[name]}", sizes, [row[4] for row in theirs], published=True))
    return [
        Plot("Shortfall of the batch grows as √B", "batch", "shortfall (expected accepted drafts)", short, log_x=True,
             log_y=True),
        Plot("Goodput lost to stale sizing", "batch", "goodput lost (%)", lost, log_x=True),
    ]  # fmt: skip


def _finding(found: dict[str, dict[int, Row]]) -> str:
    large = [row for each in found.values() for size, row in each.items() if size >= 32]
    words = []
    if large:
        ratios, shifted = [row.ratio.value for row in large], [row.shifted.value for row in large]
        inside = sum(0.8 <= ratio <= 1.2 for ratio in ratios)
        words.append(
            f"In batches of 32 and more the observed shortfall is {min(ratios):.2f} to {max(ratios):.2f} times the "
            f"predicted 0.80 σ √B; {inside} of {len(ratios)} cells lie within 0.8 and 1.2. With the batch's mean "
            f"miscount in the prediction it is {min(shifted):.2f} to {max(shifted):.2f} times."
        )
    main = found.get("proposed", found["ngram_only"])
    who = "The hybrid" if "proposed" in found else "The n-gram drafter"
    lost = ", ".join(f"{100 * row.lost.value:.2f}% at batch {size}" for size, row in main.items())
    words.append(f"{who} loses {lost} of goodput to sizing from stale survivals.")
    return " ".join(words)
