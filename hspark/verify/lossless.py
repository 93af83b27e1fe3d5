"""`check`: does a verifier, under a policy, keep the target's distribution?

Every random example (`random_world`, `random_sizing`) is judged in up to three ways. With a `Rule`, the output law is
enumerated and its total variation from the target's must stay below 1e-10. A coupled verifier must emit, seed by seed,
the tokens of plain decoding, under Gumbel noise and under every assignment of a finite noise. And the verifier's own
code is sampled: a chi-square over the full support against the target's law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hspark.policy import Policy, allocate
from hspark.policy import policy as named_policy
from hspark.sampling import slot_key
from hspark.verify.base import Verifier
from hspark.verify.base import verifier as named_verifier
from hspark.verify.coupled import CoupledVerifier
from hspark.verify.exact import Allocator, Sizing, exact_distribution
from hspark.verify.examples import SHAPES, Shape, random_sizing, random_world
from hspark.verify.rejection import RejectionVerifier
from hspark.verify.rule import Rule
from hspark.verify.sampled import Sampler, finite_noise, histogram
from hspark.verify.statistics import chi_square, miss_rate
from hspark.verify.world import World, target_distribution, total_variation

TOLERANCE = 1e-10  # total variation; rounding alone stays below 1e-14
FALSE_ALARM = 1e-6  # per chi-square
BIAS = 0.1  # the total variation for which the miss rate is stated


@dataclass(frozen=True)
class Report:
    """What `check` found.

    worst_total_variation: over the enumerated examples, None if nothing was enumerated; worst_seed: the example.
    mismatches: outputs that differ from plain decoding under the same seed, None if the verifier is not coupled.
    worst_p_value: over the sampled examples, of `samples` copies each, None without any. miss_rate: how often one
    such test passes a law at total variation BIAS. failures: why not lossless.
    """

    verifier: str
    policy: str
    drafting: str
    temperature: str
    examples: int
    worst_total_variation: float | None = None
    worst_seed: int | None = None
    mismatches: int | None = None
    sampled_examples: int = 0
    samples: int = 0
    worst_p_value: float | None = None
    miss_rate: float | None = None
    failures: tuple[str, ...] = ()

    @property
    def lossless(self) -> bool:
        return not self.failures


def check(
    verifier: str | Verifier,
    policy: str | Policy,
    *,
    drafting: str = "greedy",
    greedy_target: bool = False,
    rule: Rule | None = None,
    coupled: bool | None = None,
    examples: int = 20,
    sampled: int = 3,
    samples: int = 20_000,
    seed: int = 0,
    fresh: bool = False,
    sizing: Sizing | None = None,
    shapes: Sequence[Shape] = SHAPES,
    allocator: Allocator = allocate,
    draft_key: Callable[[Tensor, int], Tensor] = slot_key,
    worlds: Iterable[tuple[World, Sizing]] | None = None,
) -> Report:
    """Whether a verifier, under a policy, keeps the target's distribution. See `Report` for what comes back.

    verifier, policy: names, or objects with the interfaces `Verifier` and `hspark.policy.Policy`.
    drafting: "greedy" or "probabilistic". greedy_target: the target at temperature 0.
    rule: the verifier's accept rule in float64; known for the verifiers of this package. Without one, nothing is
    enumerated, and samples alone judge.
    coupled: the verifier claims to emit what plain decoding emits, its drafts sharing the noise of their positions;
    known for the verifiers of this package, False for others.
    examples: worlds to try, of these `shapes`, from `seed` on. sampled: how many of them are sampled as well, `samples`
    copies each. fresh: sized without delay. sizing: instead of a random one. worlds: instead of random ones.
    allocator: the allocation. draft_key: how uncoupled draft noise is keyed.
    """
    judge = named_verifier(verifier) if isinstance(verifier, str) else verifier
    chosen = named_policy(policy) if isinstance(policy, str) else policy
    if drafting not in ("greedy", "probabilistic"):
        raise ValueError(f"drafting={drafting!r} is unknown; use 'greedy' or 'probabilistic'")
    for name, number, least in (("examples", examples, 1), ("sampled", sampled, 0), ("samples", samples, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r} is not usable; use an integer of at least {least}")
    if coupled is None:
        coupled = isinstance(judge, CoupledVerifier)
    if rule is None and (type(judge) is RejectionVerifier or (type(judge) is CoupledVerifier and drafting == "greedy")):
        rule = Rule()
    if worlds is None:
        worlds = _random_worlds(seed, examples, shapes, greedy_target, fresh, sizing)
    report = Report(judge.name, chosen.name, drafting, "0" if greedy_target else ">0", 0)
    for index, (world, size) in enumerate(worlds):
        report = replace(report, examples=report.examples + 1)
        target = target_distribution(world)
        if rule is not None:
            law = exact_distribution(world, chosen, drafting=drafting, sizing=size, rule=rule, allocator=allocator)
            report = _worse(report, total_variation(law, target), seed + index)
        options: dict[str, Any] = {"drafting": drafting, "coupled": coupled, "sizing": size, "allocator": allocator}
        options |= {"draft_key": draft_key, "greedy": greedy_target and index % 2 == 1}
        if coupled:
            report = _couple(report, world, judge, chosen, options, seed + index)
        if index < sampled:
            sampler = Sampler(world, judge, chosen, **options)
            counts = histogram(sampler.run(_seeds(seed + index, samples, world)), world.outputs)
            report = _sample(report, chi_square(counts, target), samples, counts.numel())
    return replace(report, failures=_failures(report))


def _random_worlds(
    seed: int, examples: int, shapes: Sequence[Shape], greedy: bool, fresh: bool, sizing: Sizing | None
) -> Iterable[tuple[World, Sizing]]:
    for index in range(seed, seed + examples):
        world = random_world(index, shapes[index % len(shapes)], greedy=greedy)
        yield world, sizing or random_sizing(index, world, fresh=fresh)


def _seeds(seed: int, copies: int, world: World) -> Tensor:
    return torch.randint(2**62, (copies, world.requests), generator=torch.Generator().manual_seed(seed))


def _worse(report: Report, distance: float, seed: int) -> Report:
    if report.worst_total_variation is not None and distance <= report.worst_total_variation:
        return report
    return replace(report, worst_total_variation=distance, worst_seed=seed)


def _couple(
    report: Report, world: World, judge: Verifier, chosen: Policy, options: dict[str, Any], seed: int, copies: int = 200
) -> Report:
    """Compares with plain decoding, seed by seed; for this package's verifier also under every finite noise."""
    sampler = Sampler(world, judge, chosen, **options)
    seeds = _seeds(seed, copies, world)
    wrong = int((sampler.run(seeds) != sampler.plain(seeds)).any(1).sum())
    if type(judge) is CoupledVerifier and not options["greedy"]:
        size = 3 if 3 ** (world.horizon * world.requests) <= 1000 else 2
        atoms = torch.randn(size, world.vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
        noise, count = finite_noise(atoms), size**world.horizon
        every = torch.cartesian_prod(*[torch.arange(count)] * world.requests).view(-1, world.requests)
        sampler = Sampler(world, CoupledVerifier(noise), chosen, noise=noise, **options)
        law, plain = (histogram(x, world.outputs) / len(every) for x in (sampler.run(every), sampler.plain(every)))
        report = _worse(report, total_variation(law.double(), plain.double()), seed)
    return replace(report, mismatches=(report.mismatches or 0) + wrong)


def _sample(report: Report, p_value: float, samples: int, cells: int) -> Report:
    worst = p_value if report.worst_p_value is None else min(p_value, report.worst_p_value)
    missed = miss_rate(BIAS, samples, cells, FALSE_ALARM)
    missed = missed if report.miss_rate is None else max(missed, report.miss_rate)
    count = report.sampled_examples + 1
    return replace(report, worst_p_value=worst, samples=samples, sampled_examples=count, miss_rate=missed)


def _failures(report: Report) -> tuple[str, ...]:
    found = []
    if report.worst_total_variation is not None and not report.worst_total_variation < TOLERANCE:
        found.append(
            f"total variation {report.worst_total_variation:.3g} from the target (example {report.worst_seed})"
        )
    if report.mismatches:
        found.append(f"{report.mismatches} outputs differ from plain decoding with the same seed")
    if report.worst_p_value is not None and report.worst_p_value < FALSE_ALARM:
        found.append(f"samples reject the target's law (p = {report.worst_p_value:.3g} < {FALSE_ALARM:g})")
    return tuple(found)
