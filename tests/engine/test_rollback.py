"""Rejected drafts leave nothing behind: positions, keys and values, sliding windows, and what a failing part costs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hspark.config import SamplingParams
from hspark.target import CausalTarget
from hspark.verify import pack
from tests.fixtures import PatternDrafter, ScriptedTarget, always, build_engine, never, serve
from tests.plain import model_law, plain_decode, random_law
from tests.tiny import FAMILIES, VOCAB, plain_logits, tiny_llama

V = 16
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])
# Beyond twice the sliding window of 8, so that windows wrap while drafts come and go.
TOKENS = 60
PROMPTS = ((5, 1, 30, 2), tuple(range(20, 33)))


def mixed(place: int, slot: int) -> bool:
    """Right, right, wrong, and so on: some blocks accepted whole, some in part, some not at all."""
    return (place * 5 + slot * slot) % 7 not in (2, 3)


@functools.cache
def reference(family: str) -> tuple[Any, dict[tuple[int, ...], list[int]]]:
    """A tiny model, and what plain decoding without a cache makes of PROMPTS."""
    model = FAMILIES[family]()
    law = model_law(model)
    return model, {p: plain_decode(law, p, SamplingParams(max_new_tokens=TOKENS)).ids for p in PROMPTS}


def decode(family: str, right: Callable[[int, int], bool], width: int, run_ahead: int = 0, **options: Any) -> list[Any]:
    model, known = reference(family)
    target = CausalTarget(copy.deepcopy(model), 2, 80)
    drafter = PatternDrafter(known, VOCAB, width=width, right=right)
    engine = build_engine(target, free=drafter, budget="all", run_ahead=run_ahead, **options)
    outputs = serve(engine, [(p, SamplingParams(max_new_tokens=TOKENS)) for p in PROMPTS])
    assert [o.token_ids for o in outputs] == list(known.values())
    return outputs


@pytest.mark.parametrize("width", range(1, 8))
def test_sliding_window_with_blocks_of_every_width(width: int) -> None:
    """All layers have a window of 8; drafts of 1..7 tokens, all right and mixed, past the window."""
    outputs = decode("mistral", always, width)
    assert [o.metrics.steps for o in outputs] == [-(-TOKENS // (width + 1))] * 2
    decode("mistral", mixed, width, run_ahead=width % 2)


@RUN_AHEAD
@pytest.mark.parametrize("right", [never, mixed])
@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_in_every_family(family: str, right: Callable[[int, int], bool], run_ahead: int) -> None:
    """Windows, mixed layers, shared keys and values, experts: 60 tokens among always wrong and mixed drafts."""
    outputs = decode(family, right, 7, run_ahead)
    if right is never:
        assert [o.metrics.steps for o in outputs] == [TOKENS] * 2
        assert [o.metrics.drafters["ngram"].accepted for o in outputs] == [0, 0]


@RUN_AHEAD
def test_always_wrong_drafts_cost_no_extra_forwards(run_ahead: int) -> None:
    """50 steps for 50 tokens, each verifying the same number of slots to the end."""
    law = random_law(V)
    known = {(1, 2): plain_decode(law, (1, 2), SamplingParams(max_new_tokens=80)).ids}
    target = ScriptedTarget(law, V, rows=1)
    engine = build_engine(target, free=PatternDrafter(known, V, right=never), budget="all", run_ahead=run_ahead)
    (output,) = serve(engine, [((1, 2), SamplingParams(max_new_tokens=50))], limit=60)
    assert output.token_ids == known[1, 2][:50]
    assert output.metrics.steps == len(output.token_ids) == 50
    sizes = [sum(call.valid) for call in target.calls[:50]]
    assert sizes == [8] * 43 + [7, 6, 5, 4, 3, 2, 1]


def test_positions_are_those_of_the_tokens() -> None:
    """A block starts at the position of its newest token, whatever was rejected before."""
    law = random_law(V, seed=4)
    known = {p: plain_decode(law, p, SamplingParams(max_new_tokens=30)).ids for p in ((1, 2, 3), (4,))}
    target = ScriptedTarget(law, V, rows=2)
    engine = build_engine(target, free=PatternDrafter(known, V, right=mixed), budget="all")
    outputs = serve(engine, [(p, SamplingParams(max_new_tokens=30)) for p in known])
    texts = [list(p) + o.token_ids for p, o in zip(known, outputs, strict=True)]
    assert target.prefilled == [(0, 0, [1, 2])]
    starts: list[list[int]] = [[], []]
    for call in target.calls:
        for row in (0, 1):
            block = [(p, t) for t, p, r, ok in zip(*call, strict=True) if r == row and ok]
            if block:
                assert [p for p, _ in block] == list(range(block[0][0], block[0][0] + len(block)))
                assert block[0][1] == texts[row][block[0][0]], "a block does not start with the newest token"
                starts[row].append(block[0][0])
    for row, prompt in enumerate(known):
        assert starts[row][0] == len(prompt) - 1
        assert starts[row] == sorted(set(starts[row])), "a position was the newest twice"


@RUN_AHEAD
def test_prompts_of_different_lengths_need_no_padding(run_ahead: int) -> None:
    """The same prompt alone, and beside one that is ten times as long."""
    model = reference("qwen3")[0]
    law = model_law(model)
    short, long = (3, 1, 4), tuple(i % 40 for i in range(31))
    params = SamplingParams(max_new_tokens=16)
    for batch in ([short], [long, short], [short, long]):
        engine = build_engine(CausalTarget(copy.deepcopy(model), 2, 64), budget="all", run_ahead=run_ahead)
        outputs = serve(engine, [(p, params) for p in batch])
        assert [o.token_ids for o in outputs] == [plain_decode(law, p, params).ids for p in batch]


@RUN_AHEAD
@pytest.mark.parametrize("source", [1, 2], ids=["model drafter", "model-free drafter"])
def test_a_drafter_that_fails_costs_only_its_drafts(source: int, run_ahead: int) -> None:
    """It raises at step 3 and from 6 to 8: a warning, a counter, the same text, and drafts again afterwards."""
    law = random_law(V, seed=5)
    known = {p: plain_decode(law, p, SamplingParams(max_new_tokens=40)).ids for p in ((1, 2, 3), (4,))}
    drafter = PatternDrafter(known, V, width=3, fails=lambda call: call in (3, 6, 7, 8), source=source)
    name = "model_only" if source == 1 else "ngram_only"
    parts: dict[str, Any] = {"model": drafter} if source == 1 else {"free": drafter}
    engine = build_engine(ScriptedTarget(law, V), name, budget="all", run_ahead=run_ahead, **parts)
    with pytest.warns(
        UserWarning, match=r"drafting failed and the step went on without drafts: RuntimeError"
    ) as caught:
        outputs = serve(engine, [(p, SamplingParams(max_new_tokens=40)) for p in known])
    assert len(caught) == 1
    assert [o.token_ids for o in outputs] == list(known.values())
    assert [o.finish_reason for o in outputs] == ["length"] * 2
    assert engine.draft_failures == 4
    assert outputs[0].metrics.steps == 4 + 9  # 4 without drafts, 36 tokens in fours


class Observer(PatternDrafter):
    """Also reads hidden states, and remembers what it saw at every (row, position)."""

    def __init__(self, *args: Any, taps: tuple[int, ...] = (0, 2), fails_at: int = -1, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[Any, Any] = {}
        self.taps, self.fails_at, self.observed = taps, fails_at, 0

    def observe(self, features: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        self.observed += 1
        if self.observed == self.fails_at:
            raise RuntimeError("this observer was told to fail")
        assert features.shape == (row.shape[0], 2 * len(self.taps))
        for feature, r, p in zip(features.tolist(), row.tolist(), position.tolist(), strict=True):
            self.seen[r, p] = feature


@RUN_AHEAD
@pytest.mark.parametrize("prefill_tokens", [1, 3, 100])
def test_observers_see_the_right_token_at_every_position(prefill_tokens: int, run_ahead: int) -> None:
    """Prompt chunks and blocks alike; a rejected draft is observed again with the token that replaced it."""
    law = random_law(V, seed=6)
    known = {p: plain_decode(law, p, SamplingParams(max_new_tokens=30)).ids for p in (tuple(range(9)), (4, 4))}
    drafter = Observer(known, V, right=mixed, source=1)
    target = ScriptedTarget(law, V, rows=2)
    engine = build_engine(
        target, "model_only", model=drafter, budget="all", prefill_tokens=prefill_tokens, run_ahead=run_ahead
    )
    outputs = serve(engine, [(p, SamplingParams(max_new_tokens=30)) for p in known])
    for row, (prompt, output) in enumerate(zip(known, outputs, strict=True)):
        text = [*prompt, *output.token_ids]
        for position, token in enumerate(text[:-1]):
            assert drafter.seen[row, position] == [token, position] * 2


def test_each_drafter_sees_its_own_layers() -> None:
    """Two drafters with taps of their own: neither gets the other's."""
    model = reference("llama")[0]
    target = CausalTarget(copy.deepcopy(model), 1, 64)
    prompt = PROMPTS[1]

    class Keeper(Observer):
        def observe(self, features: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
            self.seen.update(zip(position.tolist(), features.clone(), strict=True))

    first, second = Keeper({}, VOCAB, taps=(-1, 1), source=1), Keeper({}, VOCAB, taps=(2,))
    engine = build_engine(target, "proposed", model=first, free=second)
    serve(engine, [(prompt, SamplingParams(max_new_tokens=1))])
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True).hidden_states
    last = len(prompt) - 1
    torch.testing.assert_close(
        first.seen[last], torch.cat([states[0][0, last], states[2][0, last]]), rtol=1e-4, atol=1e-5
    )
    assert second.seen[last].shape == (model.config.hidden_size,)


@RUN_AHEAD
def test_an_observer_that_fails_costs_only_its_drafts(run_ahead: int) -> None:
    law = random_law(V, seed=6)
    prompt = (1, 2, 3, 4)
    known = {prompt: plain_decode(law, prompt, SamplingParams(max_new_tokens=30)).ids}
    for fails_at in (1, 2, 5):
        drafter = Observer(known, V, right=mixed, source=1, fails_at=fails_at)
        engine = build_engine(ScriptedTarget(law, V), "model_only", model=drafter, budget="all", run_ahead=run_ahead)
        with pytest.warns(UserWarning, match="drafting failed .* told to fail"):
            (output,) = serve(engine, [(prompt, SamplingParams(max_new_tokens=30))])
        assert output.token_ids == known[prompt]
        assert engine.draft_failures == 1


def test_a_target_that_fails_leaves_a_usable_engine() -> None:
    """An error inside the target is the caller's to see; what was queued can be cancelled, and new requests run."""
    law = random_law(V, seed=7)
    target = ScriptedTarget(law, V, rows=2)
    engine = build_engine(target, budget="all")
    first = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=20))
    for _ in range(3):
        engine.step()
    target.law = lambda prefix: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    target.law = law
    engine.cancel(first)
    assert first.finish_reason == "cancelled"
    (output,) = serve(engine, [((1, 2, 3), SamplingParams(max_new_tokens=20))])
    assert output.token_ids == plain_decode(law, (1, 2, 3), SamplingParams(max_new_tokens=20)).ids
    assert output.token_ids[: len(first.token_ids)] == first.token_ids


# -- numerics --------------------------------------------------------------------------------------------------------


def block_logits(model: Any, text: torch.Tensor, block: int) -> torch.Tensor:
    """Logits [T, V] after every token of `text` [T], read in blocks of `block` tokens through the static buffers."""
    target = CausalTarget(copy.deepcopy(model), 1, 64)
    found = []
    for start in range(0, text.shape[0], block):
        count = min(block, text.shape[0] - start)
        kept = torch.tensor([count - 1])
        layout = pack(kept, torch.tensor([True]), block, count)
        plan = target.plan(
            layout.row, layout.offset, layout.valid, layout.index[:, :count], torch.tensor([start]), start + count
        )
        with torch.inference_mode():
            found.append(target.forward(text[start : start + count], start + torch.arange(count), plan)[0])
    return torch.cat(found)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_block_widths_change_logits_only_by_rounding(dtype: torch.dtype, bound: float) -> None:
    """The same positions in blocks of 1 and of 8: the largest difference, relative to the largest logit.

    In bfloat16 it is large enough to flip a near-tie, which is why exact equality of text is promised for float32 and
    float64 only.
    """
    model = tiny_llama(num_hidden_layers=2).to(dtype)
    text = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    single, blocks = block_logits(model, text, 1), block_logits(model, text, 8)
    difference = float((single - blocks).abs().max() / single.abs().max())
    assert difference <= bound, f"blocks of 1 and 8 differ by {difference:.2e} of the largest logit in {dtype}"
    plain = plain_logits(model, text)
    assert float((single - plain).abs().max() / plain.abs().max()) <= bound


def test_bfloat16_follows_plain_decoding_up_to_near_ties() -> None:
    """Every token is the argmax of the plain model on its own prefix, or within rounding of it."""
    model = tiny_llama(num_hidden_layers=2).to(torch.bfloat16)
    law = model_law(model)
    known = {p: plain_decode(law, p, SamplingParams(max_new_tokens=40)).ids for p in PROMPTS}
    target = CausalTarget(copy.deepcopy(model), 2, 80)
    engine = build_engine(target, free=PatternDrafter(known, VOCAB, right=mixed), budget="all")
    for output in serve(engine, [(p, SamplingParams(max_new_tokens=40)) for p in PROMPTS]):
        for place, token in enumerate(output.token_ids):
            logits = law((*output.prompt_token_ids, *output.token_ids[:place])).float()
            assert logits.max() - logits[token] <= 0.1 * logits.abs().max()
