"""Nothing in a step reads the device: the whole step runs on the meta device, where there is nothing to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hspark.drafters import NgramDrafter
from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.drafters.dspark import DSparkDrafter
from hspark.policy import AcceptanceEstimator, policy
from hspark.rows import new_rows
from hspark.sampling import SamplingMode
from hspark.step import DecodeStep, Shape
from hspark.target import CausalTarget
from hspark.verify import verifier
from tests.drafters.dspark_cases import random_model, tiny_config
from tests.tiny import FAMILIES, VOCAB, tiny_llama, tiny_qwen3

META = torch.device("meta")
ROWS, LENGTH = 3, 64
MODES = {
    "greedy": SamplingMode(),
    "sampled": SamplingMode(sampled=True),
    "everything": SamplingMode(sampled=True, filters=True, penalties=True, bias=True),
}


def dspark(model: Any, drafting: str = "greedy") -> DSparkDrafter:
    """A random DSpark drafter for a tiny target."""
    sizes = model.config.get_text_config()
    config = tiny_config(
        hidden_size=sizes.hidden_size,
        vocab_size=VOCAB,
        mask_token_id=VOCAB - 1,
        num_target_layers=sizes.num_hidden_layers,
    )
    return DSparkDrafter(random_model(config).to(META), drafting=drafting)


def run_step(model: Any, drafter: Any, rule: str, check: str, mode: SamplingMode) -> Any:
    """One step of a batch on the meta device; returns its outcome."""
    target = CausalTarget(model.to(META), ROWS, LENGTH)
    step = DecodeStep(
        target, policy(rule), verifier(check), drafter, NgramDrafter(AcceptanceEstimator.preset("qwen3-4b"))
    )
    for part in step.drafters:
        part.bind(target.info("tiny"), ROWS, LENGTH)
    target.set_taps(tuple(tap for part in step.drafters for tap in part.taps))
    rows = new_rows(ROWS, LENGTH, META)
    if mode.bias:
        rows = rows._replace(sampling=rows.sampling._replace(bias=torch.zeros(ROWS, VOCAB, device=META)))
    speculate = torch.ones(ROWS, dtype=torch.bool, device=META)
    chain = step.propose(rows, speculate, torch.zeros((), device=META), mode)
    kept = step.allocate(chain, torch.zeros((), dtype=torch.int64, device=META))
    return step.verify(rows, chain, kept, mode, Shape(ROWS * (step.width + 1), step.width + 1, LENGTH), logprobs=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", ["coupled", "rejection"])
@pytest.mark.parametrize("rule", ["proposed", "ngram_first", "extension", "model_only", "ngram_only", "vanilla"])
def test_a_step_reads_nothing(rule: str, check: str, mode: str) -> None:
    model = tiny_llama()
    with torch.inference_mode():
        outcome = run_step(model, dspark(model, "probabilistic"), rule, check, MODES[mode])
    assert outcome.tokens.device == META
    assert outcome.tokens.shape[0] == ROWS


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model = FAMILIES[family]().bfloat16()  # the grouped products of experts have no other type on this device
    with torch.inference_mode():
        assert run_step(model, dspark(model), "proposed", "coupled", MODES["sampled"]).count.is_meta


def test_a_draft_model() -> None:
    with torch.inference_mode():
        drafter = CausalLMDrafter(tiny_qwen3(1).to(META), length=3)
        assert run_step(tiny_llama(), drafter, "proposed", "coupled", MODES["sampled"]).count.is_meta


def test_a_host_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one look at a tensor's value inside the step."""
    plain = DecodeStep.allocate

    def looking(self: DecodeStep, chain: Any, budget: torch.Tensor) -> torch.Tensor:
        assert int(budget) >= 0
        return plain(self, chain, budget)

    monkeypatch.setattr(DecodeStep, "allocate", looking)
    with pytest.raises(RuntimeError, match="meta"):
        run_step(tiny_llama(), None, "ngram_only", "coupled", MODES["greedy"])
