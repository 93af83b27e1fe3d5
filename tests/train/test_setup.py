"""New drafters: their shape follows the target, and their start is what it is said to be."""

from typing import Any

import pytest
import torch

from hspark.train.optimizers import build_optimizers
from hspark.train.prompts import training_prompts
from hspark.train.setup import drafter_config, new_drafter, spread_taps, unused_token
from tests.tiny import FAMILIES, VOCAB, tiny_llama, tiny_qwen3
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, toy_tokenizer


def test_taps_spread_over_the_depth():
    assert spread_taps(30, 4) == (1, 10, 19, 28)
    assert spread_taps(36, 5) == (1, 9, 18, 26, 34)
    assert spread_taps(3, 4) == (1,)
    assert spread_taps(30, 1) == (28,)
    with pytest.raises(ValueError, match="taps=0"):
        spread_taps(30, 0)


def test_the_mask_token_is_one_that_is_never_said():
    assert unused_token(None, 100) == 99
    assert unused_token(toy_tokenizer(), TOY_VOCAB + 8) == TOY_VOCAB + 7
    assert unused_token(toy_tokenizer(), TOY_VOCAB) != TOY_EOS or TOY_EOS == TOY_VOCAB - 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_gets_a_drafter(family):
    target = FAMILIES[family]()
    config = drafter_config(target.config, mask_token_id=VOCAB - 1, taps=(0, 1), markov_rank=4)
    assert config.num_kv_heads == config.num_heads
    model: Any = new_drafter(config, target)
    assert model.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert not model.lm_head.weight.requires_grad
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_the_last_layers_are_copied():
    target = tiny_llama()
    config = drafter_config(target.config, mask_token_id=VOCAB - 1, layers=2, taps=(0, 1), markov_rank=4)
    model: Any = new_drafter(config, target, samples=torch.randn(50, 64))
    source = target.model.layers[-1]
    assert torch.equal(model.layers[1].mlp.up_proj.weight, source.mlp.up_proj.weight)
    heads = model.layers[1].self_attn.k_proj.weight.view(4, 8, 32)
    theirs = source.self_attn.k_proj.weight.view(2, 8, 32)
    assert torch.equal(heads, theirs.repeat_interleave(2, dim=0))
    assert torch.equal(model.fc.weight[:, -32:], torch.eye(32))
    assert float(model.layers[1].self_attn.q_norm.weight[0].detach()) != 1.0


def test_norms_that_the_target_has_are_copied():
    target = tiny_qwen3()
    with torch.no_grad():
        target.model.layers[-1].self_attn.q_norm.weight.fill_(3.0)
    config = drafter_config(target.config, mask_token_id=VOCAB - 1, taps=(0, 1), markov_rank=0)
    model: Any = new_drafter(config, target, samples=torch.randn(50, 64))
    assert float(model.layers[-1].self_attn.q_norm.weight[0].detach()) == 3.0
    assert model.markov_head is None


def test_the_seed_decides_the_rest():
    target = tiny_llama()
    config = drafter_config(target.config, mask_token_id=VOCAB - 1, taps=(0, 1), markov_rank=4)
    one, same, other = (new_drafter(config, target, seed=seed).fc.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_muon_takes_the_matrices_and_nothing_is_left_out():
    target = tiny_llama()
    model: Any = new_drafter(drafter_config(target.config, mask_token_id=0, taps=(0, 1), markov_rank=4), target)
    optimizers = build_optimizers(model, "muon", 1e-3, 1e-2)
    taken = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(taken) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    matrices = optimizers[1].param_groups[0]["params"]
    assert len(matrices) == 1 + 2 * 7
    assert not {id(p) for p in matrices} & {id(p) for p in model.markov_head.parameters()}


def test_adamw_has_the_decays_of_the_recipe():
    """Moments that decay by 0.9 and 0.98 a step, seen in the second step after gradients of 1 and 0."""
    layer = torch.nn.Linear(1, 1, bias=False)
    [optimizer] = build_optimizers(layer, "adamw", 0.1, 0.1)
    moved = []
    for gradient in (1.0, 0.0):
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        optimizer.step()
        moved.append(float((before - layer.weight.detach()) / 0.1))
    first, second = 0.9 * 0.1 / (1 - 0.9**2), 0.98 * 0.02 / (1 - 0.98**2)
    assert moved == pytest.approx([1.0, first / second**0.5], rel=1e-4)


def test_built_in_prompts():
    prompts = training_prompts(40, seed=3)
    assert len({task for task, _ in prompts}) == 40
    assert prompts == training_prompts(40, seed=3)
    assert prompts != training_prompts(40, seed=4)
    kinds = [task.split("/")[0] for task, _ in prompts]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"builtin": 24, "ask": 8, "chat": 8}
    with pytest.raises(ValueError, match="count=0"):
        training_prompts(0)
