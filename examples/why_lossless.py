"""One step of hybrid speculative decoding with its numbers, and why the target's distribution survives it.

    python examples/why_lossless.py

Two requests over three tokens share a budget of three slots. Everything printed is computed by the library.
"""

import torch

from hspark.policy import allocate, chain_value, policy
from hspark.verify import Rule, Sizing, exact_distribution, target_distribution, total_variation
from hspark.verify.examples import random_world
from hspark.verify.rule import Slot

PRICE, BUDGET = 0.3, 3
world = random_world(11, (3, 4, 2, 3, 2))  # tokens, output, K, L, requests
request, root = torch.arange(2), torch.zeros(2, dtype=torch.int64)


def show(label: str, values: torch.Tensor) -> None:
    print(f"  {label:32}" + "  ".join(f"{float(v):5.3f}" for v in values))


print("1. Draft. The model drafter is greedy here: its tokens are a function of the text, and so are its confidences.")
first = world.draft_law(request, root, root).argmax(1)
second = world.draft_law(request, root, 1 + first).argmax(1)
model = world.model_chain(request, root, torch.stack([first, second], 1), sampled=False)
free = world.free_chain(request, root)
for r in range(2):
    for name, chain in (("model", model), ("n-gram", free)):
        n = int(chain.length[r])
        show(f"request {r} {name} {chain.tokens[r, :n].tolist()}", chain.survival[r, :n])

print(f"\n2. Choose. A chain's value is what its survivals promise beyond the price of a slot, {PRICE}.")
chosen = policy("proposed")(model, free, PRICE)
for name, chain in (("model", model), ("n-gram", free)):
    show(f"value of {name}, per request", chain_value(chain.survival, PRICE))
for r in range(2):
    print(f"  request {r} keeps {chosen.tokens[r, : int(chosen.length[r])].tolist()}")

print(f"\n3. Allocate. The {BUDGET} best slots of the batch are verified; each request keeps a prefix.")
kept = allocate(chosen.survival, chosen.length, BUDGET)
print("  slots per request:", kept.tolist())

print("\n4. Accept or recover. The first slot of request 0, as a greedy draft and as a sampled one:")
target, draft = world.target[0, :1], world.draft[0, 0, :1]
rule, token = Rule(), chosen.tokens[0, :1]
show("target", target[0])
accept = rule.accept(Slot(target, draft, token, torch.tensor([True])))
residual = rule.residual(Slot(target, draft, token, torch.tensor([True])))
print(f"  greedy: token {int(token)} is accepted with its target probability, {float(accept):.3f};")
show("  else the residual decides", residual[0])
show("  together", accept * torch.eye(3, dtype=torch.float64)[token[0]] + (1 - accept) * residual[0])
show("  sampled from", draft[0])
total = torch.zeros(3, dtype=torch.float64)
for x in range(3):
    slot = Slot(target, draft, torch.tensor([x]), torch.tensor([False]))
    accept, residual = rule.accept(slot), rule.residual(slot)
    total += draft[0, x] * (accept * torch.eye(3, dtype=torch.float64)[x] + (1 - accept) * residual[0])
    print(f"    token {x}: drafted with {float(draft[0, x]):.3f}, accepted with {float(accept):.3f}")
show("  together, over every draft", total)

print("\n5. All steps, all drafts, both requests: the joint law of the next four tokens, by enumeration.")
sizing = Sizing(BUDGET, PRICE)
for name, drafting in (("proposed", "greedy"), ("extension", "probabilistic"), ("proposed", "probabilistic")):
    law = exact_distribution(world, policy(name), drafting=drafting, sizing=sizing)
    distance = total_variation(law, target_distribution(world))
    print(f"  {name:10} {drafting:14} total variation from the target {distance:.1e}")
print("  The last one chose between chains by looking at what was sampled: see examples/lossy.py.")
