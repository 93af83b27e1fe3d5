"""The loop: it learns, it resumes exactly, and its settings are checked."""

import json
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hspark.train.config import TrainConfig
from hspark.train.evaluate import acceptance_length
from hspark.train.losses import LossWeights
from hspark.train.setup import bigram_markov, drafter_config, new_drafter
from hspark.train.trainer import Trainer
from tests.tiny import VOCAB, tiny_llama
from tests.train.runs import TAPS, tiny_store

RECIPE = {
    "steps": 6,
    "optimizer": "adamw",
    "sequences": 4,
    "micro_batch": 2,
    "anchors": 6,
    "warmup": 2,
    "vocabulary": 40,
    "common": 4,
    "weights": LossWeights(ce=1.0, l1=0.1, soft=0.5, confidence=0.1),
    "held_out": 0.3,
    "ema": 0.9,
}


def trainer_of(folder, store, **changes):
    target = tiny_llama()
    config = drafter_config(target.config, mask_token_id=VOCAB - 1, layers=1, taps=TAPS, markov_rank=4, block_size=3)
    model = new_drafter(config, target, samples=store.taps[:50])
    recipe = TrainConfig(**{**RECIPE, **changes})
    return Trainer(model, [store], folder, recipe, Accelerator(mixed_precision="no", cpu=True))


def state_of(trainer):
    return {**trainer.model.state_dict(), **{f"averaged {k}": v for k, v in trainer.averaged.items()}}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, optimizer):
    store = tiny_store(tmp_path / "store")
    options = {"optimizer": optimizer, "schedule": "cosine", "block_schedule": ((0, 2), (4, 3))}
    whole = trainer_of(tmp_path / "whole", store, **options)
    whole.train()
    first = trainer_of(tmp_path / "parts", store, **options)
    for _ in range(3):
        first.take_step()
    first.save()
    second = trainer_of(tmp_path / "parts", store, **options)
    assert second.resume()
    assert second.step == 3
    second.train()
    assert (whole.step, whole.anchors_seen) == (second.step, second.anchors_seen)
    for (name, value), other in zip(state_of(whole).items(), state_of(second).values(), strict=True):
        assert torch.equal(value, other), name


def test_another_seed_is_another_run(tmp_path):
    """The control of the test above: equality there is not for want of randomness."""
    store = tiny_store(tmp_path / "store")
    one, other = (trainer_of(tmp_path / str(seed), store, seed=seed) for seed in (0, 1))
    one.take_step()
    other.take_step()
    assert not torch.equal(one.model.fc.weight, other.model.fc.weight)


def test_it_learns_and_logs(tmp_path):
    store = tiny_store(tmp_path / "store", count=24)
    trainer = trainer_of(tmp_path / "run", store, steps=80, lr=0.02, schedule="cosine", vocabulary=0)
    before = acceptance_length(trainer.averaged_model(), [store], trainer.held_items)
    records: list[dict[str, Any]] = []
    last = trainer.train(records.append)
    assert before["all"] < 1.5
    assert last["held_out"]["all"] > 2.0
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert lines == records == [last]
    assert last["anchors"] == trainer.anchors_seen == 80 * 4 * 6


def test_held_out_groups_are_never_trained_on(tmp_path):
    store = tiny_store(tmp_path / "store", count=24)
    trainer = trainer_of(tmp_path / "run", store)
    assert trainer.held_items
    seen = {item for step in range(40) for item in trainer.items_of(step)}
    assert seen == set(trainer.train_items)
    assert not seen & set(trainer.held_items)


def test_every_epoch_visits_every_sequence_once(tmp_path):
    store = tiny_store(tmp_path / "store", count=24)
    trainer = trainer_of(tmp_path / "run", store)
    steps = len(trainer.train_items) // 4
    epoch = [item for step in range(steps) for item in trainer.items_of(step)]
    assert len(epoch) == len(set(epoch)) == steps * 4


def test_a_run_stops_after_its_time(tmp_path):
    store = tiny_store(tmp_path / "store")
    trainer = trainer_of(tmp_path / "run", store, steps=100000, seconds=0.5)
    trainer.train()
    assert 0.5 <= trainer.seconds < 30
    assert (tmp_path / "run" / "checkpoint.pt").exists()


def test_averaged_weights_are_a_running_mean(tmp_path):
    """Over few steps it follows them closely; from step 10 on, here, with its full decay."""
    trainer = trainer_of(tmp_path / "run", tiny_store(tmp_path / "store"), ema=0.5, steps=20)
    expected = {name: value.clone() for name, value in trainer.averaged.items()}
    for step in range(1, 13):
        trainer.take_step()
        decay = min(0.5, step / (step + 10))
        for name, weight in trainer.model.named_parameters():
            if name in expected:
                expected[name] = decay * expected[name] + (1 - decay) * weight.detach()
    exported = dict(trainer.averaged_model().named_parameters())
    for name, value in expected.items():
        torch.testing.assert_close(exported[name].detach(), value)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"warmup": 0}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"warmup": 0, "cooldown": 4}, [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"warmup": 0, "schedule": "cosine"}, [1.0, 0.933, 0.75, 0.5, 0.25, 0.067]),
        ({"warmup": 2, "schedule": "cosine", "cooldown": 2}, [0.5, 0.933, 0.75, 0.5, 0.25, 0.067 / 2]),
    ],
)
def test_the_learning_rate_follows_its_schedule(recipe, expected, tmp_path):
    trainer = trainer_of(tmp_path / "run", tiny_store(tmp_path / "store"), lr=0.1, optimizer="muon", **recipe)
    shares = []
    for _ in range(6):
        trainer.take_step()
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        assert rates[0] / 0.1 == pytest.approx(rates[1] / 3e-3)
        shares.append(rates[0] / 0.1)
    assert shares == pytest.approx(expected, abs=1e-3)


def test_gradients_are_clipped_together(tmp_path):
    trainer = trainer_of(tmp_path / "run", tiny_store(tmp_path / "store"), clip=0.01)
    norms = []

    def look(optimizer, *_):
        gradients = [weight.grad.flatten() for group in optimizer.param_groups for weight in group["params"]]
        norms.append(float(torch.cat(gradients).norm()))

    trainer.optimizers[0].optimizer.register_step_pre_hook(look)
    terms = trainer.take_step()
    assert terms["norm"] > 0.1  # what is logged is the norm before
    assert norms == [pytest.approx(0.01, rel=1e-3)]


def test_logged_losses_are_running_means(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path / "run", tiny_store(tmp_path / "store"), steps=4, log_every=0.0)
    losses = iter([1.0, 0.0, 0.0, 2.0])

    def take_step():
        trainer.step += 1
        return {"ce": next(losses)}

    monkeypatch.setattr(trainer, "take_step", take_step)
    records: list[dict[str, Any]] = []
    trainer.train(records.append)
    assert [record["loss"]["ce"] for record in records] == [1.0, 0.95, 0.9025, 0.9574]


def test_prompts_are_trained_on_if_asked_for(tmp_path):
    store = tiny_store(tmp_path / "store", count=24)
    for prompts in (False, True):
        trainer = trainer_of(tmp_path / "run", store, prompts=prompts)
        [batch] = trainer._batches(trainer.train_items[:4], torch.Generator().manual_seed(0))
        assert bool(batch.loss_mask[:, 0].all()) == prompts


def test_too_few_sequences_are_refused(tmp_path):
    store = tiny_store(tmp_path / "store", count=3)
    with pytest.raises(ValueError, match="fewer than the 4"):
        trainer_of(tmp_path / "run", store)


def test_the_bigram_start_prefers_what_followed(tmp_path):
    store = tiny_store(tmp_path / "store", count=24)
    trainer = trainer_of(tmp_path / "run", store)
    model, tokens = trainer.model, store.tokens.long()
    bigram_markov(model, tokens, smoothing=1.0)
    bias = model.markov_head.markov_w2(model.markov_head.markov_w1(tokens[:-1]))
    followed = bias.gather(1, tokens[1:, None]).mean()
    assert followed > bias.mean() + bias.std()
