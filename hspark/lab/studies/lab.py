"""What all studies of one table share: its estimates, its cost model, and the simulations that were run already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hspark.lab.simulate import Prepared
from hspark.lab.simulate_cost import PAPER_PRICES, paper_like_cost
from hspark.lab.studies.fits import Grades, acceptance, fit_table, losses
from hspark.lab.studies.left_out import LeftOutError
from hspark.lab.studies.serving import Served, serve
from hspark.lab.studies.statistics import Bootstrap
from hspark.lab.table import RecordTable
from hspark.policy import AcceptanceEstimator, CostModel, Policy
from hspark.policy.curves import whole

Array = NDArray[Any]
FOLDS = 5


@dataclass(frozen=True)
class StudyOptions:
    """What studies may be given beside the table.

    train: a table of other prompts, on which the estimator and its variants are fitted. None: five folds by prompt of
        the table itself, each output estimated by coefficients fitted on the other folds.
    estimator: in place of the own fit. cost: seconds of a step; None for one that gives the paper's prices on this
        table (`paper_like_cost`).
    sampled: a table of the same target recorded at a temperature above 0.
    programs: {task_id: the program that the request edits}. decode: text of output tokens.
    overhead: the report of `hspark bench overhead`. bench: of `hspark bench` on the recorded requests.
    batch_sizes: rows. budget_delay: age in steps of the survivals that a step is sized from.
    row_steps: length of a simulation, in steps of one request. seeds: orders of the requests, where several are asked.
    resamples: bootstrap draws over prompts.
    """

    train: RecordTable | None = None
    estimator: AcceptanceEstimator | None = None
    cost: CostModel | None = None
    sampled: RecordTable | None = None
    programs: Mapping[str, str] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    overhead: Mapping[str, Any] | None = None
    bench: Mapping[str, Any] | None = None
    batch_sizes: tuple[int, ...] = (4, 32, 128)
    budget_delay: int = 2
    row_steps: int = 30_000
    seeds: int = 5
    resamples: int = 200

    def __post_init__(self) -> None:
        if not self.batch_sizes or list(self.batch_sizes) != sorted(set(self.batch_sizes)):
            raise ValueError(f"batch_sizes={self.batch_sizes!r}; use distinct ones in rising order, at least one")
        for size in self.batch_sizes:
            whole("batch_sizes", size, 1)
        for name, low in (("budget_delay", 0), ("row_steps", 1), ("seeds", 1), ("resamples", 0)):
            whole(name, getattr(self, name), low)


class Lab:
    """One table under study."""

    def __init__(self, table: RecordTable, options: StudyOptions | None = None) -> None:
        self.options = StudyOptions() if options is None else options
        self.table = table.select(np.flatnonzero(table.output_length > 0))
        if not self.table.outputs:
            raise LeftOutError("the table holds no output with a token; record some")
        if not self.table.free_width:
            raise LeftOutError("the table holds no model-free chains; record them")
        self._estimates: dict[tuple[int, str | None], Array] = {}
        self._served: dict[Any, Served] = {}

    # -- prompts -------------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> Array:
        """int64 [M]: the prompt of each output, 0 .. G-1; outputs of one prompt share a number."""
        ends = np.cumsum(self.table.prompt_length, dtype=np.int64)
        seen: dict[bytes, int] = {}
        starts = ends - self.table.prompt_length
        pairs = zip(starts, ends, strict=True)
        return np.array([seen.setdefault(self.table.prompt_tokens[a:b].tobytes(), len(seen)) for a, b in pairs])

    @property
    def prompt_count(self) -> int:
        return int(self.prompts.max()) + 1

    @cached_property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap(self.prompts, self.options.resamples)

    @property
    def has_model(self) -> bool:
        return self.table.model_width > 0

    def need_model(self, what: str) -> None:
        if not self.has_model:
            raise LeftOutError(f"{what} needs a model drafter's chains, and the table has none; record it with one")

    # -- estimates -----------------------------------------------------------------------------------------------

    @cached_property
    def folds(self) -> Array:
        """int64 [M]: the fold of each output, by prompt."""
        if self.prompt_count < 2:
            raise LeftOutError(
                "the table holds one prompt, so none can be held out to fit on; give a training table or an estimator"
            )
        order = np.random.default_rng(0).permutation(self.prompt_count)
        fold = np.empty(self.prompt_count, dtype=np.int64)
        fold[order] = np.arange(self.prompt_count) % min(FOLDS, self.prompt_count)
        return fold[self.prompts]

    def refit(self, level: int = 6, without: str | None = None) -> Array:
        """float32 [N, L]: estimates at all positions by coefficients that were fitted without their prompts."""
        key = (level, without)
        if key not in self._estimates:
            try:
                self._estimates[key] = self._refit(level, without)
            except ValueError as error:
                raise LeftOutError(f"the estimator cannot be fitted here: {error}") from error
        return self._estimates[key]

    def _refit(self, level: int, without: str | None) -> Array:
        if self.options.train is not None:
            return acceptance(fit_table(self.options.train, level, without), self.table)
        estimates = np.zeros(self.table.free_tokens.shape, dtype=np.float32)
        for fold in range(int(self.folds.max()) + 1):
            fitted = fit_table(self.table.select(np.flatnonzero(self.folds != fold)), level, without)
            inside = self.folds[self.table.output] == fold
            estimates[inside] = acceptance(fitted, self.table)[inside]
        return estimates

    @cached_property
    def own(self) -> Array:
        """float32 [N, L]: the estimates that simulations use unless they say otherwise."""
        if self.options.estimator is not None:
            return acceptance(self.options.estimator, self.table)
        return self.refit()

    @property
    def fit_note(self) -> str:
        """How refits were made."""
        if self.options.train is not None:
            train = self.options.train
            return f"Fitted on another table of {train.outputs} outputs, {train.positions} positions."
        folds = int(self.folds.max()) + 1
        return f"Fitted on the table itself in {folds} folds by prompt: no output is estimated from its own prompt."

    @property
    def own_note(self) -> str:
        """Where `own` comes from."""
        if self.options.estimator is not None:
            return (
                f"The estimator that was given ({self.options.estimator.provenance.get('source', 'unknown source')})."
            )
        return self.fit_note

    @cached_property
    def presets(self) -> dict[str, Array]:
        """Estimates of the published fits for other targets; those for other match limits are left out."""
        limits = self.table.info["ngram"]
        found = {}
        for name in AcceptanceEstimator.preset_names():
            each = AcceptanceEstimator.preset(name)
            if "/" in name or name == self.table.info.get("target"):  # its own fit says nothing of other models
                continue
            if all(getattr(each, key) == limits[key] for key in ("min_match", "max_match", "copy_cap")):
                found[name] = acceptance(each, self.table)
        if not found:
            raise LeftOutError(f"the published coefficients are for other match limits than the table's {limits}")
        return found

    @cached_property
    def grades(self) -> Grades:
        """The graded slots of the model-free chains."""
        found = Grades(self.table, "free")
        if not len(found.row):
            raise LeftOutError("the table holds no match with a graded position; record more outputs")
        return found

    @cached_property
    def matched(self) -> Array:
        """float64 [M]: positions of each output with a match."""
        return np.bincount(self.table.output, weights=self.table.free_length > 0, minlength=self.table.outputs)

    def log_loss(self, estimates: Array) -> Array:
        """Nats per matched step, [1 + R]."""
        found = losses(self.grades.of(estimates), self.grades.label)
        by_output = np.bincount(self.grades.output, weights=found, minlength=self.table.outputs)
        return self.bootstrap.ratio(by_output, self.matched)

    # -- simulations ---------------------------------------------------------------------------------------------

    def prepared(self, estimates: Array | None = None, outputs: Array | None = None) -> Prepared:
        """The table, or some of its outputs, with estimates [N, L] of its model-free chains (`own` if None)."""
        values = self.own if estimates is None else estimates
        if outputs is None:
            return Prepared(self.table, values)
        part = self.table.select(outputs)
        rows = np.concatenate([np.arange(self.table.start[m], self.table.start[m + 1]) for m in outputs])
        return Prepared(part, values[rows])

    @cached_property
    def ready(self) -> Prepared:
        """The whole table with its own estimates."""
        return self.prepared()

    @cached_property
    def cost(self) -> CostModel:
        if self.options.cost is not None:
            return self.options.cost
        delay, steps = self.options.budget_delay, min(20_000, self.options.row_steps)
        try:
            return paper_like_cost(self.ready, budget_delay=delay, row_steps=steps)
        except ValueError as error:
            raise LeftOutError(f"no cost gives the paper's prices on this table ({error}); give a cost file") from error

    @property
    def cost_note(self) -> str:
        """What the seconds of the simulations are."""
        if self.options.cost is not None:
            return "Seconds of a step from the cost file that was given."
        prices = ", ".join(f"{price:g} at batch {size}" for size, price in PAPER_PRICES.items())
        return (
            f"Seconds of a step are C_0 + p b, with p such that the price of a slot is the paper's ({prices} expected "
            "tokens; between them p is interpolated, beyond them held)."
        )

    def serve(self, policy: Policy | str, batch_size: int, budget: str | int = "adaptive", seed: int = 0) -> Served:
        """Throughput on the whole table with its own estimates; remembered."""
        key = (policy, batch_size, budget, seed)
        if key not in self._served:
            self._served[key] = self.serve_prepared(self.ready, policy, batch_size, budget, seed)
        return self._served[key]

    def serve_prepared(
        self, prepared: Prepared, policy: Policy | str, batch_size: int, budget: str | int = "adaptive", seed: int = 0
    ) -> Served:
        return serve(
            prepared,
            policy,
            self.cost,
            batch_size=batch_size,
            budget=budget,
            budget_delay=self.options.budget_delay,
            seed=seed,
            row_steps=self.options.row_steps,
        )

    @property
    def counts(self) -> dict[str, int]:
        """What the table holds, JSON-ready."""
        table = self.table
        return {"outputs": table.outputs, "prompts": self.prompt_count, "positions": table.positions}
