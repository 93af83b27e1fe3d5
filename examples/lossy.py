"""What goes wrong when a decision looks at the tokens it decides about: three small worlds, with their biased laws.

    python examples/lossy.py

With sampled drafts and rejection verification, each of these combinations is refused by the engine unless
`allow_lossy=True`. The laws are enumerated; the frequencies are what the real sampling code does.
"""

import textwrap
from typing import Any

import torch

from hspark.policy import lossy_reason, policy
from hspark.verify import Sizing, exact_distribution, target_distribution, total_variation, verifier
from hspark.verify.examples import lossy_examples
from hspark.verify.sampled import Sampler, histogram

COPIES = 50_000


def first_token(law: torch.Tensor) -> str:
    """The law of the first of the world's tokens (0 and 1), from the law of whole outputs."""
    return "  ".join(f"{float(v):.3f}" for v in law.view(2, -1).sum(1))


for number, example in enumerate(lossy_examples(), 1):
    chosen, world, sizing = policy(example.policy), example.world, example.sizing
    print(f"{number}. {example.cause.capitalize()}, policy {example.policy!r}")
    print(textwrap.indent(textwrap.fill(example.story, 96), "   "))
    options: dict[str, Any] = {"drafting": "probabilistic", "sizing": sizing}
    law = exact_distribution(world, chosen, **options)
    target = target_distribution(world)
    drawn = Sampler(world, verifier("rejection"), chosen, **options).run(torch.arange(COPIES)[:, None])
    frequency = histogram(drawn, world.outputs) / COPIES
    print("   P(first token is 0, 1):")
    print(f"     the target            {first_token(target)}")
    print(f"     enumerated            {first_token(law)}     total variation {total_variation(law, target):.3f}")
    print(f"     {COPIES} real samples    {first_token(frequency)}")

    print("   Ways out, each by enumeration or, for coupled verification, seed by seed:")
    greedy = exact_distribution(world, chosen, drafting="greedy", sizing=sizing)
    print(f"     greedy drafting                total variation {total_variation(greedy, target):.0e}")
    late = Sizing(sizing.budget, sizing.price, sizing.cost, delay=2)
    for name in ("ngram_first", "extension"):
        other = exact_distribution(world, policy(name), drafting="probabilistic", sizing=late)
        print(f"     {name + ', sized late':30} total variation {total_variation(other, target):.0e}")
    coupled = Sampler(world, verifier("coupled"), chosen, coupled=True, **options)
    seeds = torch.arange(2000)[:, None]
    same = int((coupled.run(seeds) == coupled.plain(seeds)).all(1).sum())
    print(f"     coupled verification           {same} of 2000 outputs equal plain decoding with the same seed\n")

print("In the engine's words:")
reason = lossy_reason(policy("proposed"), "probabilistic", "rejection", budget_delay=2)
print(textwrap.indent(textwrap.fill(str(reason), 100), "  "))
