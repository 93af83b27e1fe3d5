"""What a benchmark measures, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hspark.config import PAPER_DELAY, EngineConfig, SamplingParams
from hspark.drafters.base import Drafter
from hspark.drafters.opening import open_drafter
from hspark.lab.arms import ArmSpec, parse_arm
from hspark.policy import AcceptanceEstimator, CostModel, load_cost, policy, refuse_if_lossy
from hspark.verify import verifier


@dataclass(frozen=True)
class BenchSettings:
    """What is measured. Checked when made, before anything is loaded.

    arms: names as `parse_arm` takes them; "vanilla" is added where missing. batch_sizes: requests decoded at once.
    repeats: runs of everything. group_size: prompts of a group; None for one at batch size 1 and twice the batch size
    otherwise (the requests beyond the rows queue, so that rows refill). The peers run at batch size 1 only.
    max_new_tokens, temperature, seed, ignore_eos: of every request; request i has the seed `seed + i` in all arms.
    drafter: what `open_drafter` takes, or None. The rest as in HybridSpeculator.
    """

    arms: tuple[str, ...] = ("vanilla", "ngram_only")
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 1
    group_size: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    drafter: str | None = None
    drafting: str = "greedy"
    verify: str = "coupled"
    estimator: str = "auto"
    cost: str | CostModel = "auto"
    budget_delay: int | None = None
    compile: str | bool = "auto"
    allow_lossy: bool = False

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms is empty; use at least one arm")
        if "vanilla" not in self.arms:
            object.__setattr__(self, "arms", ("vanilla", *self.arms))
        for name in ("arms", "batch_sizes"):
            values = getattr(self, name)
            if len(set(values)) != len(values) or not values:
                raise ValueError(f"{name}={values!r} is empty or names one twice; use distinct ones, at least one")
        self._check_counts()
        self._check_arms()
        self.params(0)
        verifier(self.verify)
        EngineConfig(**self.speculator_settings())
        AcceptanceEstimator.resolve(self.estimator, "")
        if isinstance(self.cost, str) and self.cost != "auto":
            load_cost(self.cost)

    def _check_counts(self) -> None:
        counts = [("batch_sizes", size) for size in self.batch_sizes] + [("repeats", self.repeats)]
        if self.group_size is not None:
            counts.append(("group_size", self.group_size))
        for name, value in counts:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} holds {value!r}; use integers of at least 1")

    def _check_arms(self) -> None:
        for spec in self.specs:
            if spec.is_peer and 1 not in self.batch_sizes:
                raise ValueError(
                    f"arm={spec.name!r} runs at batch size 1 only; add 1 to batch_sizes={self.batch_sizes!r}"
                )
            if spec.policy == "model_only" and self.drafter is None:
                raise ValueError(
                    f"arm={spec.name!r} needs a model drafter, and none is known or given; give one, or leave it out"
                )
            if spec.policy is not None and self.drafter is not None and not self.allow_lossy:
                rule = policy(spec.policy)
                delay = PAPER_DELAY if self.budget_delay is None else self.budget_delay
                refuse_if_lossy(rule, self.drafting, verifier(self.verify), delay, budget=spec.budget)

    @property
    def specs(self) -> list[ArmSpec]:
        return [parse_arm(name) for name in self.arms]

    def params(self, index: int) -> SamplingParams:
        """The sampling parameters of prompt `index`."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed + index,
            ignore_eos=self.ignore_eos,
        )

    def comparable(self, arm: str) -> bool:
        """Whether the arm's text has to be vanilla's: when nothing is drawn, or draws go by position."""
        return self.params(0).greedy or (self.verify == "coupled" and not parse_arm(arm).is_peer)

    def open_drafter(self, dtype: Any, device: Any) -> Drafter | None:
        """The model drafter, checked; a ValueError says what is wrong with it. dtype, device: the target's."""
        if self.drafter is None:
            return None
        noise = "coupled" if self.verify == "coupled" else "independent"
        return open_drafter(self.drafter, dtype, device, drafting=self.drafting, noise=noise)

    def speculator_settings(self) -> dict[str, Any]:
        names = ("drafting", "verify", "budget_delay", "compile", "allow_lossy")
        return {name: getattr(self, name) for name in names}
