"""The enumeration itself: against examples worked by hand, a slow recursion written apart, and real samples."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspark.policy import LinearCost, Policy, policy
from hspark.verify import World, exact_distribution, target_distribution, total_variation, verifier
from hspark.verify.exact import Sizing
from hspark.verify.examples import SHAPES, lossy_examples, random_sizing, random_world
from hspark.verify.sampled import Sampler, histogram
from hspark.verify.statistics import chi_square, miss_rate

FALSE_ALARM = 1e-6
EXAMPLES = {example.cause: example for example in lossy_examples()}


@pytest.mark.parametrize("cause", EXAMPLES)
def test_worked_examples_of_lost_exactness(cause: str) -> None:
    """The law by hand, the enumerated law and the sampled law agree with each other, and not with the target's."""
    example = EXAMPLES[cause]
    chosen = policy(example.policy)
    law = exact_distribution(example.world, chosen, drafting="probabilistic", sizing=example.sizing)
    torch.testing.assert_close(law.view(2, -1).sum(1), torch.tensor(example.first_token, dtype=torch.float64))
    assert total_variation(law, target_distribution(example.world)) >= 0.25
    seeds = torch.arange(20_000)[:, None]
    sampler = Sampler(example.world, verifier("rejection"), chosen, drafting="probabilistic", sizing=example.sizing)
    counts = histogram(sampler.run(seeds), example.world.outputs)
    assert chi_square(counts, law) > FALSE_ALARM
    assert chi_square(counts, target_distribution(example.world)) < FALSE_ALARM


@pytest.mark.parametrize("cause", EXAMPLES)
def test_the_ways_out_of_the_worked_examples(cause: str) -> None:
    """Greedy drafting, coupled verification, another policy, and late sizing each restore the target's law."""
    example = EXAMPLES[cause]
    world, target = example.world, target_distribution(example.world)
    greedy = exact_distribution(world, policy(example.policy), sizing=example.sizing)
    assert total_variation(greedy, target) < 1e-12
    late = Sizing(example.sizing.budget, example.sizing.price, example.sizing.cost, delay=1)
    for name in ("ngram_first", "extension"):
        law = exact_distribution(world, policy(name), drafting="probabilistic", sizing=late)
        assert total_variation(law, target) < 1e-12
    sampler = Sampler(
        world,
        verifier("coupled"),
        policy(example.policy),
        drafting="probabilistic",
        coupled=True,
        sizing=example.sizing,
    )
    seeds = torch.arange(5000)[:, None]
    assert torch.equal(sampler.run(seeds), sampler.plain(seeds))


def _slow_law(world: World, chosen: Policy, sizing: Sizing, sampled: bool) -> dict[tuple[int, ...], float]:
    """One request, plain recursion over outputs: drafts, chain, count, walk. Nothing shared with the enumeration."""
    vocab = world.vocab_size

    def node(tokens: tuple[int, ...]) -> int:
        at = 0
        for token in tokens:
            at = at * vocab + 1 + token
        return at

    @cache
    def rest(output: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        if len(output) >= world.horizon:
            return {output[: world.horizon]: 1.0}
        law: dict[tuple[int, ...], float] = {}
        for draft in itertools.product(range(vocab), repeat=world.model_width):
            laws = [world.draft[0, node(output), node(draft[:k])] for k in range(len(draft))]
            best = tuple(int(q.argmax()) for q in laws)
            if not sampled and draft != best:
                continue
            weight = 1.0
            for q, token in zip(laws, draft, strict=True):
                weight *= float(q[token]) if sampled else 1.0
            for emitted, mass in _slow_step(world, chosen, sizing, output, draft, sampled).items():
                for final, later in rest(output + emitted).items():
                    law[final] = law.get(final, 0.0) + weight * mass * later
        return law

    return rest(())


def _slow_step(
    world: World, chosen: Policy, sizing: Sizing, output: tuple[int, ...], draft: tuple[int, ...], sampled: bool
) -> dict[tuple[int, ...], float]:
    vocab, at = world.vocab_size, 0
    for token in output:
        at = at * vocab + 1 + token
    zero, here = torch.tensor([0]), torch.tensor([at])
    chain = chosen(
        world.model_chain(zero, here, torch.tensor([draft]).view(1, -1), sampled),
        world.free_chain(zero, here),
        sizing.price,
    )
    kept = min(sizing.budget, int(chain.length[0]))  # one request: the budget is all its own
    law: dict[tuple[int, ...], float] = {}
    reach = 1.0
    tokens: tuple[int, ...] = ()
    for k in range(kept + 1):
        if len(output) + len(tokens) >= world.horizon:
            law[tokens] = law.get(tokens, 0.0) + reach
            return law
        target = world.target[0, at].tolist()
        if k == kept:
            for y in range(vocab):
                law[(*tokens, y)] = law.get((*tokens, y), 0.0) + reach * target[y]
            break
        x = int(chain.tokens[0, k])
        if bool(chain.point_mass[0, k]):
            accept, residual = target[x], [t * (y != x) for y, t in enumerate(target)]
        else:
            assert chain.log_probs is not None
            q = chain.log_probs[0, k].exp().tolist()
            accept = min(1.0, target[x] / q[x]) if q[x] > 0 else 0.0
            residual = [max(t - u, 0.0) for t, u in zip(target, q, strict=True)]
        total = sum(residual)
        for y in range(vocab):
            share = residual[y] / total if total > 0 else target[y]
            law[(*tokens, y)] = law.get((*tokens, y), 0.0) + reach * (1 - accept) * share
        reach, tokens, at = reach * accept, (*tokens, x), at * vocab + 1 + x
    return law


@given(
    st.integers(0, 2**20),
    st.sampled_from(["proposed", "extension", "ngram_first", "model_only", "ngram_only"]),
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.3, 0.7]),
)
@settings(max_examples=12)
def test_equals_a_slow_recursion(seed: int, name: str, sampled: bool, budget: int, price: float) -> None:
    world, sizing = random_world(seed, (2, 4, 2, 3, 1)), Sizing(budget, price)
    drafting = "probabilistic" if sampled else "greedy"
    law = exact_distribution(world, policy(name), drafting=drafting, sizing=sizing)
    slow = torch.zeros_like(law)
    for output, mass in _slow_law(world, policy(name), sizing, sampled).items():
        slow[int("".join(map(str, output)), 2)] += mass
    torch.testing.assert_close(law, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(len(SHAPES)))
@pytest.mark.parametrize("fresh", [False, True])
def test_real_samples_follow_the_enumerated_law(seed: int, fresh: bool) -> None:
    """Where exactness is lost, the code must lose it just so: drafts, chains, budgets, allocation, verifier, all real.

    At 20,000 samples over at most 512 cells, a law at a total variation of 0.1 from the enumerated one passes less than
    once in a million times.
    """
    world = random_world(seed, SHAPES[seed])
    sizing = random_sizing(seed, world, fresh=fresh)
    law = exact_distribution(world, policy("proposed"), drafting="probabilistic", sizing=sizing)
    sampler = Sampler(world, verifier("rejection"), policy("proposed"), drafting="probabilistic", sizing=sizing)
    seeds = torch.randint(2**62, (20_000, world.requests), generator=torch.Generator().manual_seed(seed))
    assert chi_square(histogram(sampler.run(seeds), world.outputs), law) > FALSE_ALARM
    assert miss_rate(0.1, 20_000, law.numel(), FALSE_ALARM) < 1e-6


def test_joint_laws_are_laws_of_independent_requests() -> None:
    """Marginals of the joint law are the requests' own targets, although they competed for one budget."""
    world = random_world(4, (2, 4, 2, 3, 2))
    law = exact_distribution(world, policy("extension"), drafting="probabilistic", sizing=Sizing(2, 0.3))
    target = target_distribution(world)
    assert law.shape == (16, 16)
    torch.testing.assert_close(law.sum(1), target.sum(1))
    torch.testing.assert_close(law, law.sum(1)[:, None] * law.sum(0))


def test_one_step_and_no_step() -> None:
    """The rest is decoded plainly: nothing to go wrong without steps, and one step is enough to see a bias."""
    example = EXAMPLES["value rule"]
    target = target_distribution(example.world)
    options = {"drafting": "probabilistic", "sizing": example.sizing}
    none = exact_distribution(example.world, policy("proposed"), steps=0, **options)  # type: ignore[arg-type]
    assert total_variation(none, target) < 1e-15
    one = exact_distribution(example.world, policy("proposed"), steps=1, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(one.view(2, -1).sum(1), torch.tensor(example.first_token, dtype=torch.float64))


def test_linear_costs_cannot_look_ahead() -> None:
    """Fresh sizing loses exactness over a staircase, not over a straight cost: there, a slot's place depends on better
    slots only, and a request's later slots are never better."""
    worst = {"straight": 0.0, "staircase": 0.0}
    for seed in range(35, 40):
        world = random_world(seed, SHAPES[0])
        straight = [Sizing(cost=LinearCost(1.0, slope), delay=0) for slope in (0.2, 0.35, 0.6)]
        for name, sizings in (("straight", straight), ("staircase", [random_sizing(seed, world, fresh=True)])):
            for sizing in sizings:
                law = exact_distribution(world, policy("model_only"), drafting="probabilistic", sizing=sizing)
                worst[name] = max(worst[name], total_variation(law, target_distribution(world)))
    assert worst["straight"] < 1e-12
    assert worst["staircase"] > 0.01


def test_bad_input_is_refused_by_name() -> None:
    world = random_world(0)
    with pytest.raises(ValueError, match="drafting='sampled' is unknown"):
        exact_distribution(world, policy("proposed"), drafting="sampled")
    with pytest.raises(ValueError, match="steps=-1"):
        exact_distribution(world, policy("proposed"), steps=-1)
    with pytest.raises(ValueError, match="4 requests"):
        exact_distribution(random_world(0, (2, 2, 1, 1, 4)), policy("proposed"))
    fields = {name: getattr(world, name) for name in World.__dataclass_fields__}

    def broken(**changes: int | Tensor) -> World:
        return World(**{**fields, **changes})

    with pytest.raises(ValueError, match="target has 40 prefixes; use 13"):
        broken(horizon=3)
    with pytest.raises(ValueError, match="free_length has shape"):
        broken(free_length=torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="draft has rows that do not sum to 1"):
        broken(draft=world.draft * 0.5)
    with pytest.raises(ValueError, match="target is not a table of float64"):
        broken(target=world.target.float())
