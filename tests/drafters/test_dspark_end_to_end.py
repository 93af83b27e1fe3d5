"""The DSpark drafter in the engine, over tiny targets of each family: exact text, true features, honest counts."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hspark.config import SamplingParams
from hspark.core import RequestOutput
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_config import DSparkConfig
from hspark.engine import Engine
from hspark.target import CausalTarget
from tests.drafters.dspark_cases import GREEDY, bound, random_model, rows_of, save_model, target_info
from tests.fixtures import FLAT, MILD, build_engine, serve
from tests.plain import model_law, plain_decode
from tests.tiny import FAMILIES, VOCAB

TOKENS, MAX_LENGTH = 14, 48
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "taps": (0, 1),
    "block_size": 5,
    "mask_token_id": VOCAB - 1,
    "markov_rank": 4,
    "markov_head": "vanilla",
    "confidence_head": True,
    "confidence_with_markov": True,
    "max_positions": 512,
}
# One kind of drafter for each family, as the published pairs have it: (layout, what differs from COMMON).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("deepspec", {"num_target_layers": 3}),
    "gemma4": (
        "deepspec",
        {
            "backbone": "gemma4",
            "key_is_value": True,
            "logit_softcap": 30.0,
            "activation": "gelu_pytorch_tanh",
            "taps": (-1, 1, 3),
            "markov_head": "gated",
        },
    ),
    "llama": ("speculators", {"windows": (6, None), "draft_vocab_size": 30, "markov_head": "rnn",
                              "anchor_first": False}),
    "cohere2_moe": ("speculators", {"markov_rank": 0, "markov_head": "none", "confidence_head": False,
                                    "confidence_with_markov": False, "taps": (0, 2)}),
}  # fmt: skip


@functools.cache
def target_model(family: str) -> Any:
    return FAMILIES[family]()


@functools.cache
def jobs() -> tuple[tuple[tuple[int, ...], SamplingParams], ...]:
    """Eight requests of different lengths, half of them greedy."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(8):
        prompt = torch.randint(0, VOCAB, (3 * number + 1,), generator=generator).tolist()
        temperature = float(number % 2)
        made.append((tuple(prompt), SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=40 + number)))
    return tuple(made)


@functools.cache
def expected(family: str) -> list[list[int]]:
    law = model_law(target_model(family))
    return [plain_decode(law, prompt, params).ids for prompt, params in jobs()]


@functools.cache
def checkpoint(family: str, folder: Path) -> Path:
    layout, changes = KINDS[family]
    return save_model(random_model(DSparkConfig(**{**COMMON, **changes}), seed=len(family)), folder / family, layout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


def run(
    family: str, folder: Path, rows: int, policy: str = "model_only", drafting: str = "greedy", **options: Any
) -> tuple[Engine, DSparkDrafter, list[RequestOutput]]:
    target = CausalTarget(copy.deepcopy(target_model(family)), rows, MAX_LENGTH)
    drafter = DSparkDrafter.from_pretrained(checkpoint(family, folder), drafting=drafting)
    engine = build_engine(target, policy, model=drafter, **options)
    return engine, drafter, serve(engine, list(jobs()))


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("rows", "drafting"), [(1, "greedy"), (8, "greedy"), (3, "probabilistic")])
def test_text_is_that_of_plain_decoding(family: str, drafting: str, rows: int, folder: Path) -> None:
    policy = "proposed" if rows == 3 else "model_only"
    _, drafter, outputs = run(family, folder, rows, policy, drafting, cost=MILD if rows == 8 else FLAT)
    assert [output.token_ids for output in outputs] == expected(family)
    drafted = [output.metrics.drafters["dspark"] for output in outputs]
    assert sum(count.drafted for count in drafted) > 0
    for count in drafted:
        assert count.accepted <= count.verified <= count.drafted
        assert len(count.verified_by_position) <= drafter.width
        assert sum(count.verified_by_position) == count.verified


@torch.inference_mode()
def plain_states(family: str, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """The tapped states [T, N*H] of the untouched model: entry i + 1 of all its hidden states for tap i."""
    states = target_model(family)(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return torch.cat([states.hidden_states[tap + 1][0] for tap in taps], dim=-1)


@pytest.mark.parametrize("family", KINDS)
def test_the_engine_shows_the_drafter_the_targets_own_states(family: str, folder: Path) -> None:
    """After prompt chunks and rejected drafts, a row holds what a drafter holds that saw the committed text at once."""
    engine, drafter, outputs = run(family, folder, 8, budget="all", prefill_tokens=5)
    info = target_info(drafter.config, num_layers=len(engine.target.layers))
    rows = set()
    for output in outputs:
        text = output.prompt_token_ids + output.token_ids
        count = len(text) - 1  # the last token was never an input
        fresh = bound(checkpoint(family, folder), max_length=MAX_LENGTH, target=info)
        features = plain_states(family, text[:-1], drafter.taps)
        fresh.observe(features, torch.zeros(count, dtype=torch.int64), torch.arange(count))
        columns = slice(drafter.scratch, drafter.scratch + count)
        wanted = [t[0, :, columns] for pair in fresh.buffers for t in pair]
        found = [
            row
            for row in range(8)
            if all(
                torch.allclose(t[row, :, columns], own, atol=1e-4)
                for t, own in zip((t for pair in drafter.buffers for t in pair), wanted, strict=True)
            )
        ]
        assert len(found) == 1, f"rows {found} hold the states of a request of {len(text)} tokens"
        rows.add(found[0])
        again = drafter.propose(rows_of([text] * 8, MAX_LENGTH), GREEDY).tokens[found[0]]
        assert again.tolist() == fresh.propose(rows_of([text], MAX_LENGTH), GREEDY).tokens[0].tolist()
    assert len(rows) == 8


def test_a_drafter_with_few_positions_leaves_long_rows_to_the_target(tmp_path: Path) -> None:
    """Past its 16 positions it drafts nothing, the text stays exact, and the short row beside it goes on drafting."""
    config = DSparkConfig(**{**COMMON, "max_positions": 16})
    drafter = DSparkDrafter.from_pretrained(save_model(random_model(config), tmp_path))
    target = CausalTarget(copy.deepcopy(target_model("llama")), 2, 64)
    engine = build_engine(target, "model_only", model=drafter, budget="all")
    requests = [([1, 2, 3], SamplingParams(max_new_tokens=57)), ([4], SamplingParams(max_new_tokens=8))]
    long, short = serve(engine, requests)
    law = model_law(target_model("llama"))
    for output, (prompt, params) in zip((long, short), requests, strict=True):
        assert output.token_ids == plain_decode(law, prompt, params).ids
    # Anchors 2 .. 11 fit a block of 5 into 16 positions: at most 10 steps with drafts, one token or more each.
    assert 0 < long.metrics.drafters["dspark"].drafted <= 10 * drafter.width
    assert long.metrics.steps > 20
    assert short.metrics.drafters["dspark"].drafted > 0
