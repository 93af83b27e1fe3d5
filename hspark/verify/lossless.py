"""`check`: does a verifier, under a policy, keep the target's distribution?

Every example, a small world, is judged in up to three ways. With a `Rule`, the output law is enumerated and its total
variation from the target's must stay below 1e-10. A verifier that claims that no draft changes what it emits must
emit, seed by seed, the tokens of plain decoding; the coupled one of this package also under every assignment of a
finite noise. And the verifier's own code is sampled: a chi-square over the full support against the target's law.

A sample rejects the law only if a second, fresh one does too, each at the root of the test's share of the false-alarm
rate: the chi-square law of a statistic of small counts is good there, and is not far out in its tail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hspark.policy import Policy, allocate, lossy_reason
from hspark.policy import policy as named_policy
from hspark.sampling import slot_key
from hspark.verify.base import Verifier, check_verifier
from hspark.verify.base import verifier as named_verifier
from hspark.verify.coupled import CoupledVerifier
from hspark.verify.exact import Allocator, Sizing, exact_distribution
from hspark.verify.examples import SHAPES, Shape, busy_example, random_sizing, random_world
from hspark.verify.rejection import RejectionVerifier
from hspark.verify.report import BIAS, FALSE_ALARM, Report, find_failures, merge
from hspark.verify.rule import Rule
from hspark.verify.sampled import Sampler, VerdictError, finite_noise, histogram
from hspark.verify.statistics import chi_square, miss_rate
from hspark.verify.world import World, target_distribution, total_variation

Examples = list[tuple[int, World, Sizing]]  # with the seed of each
GREEDY_SAMPLES = 2000  # at temperature 0 a single wrong output is proof
PAIRED = 200  # copies compared seed by seed


def check(
    verifier: str | Verifier,
    policy: str | Policy,
    *,
    drafting: str | None = None,
    greedy_target: bool | None = None,
    rule: Rule | None = None,
    coupled: bool | None = None,
    examples: int = 20,
    sampled: int | None = None,
    samples: int = 10_000,
    seed: int = 0,
    fresh: bool = False,
    shapes: Sequence[Shape] = SHAPES,
    worlds: Iterable[tuple[World, Sizing]] | None = None,
    allocator: Allocator = allocate,
    draft_key: Callable[[Tensor, int], Tensor] = slot_key,
) -> Report:
    """Whether a verifier, under a policy, keeps the target's distribution. See `Report` for what comes back.

    verifier, policy: names, or objects with the interfaces `Verifier` and `hspark.policy.Policy`.

    By default the verifier's code runs in all examples, with greedy and with sampled drafts, at temperatures above 0
    and at 0, there with and without `greedy=True`. In every second example all chains are full and all slots are
    verified, those of several requests in the same step. A policy that loses exactness with sampled drafts, whatever
    the verifier, is replaced by "extension" for them. It takes about 15 seconds of one core, a right verifier fails
    with a probability of FALSE_ALARM = 1e-6 over all tests together, and each test misses a total variation of 0.1 with
    the probability `Report.miss_rate`. Nothing judged, or too little, is not lossless either: "not judged".

    drafting: "greedy", "probabilistic", or None for both. greedy_target: the target at temperature 0; None for both.
    With one value each, a combination that is lossy by rule fails with that reason.
    rule: the verifier's accept rule in float64; known for the verifiers of this package. Without one, nothing is
    enumerated, and samples alone judge.
    coupled: the verifier claims to emit what plain decoding emits, its drafts sharing the noise of their positions;
    known for the verifiers of this package, False for others. (One that says `depends_on_drafts = False` and is not
    coupled is compared with itself without drafts.)
    examples: random worlds per setting, of these `shapes`, from `seed` on. sampled: how many of them are sampled, all
    by default, `samples` copies each (at most 2,000 at temperature 0). fresh: sized without delay.
    worlds: examples of your own instead of random ones; their targets say what greedy_target is.
    allocator: the allocation. draft_key: how uncoupled draft noise is keyed.
    """
    judge = named_verifier(verifier) if isinstance(verifier, str) else check_verifier("verifier", verifier)
    chosen = named_policy(policy) if isinstance(policy, str) else _check_policy(policy)
    if drafting not in (None, "greedy", "probabilistic"):
        raise ValueError(f"drafting={drafting!r} is unknown; use 'greedy' or 'probabilistic', or None for both")
    if coupled is None:
        coupled = isinstance(judge, CoupledVerifier)
    _check_counts(examples=(examples, 1), samples=(samples, 1), sampled=(0 if sampled is None else sampled, 0))
    if not shapes:
        raise ValueError(f"shapes={shapes!r} is empty; use at least one (V, N, K, L, R)")
    own = None if worlds is None else _own_examples(worlds, seed, greedy_target)
    if own is not None:
        greedy_target = _is_greedy(own[0][1])
    cells = []
    for greedy in (False, True) if greedy_target is None else (greedy_target,):
        tried = own or _random_examples(seed, examples, shapes, greedy, fresh)
        for mode in ("greedy", "probabilistic") if drafting is None else (drafting,):
            used = _stand_in(chosen, mode, judge, coupled) if drafting is None and not greedy else chosen
            options = {"drafting": mode, "coupled": coupled, "allocator": allocator, "draft_key": draft_key}
            cells.append(_Cell(judge, used, tried, greedy, rule or _known_rule(judge, mode), options))
    for cell in cells:
        cell.sampled = len(cell.examples) if sampled is None else min(sampled, len(cell.examples))
        cell.samples = min(samples, GREEDY_SAMPLES) if cell.greedy else samples
    tests = sum(cell.sampled * len(cell.flags) for cell in cells)
    return merge(judge.name, chosen.name, [cell.run(max(tests, 1)) for cell in cells])


@dataclass
class _Cell:
    """One setting: a verifier, a policy, a way of drafting, and examples that are all greedy or all not.

    sampled: how many of the examples are sampled, `samples` copies each. cells: the most outputs that one of these can
    have. options: of every `Sampler`. level: at which each of the two samples of a test rejects.
    """

    judge: Verifier
    policy: Policy
    examples: Examples
    greedy: bool
    rule: Rule | None
    options: dict[str, Any]
    sampled: int = 0
    samples: int = 0
    cells: int = 2
    level: float = 0.0
    report: Report = field(init=False)

    @property
    def flags(self) -> tuple[bool, ...]:
        """The values of `greedy=` that a verifier must take: at temperature 0 a batch may hold sampled rows or not."""
        return (False, True) if self.greedy else (False,)

    def run(self, tests: int) -> Report:
        """The report, with the false-alarm rate shared out over `tests`."""
        self.level = math.sqrt(FALSE_ALARM / tests)
        self.report = Report(self.judge.name, self.policy.name, self.options["drafting"], "0" if self.greedy else ">0")
        self.set(samples=self.samples, by_rule=None if self.greedy else self._lossy_reason())
        try:
            for index, (seed, world, sizing) in enumerate(self.examples):
                self._try(world, sizing, seed, index < self.sampled)
        except VerdictError as error:
            self.set(verdict_error=str(error))
        if self.report.tests:  # more cells, less power; the first sample passes, or the second
            missed = 2 * miss_rate(BIAS, self.samples, self.cells, self.level)
            self.set(miss_rate=min(1.0, missed))
        drafts = self.policy.needs_model or self.policy.needs_free
        self.set(failures=find_failures(self.report, tests, drafts))
        return self.report

    def set(self, **fields: Any) -> None:
        self.report = replace(self.report, **fields)

    def _lossy_reason(self) -> str | None:
        delays = [sizing.delay for _, _, sizing in self.examples if sizing.cost is not None]
        verify = "coupled" if self.options["coupled"] else self.judge
        budget = "adaptive" if delays else "all"
        return lossy_reason(self.policy, self.options["drafting"], verify, min(delays, default=1), budget=budget)

    def _try(self, world: World, sizing: Sizing, seed: int, sampled: bool) -> None:
        """Judges one example."""
        self.set(examples=self.report.examples + 1)
        target = target_distribution(world)
        if self.rule is not None:
            shared = {"drafting": self.options["drafting"], "allocator": self.options["allocator"]}
            law = exact_distribution(world, self.policy, sizing=sizing, rule=self.rule, **shared)
            self._worse(total_variation(law, target), seed)
        for flag in self.flags:
            sampler = Sampler(world, self.judge, self.policy, sizing=sizing, greedy=flag, **self.options)
            if self.options["coupled"] or not getattr(self.judge, "depends_on_drafts", True):
                self._compare(sampler, seed)
            if sampled:
                self._sample(sampler, target, seed)
            slots, steps = sampler.verified, sampler.joint
            self.set(verified_slots=self.report.verified_slots + slots, joint_steps=self.report.joint_steps + steps)
        if type(self.judge) is CoupledVerifier and self.options["coupled"] and not self.greedy:
            self._enumerate_noise(world, sizing, seed)
        self.set(sampled_examples=self.report.sampled_examples + sampled)

    def _worse(self, distance: float, seed: int) -> None:
        worst = self.report.worst_total_variation
        if worst is None or distance > worst:
            self.set(worst_total_variation=distance, worst_seed=seed)

    def _compare(self, sampler: Sampler, seed: int) -> None:
        """Compares with decoding without drafts, seed by seed."""
        seeds = _seeds(seed, PAIRED, sampler.world)
        if sampler.coupled:
            expected = sampler.plain(seeds)
        else:
            plain = Sampler(sampler.world, self.judge, named_policy("vanilla"), greedy=sampler.greedy, **self.options)
            expected = plain.run(seeds)
        wrong = int((sampler.run(seeds) != expected).any(1).sum())
        self.set(mismatches=(self.report.mismatches or 0) + wrong)

    def _sample(self, sampler: Sampler, target: Tensor, seed: int) -> None:
        """Tests the law of samples; what rejects it counts only if a second sample does too."""
        world = sampler.world

        def p_value(stage: int) -> float:
            return chi_square(histogram(sampler.run(_seeds(seed, self.samples, world, stage)), world.outputs), target)

        p = p_value(0)
        if p < self.level:
            p = max(p, p_value(1)) ** 2  # two independent ones are both below x with the probability x^2
        found, worst = self.report, self.report.worst_p_value
        self.set(tests=found.tests + 1, worst_p_value=p if worst is None else min(p, worst))
        self.cells = max(self.cells, int((target > 0).sum()))

    def _enumerate_noise(self, world: World, sizing: Sizing, seed: int) -> None:
        """Every assignment of a finite noise to the positions must give the law that plain decoding has under it."""
        size = 3 if 3 ** (world.horizon * world.requests) <= 1000 else 2
        atoms = torch.randn(size, world.vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
        noise, count = finite_noise(atoms), size**world.horizon
        every = torch.cartesian_prod(*[torch.arange(count)] * world.requests).view(-1, world.requests)
        sampler = Sampler(world, CoupledVerifier(noise), self.policy, sizing=sizing, noise=noise, **self.options)
        law, plain = (histogram(x, world.outputs) / len(every) for x in (sampler.run(every), sampler.plain(every)))
        self._worse(total_variation(law.double(), plain.double()), seed)


def _random_examples(seed: int, examples: int, shapes: Sequence[Shape], greedy: bool, fresh: bool) -> Examples:
    """Busy ones at even seeds, which come first, and random ones at odd seeds; under fresh sizing random ones alone, as
    a busy one has a fixed budget."""
    found: Examples = []
    for index in sorted(range(seed, seed + examples), key=lambda index: index % 2):
        shape = shapes[index % len(shapes)]
        if index % 2 == 0 and not fresh:
            found.append((index, *busy_example(index, shape, greedy=greedy)))
        else:
            world = random_world(index, shape, greedy=greedy)
            found.append((index, world, random_sizing(index, world, fresh=fresh)))
    return found


def _seeds(seed: int, copies: int, world: World, stage: int = 0) -> Tensor:
    """int64 [copies, R], other ones at every stage."""
    generator = torch.Generator().manual_seed(2**32 * stage + seed)
    return torch.randint(2**62, (copies, world.requests), generator=generator)


def _known_rule(judge: Verifier, drafting: str) -> Rule | None:
    """The accept rule of this package's own verifiers, for drafts that do not look at the verifier's noise."""
    known = type(judge) is RejectionVerifier or (type(judge) is CoupledVerifier and drafting == "greedy")
    return Rule() if known else None


def _stand_in(policy: Policy, drafting: str, judge: Verifier, coupled: bool) -> Policy:
    """`policy`, or one that keeps exactness with sampled drafts where it does not: the verifier is to be judged."""
    lossy = lossy_reason(policy, drafting, "coupled" if coupled else judge, 1) is not None
    return named_policy("extension") if lossy else policy


def _is_greedy(world: World) -> bool:
    return bool((world.target.amax(-1) == 1).all())


def _own_examples(worlds: Iterable[tuple[World, Sizing]], seed: int, greedy: bool | None) -> Examples:
    found = [(seed + index, world, sizing) for index, (world, sizing) in enumerate(worlds)]
    kinds = {_is_greedy(world) for _, world, _ in found}
    if not found:
        raise ValueError("worlds is empty; use at least one (World, Sizing)")
    if len(kinds) > 1:
        raise ValueError("worlds holds targets at temperature 0 and above 0; check them apart")
    if greedy is not None and greedy not in kinds:
        raise ValueError(f"greedy_target={greedy!r} is not what worlds holds; leave it out, the targets tell")
    return found


def _check_policy(policy: Any) -> Policy:
    if isinstance(policy, type) or not isinstance(policy, Policy):
        shown = policy.__name__ if isinstance(policy, type) else repr(policy)
        raise ValueError(f"policy={shown} is not a policy; use a name or an object like `hspark.policy.Policy`")
    return policy


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (number, least) in counts.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r} is not usable; use an integer of at least {least}")
