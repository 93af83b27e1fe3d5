"""The packed forward on static buffers gives the plain model's logits, whatever came before in the buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import MambaConfig, MambaForCausalLM

from hspark.target import CausalTarget, UnsupportedModelError
from hspark.verify.layout import pack
from tests.tiny import FAMILIES, VOCAB, plain_logits, tiny_llama

LENGTH = 64
# Grouped matrix multiplication of the experts has no float64 kernel; every other family is also held to float64.
PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-9)]


def make(
    family: str, rows: int = 3, taps: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> tuple[CausalTarget, Any]:
    plain = FAMILIES[family]().to(dtype)
    return CausalTarget(copy.deepcopy(plain), rows, LENGTH, taps), plain


def verify_step(
    target: CausalTarget,
    text: torch.Tensor,
    anchor: torch.Tensor,
    drafts: torch.Tensor,
    kept: torch.Tensor,
    span: tuple[int, int] | None = None,
):
    """One verification with anchors at `anchor` and draft tokens; returns logits by row and offset.

    With a span there are no more slots than rows fill, as where the host sizes a step exactly.
    """
    running = anchor >= 0
    anchor = anchor.clamp(min=0)
    size = int((kept[running] + 1).sum()) + (2 if span is None else 0)
    layout = pack(kept, running, drafts.shape[1], size)
    full = span is not None and bool(running[slice(*span)].all()) and len(set(kept[slice(*span)].tolist())) == 1
    index = layout.index if span is None else layout.index[:, : int(kept[running].max()) + 1]
    plan = target.plan(*layout[:3], index, anchor, LENGTH, full=full, span=span)
    inputs = torch.cat([text.gather(1, anchor[:, None]), drafts], dim=1)
    tokens = inputs[layout.row, layout.offset]
    with torch.inference_mode():
        logits, features = target.forward(tokens, (anchor[layout.row] + layout.offset).clamp(max=LENGTH - 1), plan)
    return logits, features, layout


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_interleaving_equals_plain_model(family: str, data: st.DataObject) -> None:
    """Chunks of prompt, accepted and rejected drafts in any order: the last logits are those of the final tokens."""
    rows = 3
    dtype, tolerance = data.draw(st.sampled_from(PRECISIONS[:1] if family == "cohere2_moe" else PRECISIONS))
    target, plain = make(family, rows, dtype=dtype)
    exact = copy.deepcopy(plain).double() if dtype == torch.float32 and family != "cohere2_moe" else None
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)
    length = data.draw(st.lists(st.integers(1, 20), min_size=rows, max_size=rows))
    for row in range(rows):
        start = 0
        while start < length[row] - 1:
            count = data.draw(st.integers(1, length[row] - 1 - start))
            target.prefill(text[row, start : start + count], row, start)
            start += count
    for _ in range(data.draw(st.integers(1, 5))):
        kept = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows)))
        good = [data.draw(st.integers(0, int(k))) for k in kept]
        drafts = torch.randint(0, VOCAB, (rows, 6), generator=generator)
        for row in range(rows):  # the first `good` drafts are the text itself: accepted; the others are wrong
            drafts[row, : good[row]] = text[row, length[row] : length[row] + good[row]]
        anchor = torch.tensor(length) - 1
        logits, _, layout = verify_step(target, text, anchor, drafts, kept)
        for row in range(rows):
            final = text[row, : length[row] + good[row]]
            expected, rounding = plain_logits(plain, final), torch.tensor(0.0)
            if exact is not None:
                rounding = (plain_logits(exact, final) - expected).abs().max().float()
            for offset in range(good[row] + 1):
                got = logits[layout.index[row, offset]]
                want = expected[length[row] - 1 + offset]
                # Relative to the largest logit, or to how far the plain model's own rounding takes it from float64: one
                # draw itself, of which 5 times as much was seen. Mistakes show in float64.
                allowed = torch.maximum(tolerance * want.abs().max().clamp(min=1.0), 16 * rounding)
                assert (got - want).abs().max() <= allowed
            length[row] += good[row] + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_named_layers(family: str) -> None:
    """Tap i is the raw output of decoder layer i, -1 the embedding output, in prompt chunks and verification alike."""
    target, plain = make(family, rows=2, taps=(-1, 0, 1))
    text = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = plain(input_ids=text[:1, :14], use_cache=False, output_hidden_states=True).hidden_states  # type: ignore[operator]
    expected = torch.cat([states[0][0], states[1][0], states[2][0]], dim=-1)
    first = target.prefill(text[0, :5], 0, 0)
    second = target.prefill(text[0, 5:9], 0, 5)
    drafts = text[:, 10:14]
    _, features, layout = verify_step(target, text, torch.tensor([9, -1]), drafts, torch.tensor([4, 0]))
    assert first is not None
    assert second is not None
    assert features is not None
    got = torch.cat([first, second, features[layout.index[0, :5]]])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_run_are_untouched() -> None:
    target, _ = make("llama", rows=2)
    before = [store.clone() for store in target.buffers.keys]
    text = torch.randint(0, VOCAB, (2, LENGTH))
    verify_step(target, text, torch.tensor([0, -1]), text[:, :3], torch.tensor([2, 0]))
    for old, new in zip(before, target.buffers.keys, strict=True):
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [[0, 3, 1, 2, 0], [0, 2, 2, 2, 0], [0, 2, 0, 1, 0]])
def test_idle_rows_around_the_span_take_no_part(family: str, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = make(family, rows=5)
    text = torch.randint(0, VOCAB, (5, LENGTH))
    anchor = torch.tensor([-1, 4, -1 if kept[2] == 0 else 2, 6, -1])
    for row in (1, 2, 3):
        target.prefill(text[row, :6], row, 0)
    args = (text, anchor, text[:, 8:11], torch.tensor(kept))
    whole, _, layout = verify_step(target, *args)
    attended = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        attended.append(query.shape[0])
        return attention(query, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    part, _, packed = verify_step(target, *args, span=(1, 4))
    assert set(attended) == {3}
    for row in (row for row in (1, 2, 3) if anchor[row] >= 0):
        for offset in range(kept[row] + 1):
            torch.testing.assert_close(
                part[packed.index[row, offset]], whole[layout.index[row, offset]], atol=1e-5, rtol=1e-5
            )


def test_window_hides_older_keys() -> None:
    """A key outside the window of every layer has no weight: changing it changes nothing."""
    target, _ = make("mistral", rows=1)
    text = torch.randint(0, VOCAB, (1, LENGTH))
    target.prefill(text[0, :30], 0, 0)
    args = (text, torch.tensor([30]), text[:, 31:35], torch.tensor([3]))
    before, _, _ = verify_step(target, *args)
    for store in (*target.buffers.keys, *target.buffers.values):
        store[0, :23] = 1e3
    after, _, _ = verify_step(target, *args)
    assert torch.equal(before[:4], after[:4])


def test_stateful_model_is_refused_by_name() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM keeps state that cannot be rolled back"):
        CausalTarget(model, 1, 8)


def test_unknown_tap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"taps=\(7,\) holds 7; use layer numbers from -1 to 2"):
        CausalTarget(tiny_llama(), 1, 8, taps=(7,))
