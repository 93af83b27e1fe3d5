"""Sampling parameters under speculation: every verified position is processed from its own prefix, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hspark.config import SamplingParams
from tests.fixtures import PatternDrafter, ScriptedTarget, build_engine, serve
from tests.plain import Law, TailLaw, plain_decode, random_law

V = 16
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])
PROMPTS = [(1, 2, 3), (5, 5, 5, 5), (9, 8, 9, 8, 9, 8, 9)]


def against_plain(
    law: Law, params: SamplingParams, *, run_ahead: int = 0, right: Any = lambda p, s: True
) -> list[list[int]]:
    """Serves PROMPTS with a drafter that knows the plain outputs, checks equality, and returns the outputs."""
    known = {p: plain_decode(law, p, params).ids for p in PROMPTS}
    drafter = PatternDrafter(known, V, right=right)
    target = ScriptedTarget(law, V, rows=3, max_length=128)
    engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead)
    outputs = [output.token_ids for output in serve(engine, [(p, params) for p in PROMPTS])]
    assert outputs == list(known.values())
    return outputs


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 1.1},
    {"frequency_penalty": -0.6},
    {"presence_penalty": 1.3},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
]


@RUN_AHEAD
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_count_the_drafts_before_each_position(
    penalties: dict[str, Any], temperature: float, run_ahead: int
) -> None:
    """With all drafts right, and with every third one wrong, 30 tokens equal plain decoding."""
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5, **penalties)
    law = random_law(V, seed=1, order=1)
    outputs = against_plain(law, params, run_ahead=run_ahead)
    against_plain(law, params, run_ahead=run_ahead, right=lambda place, slot: (place + slot) % 3 != 1)
    without = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5)
    assert outputs != [plain_decode(law, p, without).ids for p in PROMPTS], "these penalties change nothing here"


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_parameters_equal_plain_decoding(data: st.DataObject) -> None:
    """Any mix of parameters, each row with its own, drafts right or wrong by a drawn pattern."""
    law = random_law(V, seed=data.draw(st.integers(0, 3)), order=2)
    every = [data.draw(any_params()) for _ in PROMPTS]
    known = {p: plain_decode(law, p, own).ids for p, own in zip(PROMPTS, every, strict=True)}
    period = data.draw(st.integers(2, 6))
    drafter = PatternDrafter(known, V, right=lambda place, slot: (3 * place + slot) % period != 0)
    target = ScriptedTarget(law, V, rows=data.draw(st.integers(1, 3)))
    engine = build_engine(target, free=drafter, budget="all", run_ahead=data.draw(st.integers(0, 1)))
    outputs = serve(engine, list(zip(PROMPTS, every, strict=True)))
    assert [o.token_ids for o in outputs] == list(known.values())


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    bias = st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.0, 2.0, 6.0]), max_size=3)
    return SamplingParams(
        max_new_tokens=draw(st.integers(1, 20)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 40])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.4, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.6, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
        logit_bias=draw(st.one_of(st.none(), bias)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


def test_a_banned_token_never_appears_though_it_is_always_drafted() -> None:
    """Bias -100 on the favourite token, and min_p = 0.2: 20,000 sampled tokens without it or any filtered token."""
    banned = 7
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
    table[:, banned] = 6.0

    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=400, temperature=1.0, min_p=0.2, logit_bias={banned: -100.0}, seed=seed)

    prompts = [(i % V, (i // V) % V, 3) for i in range(50)]
    drafter = PatternDrafter({p: [banned] * 400 for p in prompts}, V, width=2)
    target = ScriptedTarget(TailLaw(1, lambda tail: table[tail[0]]), V, rows=50, max_length=404)
    engine = build_engine(target, free=drafter, budget="all")
    outputs = serve(engine, [(p, params(i)) for i, p in enumerate(prompts)], watch=False)
    assert sum(len(o.token_ids) for o in outputs) == 20_000
    assert sum(o.metrics.drafters["ngram"].verified for o in outputs) > 20_000
    weights = table.clone()
    weights[:, banned] -= 100
    allowed = weights.softmax(dim=1) >= 0.2 * weights.softmax(dim=1).amax(dim=1, keepdim=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        text = torch.tensor([prompt[-1], *output.token_ids])
        assert bool(allowed[text[:-1], text[1:]].all())
        assert banned not in output.token_ids


@RUN_AHEAD
def test_a_forced_token_is_forced_at_every_position(run_ahead: int) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=1, logit_bias={4: 100.0})
    assert against_plain(random_law(V), params, run_ahead=run_ahead) == [[4] * 12] * 3


@RUN_AHEAD
def test_rows_with_and_without_bias_share_a_batch(run_ahead: int) -> None:
    """A row's bias is its own, and does not outlive it."""
    law = random_law(V, seed=4)
    plain, biased = SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, logit_bias={2: 50.0})
    expected = plain_decode(law, (1, 2, 3), plain).ids
    engine = build_engine(ScriptedTarget(law, V, rows=2), budget="all", run_ahead=run_ahead)
    first = serve(engine, [((1, 2, 3), plain), ((1, 2, 3), biased)])
    second = serve(engine, [((1, 2, 3), plain)] * 4)
    assert [o.token_ids for o in first] == [expected, [2] * 20]
    assert [o.token_ids for o in second] == [expected] * 4


@RUN_AHEAD
def test_greedy_rows_among_sampled_ones(run_ahead: int) -> None:
    """Temperatures 0, 1, 0 and 0.7 in one batch; 1e-6 is greedy as well, everywhere."""
    law = random_law(V, seed=9)
    known = {}
    jobs = []
    for i, temperature in enumerate([0.0, 1.0, 0.0, 0.7, 1e-6]):
        prompt = (i, 3, i)
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=i)
        greedy = SamplingParams(max_new_tokens=24)
        known[prompt] = plain_decode(law, prompt, greedy if temperature < 1e-5 else params).ids
        jobs.append((prompt, params))
    drafter = PatternDrafter(known, V, right=lambda place, slot: place % 5 != 4)
    engine = build_engine(ScriptedTarget(law, V, rows=5), free=drafter, budget="all", run_ahead=run_ahead)
    assert [o.token_ids for o in serve(engine, jobs)] == list(known.values())


@pytest.mark.parametrize(
    "unknown", ["grammar", "n", "num_return_sequences", "logits_processor", "best_of", "guided_json"]
)
def test_what_is_not_offered_is_refused_by_name(unknown: str) -> None:
    """Grammars, hooks and several outputs per request: a clear error that lists what there is."""
    with pytest.raises(
        ValueError, match=rf"{unknown}=3 is not a parameter; use max_new_tokens, temperature, .*speculate"
    ):
        SamplingParams(**{unknown: 3})  # type: ignore[arg-type]


BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_k", 2**70),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("max_new_tokens", 0),
    ("max_new_tokens", -3),
    ("max_new_tokens", 2.5),
    ("max_new_tokens", None),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 1e-50),
    ("presence_penalty", float("nan")),
    ("frequency_penalty", "much"),
    ("logit_bias", {3: float("nan")}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", [(3, 1.0)]),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [3]),
    ("stop", 3),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", 3),
    ("stop_token_ids", b"ab"),
    ("stop_token_ids", None),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("ignore_eos", 1),
    ("logprobs", 5),
    ("speculate", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*; use "):
        SamplingParams(**{name: value})


def test_edges_of_the_ranges_are_accepted() -> None:
    SamplingParams(top_p=1.0, min_p=1.0, top_k=0, temperature=0.0, seed=2**63 - 1, max_new_tokens=1)
    SamplingParams(top_p=1e-9, stop="x", stop_token_ids=(0,), logit_bias={0: -100})


def test_numbers_of_numpy_and_none_for_no_stop_are_taken() -> None:
    given = SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), seed=np.int64(3), stop=None)  # type: ignore[arg-type]
    assert given == SamplingParams(top_k=5, temperature=0.5, seed=3)
    assert [type(value) for value in (given.top_k, given.temperature, given.seed)] == [int, float, int]
