"""The losses against the reference implementation's numbers, and their shortcuts against the plain computation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hspark.drafters.dspark_model import DSparkModel
from hspark.drafters.layouts import read_config
from hspark.train import losses
from hspark.train.blocks import Batch, anchor_candidates, make_slots
from hspark.train.losses import LossWeights, Vocabulary, draft_losses

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = ["qwen3_vanilla", "qwen3_rnn", "qwen3_rank0", "gemma4_k_eq_v", "gemma4_separate_v"]


def load_case(name):
    """The drafter, the batch, the recorded numbers and the recorded weights of a reference training step."""
    folder = VECTORS / name
    weights, record = load_file(folder / "model.safetensors"), load_file(folder / "train.safetensors")
    shapes = {key: tuple(value.shape) for key, value in weights.items()}
    model: Any = DSparkModel(read_config(json.loads((folder / "config.json").read_text()), shapes=shapes).config)
    model.load_state_dict(weights)
    model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    batch = Batch(
        record["input_ids"],
        record["loss_mask"].bool(),
        record["target_hidden_states"],
        record["target_last_hidden_states"],
        record["anchor_positions"],
        record["block_keep_mask"].bool(),
    )
    ce, l1, confidence, gamma = record["alphas"].tolist()
    return model, batch, record, LossWeights(ce=ce, l1=l1, confidence=confidence, gamma=gamma)


@pytest.mark.parametrize("name", CASES)
def test_slots_match_the_reference(name):
    model, batch, record, weights = load_case(name)
    slots = make_slots(batch, model.config.block_size, weights.gamma)
    mask = record["eval_mask"].bool()
    assert torch.equal(anchor_candidates(batch.loss_mask), record["anchor_candidate_mask"].bool())
    assert torch.equal(slots.mask, mask)
    assert torch.equal(slots.labels[mask], record["target_ids"][mask])
    torch.testing.assert_close(slots.weights, record["loss_weights"])


@pytest.mark.parametrize("name", CASES)
def test_terms_match_the_reference(name):
    model, batch, record, weights = load_case(name)
    terms = draft_losses(model, batch, weights)
    names = ["ce"] + ["l1"] * bool(weights.l1) + ["confidence"] * bool(weights.confidence)
    for term in names:
        recorded = record[f"{term}_loss_num"].squeeze()
        torch.testing.assert_close(getattr(terms, term), recorded, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(terms.weight, record[f"{term}_loss_den"].squeeze(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(terms.total.detach(), record["total_loss"].squeeze(), atol=1e-4, rtol=1e-5)
    if weights.confidence:
        mask = record["eval_mask"].bool()
        for ours, theirs in ((terms.accept, "accept_rate"), (terms.confidence_logits, "confidence_logits")):
            torch.testing.assert_close(ours.view(mask.shape)[mask], record[theirs][mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_the_reference(name):
    model, batch, record, weights = load_case(name)
    draft_losses(model, batch, weights).total.backward()
    parameters = dict(model.named_parameters())
    recorded = {key.removeprefix("grad."): value for key, value in record.items() if key.startswith("grad.")}
    assert len(recorded) >= 7
    for key, value in recorded.items():
        torch.testing.assert_close(parameters[key].grad, value, atol=1e-5, rtol=1e-4)
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("name", ["qwen3_rnn", "gemma4_k_eq_v"])
def test_distillation_term_matches_autograd(name):
    """The term that the reference lacks, against the plain formula differentiated by autograd."""
    model, batch, _, _ = load_case(name)
    weights = LossWeights(ce=0.0, l1=0.0, soft=1.0, confidence=0.0)
    draft_losses(model, batch, weights).total.backward()
    ours = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    slots = make_slots(batch, model.config.block_size, weights.gamma)
    hidden = losses.block_hidden(model, batch)
    logits = model.base_logits(hidden) + model.markov_bias(slots.previous.flatten(0, 1), hidden)
    target = losses.target_probabilities(model, batch.final, model.lm_head.weight)
    rows = torch.arange(len(target))[:, None, None]
    aligned = target[rows, slots.position].flatten(0, 1)
    term = -(aligned * F.log_softmax(logits, dim=-1)).sum(-1)
    weight = slots.weights.flatten(0, 1)
    ((weight * term).sum() / (weight.sum() + losses.EPSILON)).backward()
    compared = 0
    for key, parameter in model.named_parameters():
        if parameter.grad is not None and key in ours:
            torch.testing.assert_close(ours[key], parameter.grad, atol=1e-6, rtol=1e-3)
            compared += 1
    assert compared > 20


def test_chunks_do_not_matter(monkeypatch):
    model, batch, _, weights = load_case("qwen3_vanilla")
    whole = draft_losses(model, batch, weights)
    whole.total.backward()
    gradient = model.fc.weight.grad.clone()
    model.zero_grad()
    monkeypatch.setattr(losses, "CHUNK", 5)
    parts = draft_losses(model, batch, weights)
    parts.total.backward()
    torch.testing.assert_close(parts.total, whole.total)
    torch.testing.assert_close(model.fc.weight.grad, gradient, atol=1e-6, rtol=1e-4)


def test_a_sample_of_everything_is_the_whole_vocabulary():
    model, batch, _, weights = load_case("qwen3_vanilla")
    whole = draft_losses(model, batch, weights)
    everything = Vocabulary.sample(torch.arange(3), batch.tokens.flatten(), 97, 97)
    sampled = draft_losses(model, batch, weights, vocabulary=everything)
    torch.testing.assert_close(sampled.total, whole.total)


def test_a_sampled_vocabulary_renormalises_both_sides():
    """Cross-entropy over a sample is the whole one's, with the other logits removed."""
    model, batch, _, _ = load_case("qwen3_vanilla")
    weights = LossWeights(ce=1.0, l1=0.0, confidence=0.0)
    labels = make_slots(batch, 7, 4.0).labels.flatten()
    sample = Vocabulary.sample(torch.arange(5), labels, 50, 97, torch.Generator().manual_seed(1))
    assert len(sample.ids) == 50
    assert set(labels.tolist()) <= set(sample.ids.tolist())
    terms = draft_losses(model, batch, weights, vocabulary=sample)
    slots = make_slots(batch, 7, 4.0)
    hidden = losses.block_hidden(model, batch)
    logits = (model.base_logits(hidden) + model.markov_bias(slots.previous.flatten(0, 1), hidden))[..., sample.ids]
    ce = F.cross_entropy(logits.flatten(0, 1), sample.place[labels], reduction="none")
    torch.testing.assert_close(terms.ce, (slots.weights.flatten() * ce).sum().detach(), atol=1e-4, rtol=1e-5)


def test_a_sample_too_small_for_its_labels_is_refused():
    with pytest.raises(ValueError, match="vocabulary size 4 cannot hold 6"):
        Vocabulary.sample(torch.arange(3), torch.tensor([7, 8, 9]), 4, 20)


def test_parts_of_a_batch_add_up():
    """Micro-batches with a common denominator give the loss and the gradient of the whole."""
    model, batch, _, weights = load_case("qwen3_vanilla")
    whole = draft_losses(model, batch, weights)
    whole.total.backward()
    gradient = model.norm.weight.grad.clone()
    model.zero_grad()
    denominator = whole.weight + losses.EPSILON
    total = torch.zeros(())
    for row in range(2):
        part = Batch(*(tensor[row : row + 1] for tensor in batch))
        loss = draft_losses(model, part, weights, denominator=denominator).total
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.total.detach())
    torch.testing.assert_close(model.norm.weight.grad, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_dummy_anchors_do_not_count(name):
    """Blocks that are not kept change neither the terms nor the gradients, even where their tokens are supervised."""
    model, batch, _, weights = load_case(name)
    batch = batch._replace(loss_mask=torch.ones_like(batch.loss_mask))
    groups = len(batch.anchors)
    added = batch._replace(
        anchors=torch.cat([batch.anchors, torch.zeros(groups, 3, dtype=torch.int64)], dim=1),
        keep=torch.cat([batch.keep, torch.zeros(groups, 3, dtype=torch.bool)], dim=1),
    )
    seen = []
    for given in (batch, added):
        model.zero_grad()
        terms = draft_losses(model, given, weights)
        terms.total.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        seen.append((terms.ce, terms.l1, terms.confidence, terms.weight, terms.total.detach(), torch.cat(gradients)))
    for with_dummies, without in zip(*seen, strict=True):
        torch.testing.assert_close(with_dummies, without, atol=1e-6, rtol=1e-5)


def test_acceptance_is_never_below_zero():
    """bfloat16 probabilities may sum to more than 1, so that an L1 exceeds 2."""
    model, batch, _, weights = load_case("qwen3_vanilla")
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data.bfloat16()
        sure = torch.zeros(97)
        sure[5] = 1e4
        model.markov_head.markov_w2.weight.copy_(sure[:, None])  # the drafter is certain of one token
    rounded = losses.target_probabilities(model, batch.final, model.lm_head.weight)
    assert float((rounded.float().sum(-1) - rounded[..., 5].float()).max()) > 1
    accept = draft_losses(model, batch, weights).accept
    assert float(accept.min()) == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ce", -1.0), ("l1", float("nan")), ("soft", "a"), ("confidence", float("inf"))),
        *(("gamma", "x"), ("gamma", float("nan")), ("gamma", float("inf")), ("gamma", True)),
    ],
)
def test_bad_weights_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}; use a finite"):
        LossWeights(**{name: value})


def test_no_loss_at_all_is_refused():
    with pytest.raises(ValueError, match="all loss weights are 0"):
        LossWeights(ce=0, l1=0, soft=0, confidence=0)
