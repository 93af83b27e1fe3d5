"""Anchors and slots: laws that hold for every loss mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspark.train.blocks import Batch, anchor_candidates, decay, make_slots, sample_anchors, spaced_anchors

MASKS = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3).map(torch.tensor)


def batch_of(mask, anchors, keep):
    tokens = torch.arange(mask.numel()).view(mask.shape)
    nothing = torch.zeros(*mask.shape, 1)
    return Batch(tokens, mask, nothing, nothing, anchors, keep)


@given(MASKS, st.integers(1, 6), st.integers(0, 5))
def test_anchors_are_distinct_candidates_in_order(mask, count, seed):
    anchors, keep = sample_anchors(mask, count, torch.Generator().manual_seed(seed))
    candidates = anchor_candidates(mask)
    for row in range(len(mask)):
        chosen = anchors[row, keep[row]]
        assert len(chosen) == min(count, int(candidates[row].sum()))
        assert bool(candidates[row, chosen].all())
        assert torch.equal(chosen, chosen.unique())
        assert not bool(anchors[row, ~keep[row]].any())


@given(MASKS, st.integers(1, 6), st.integers(0, 5))
def test_the_same_generator_gives_the_same_anchors(mask, count, seed):
    first = sample_anchors(mask, count, torch.Generator().manual_seed(seed))
    again = sample_anchors(mask, count, torch.Generator().manual_seed(seed))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@given(MASKS, st.integers(1, 6), st.integers(1, 7))
def test_slots_stop_at_the_first_unsupervised_label(mask, count, block):
    anchors, keep = spaced_anchors(mask, count)
    batch = batch_of(mask, anchors, keep)
    slots = make_slots(batch, block, 4.0)
    length = mask.shape[1]
    for row in range(len(mask)):
        for m in range(count):
            alive = bool(keep[row, m])
            for k in range(block):
                place = int(anchors[row, m]) + k + 1
                alive = alive and place < length and bool(mask[row, place])
                assert bool(slots.mask[row, m, k]) == alive
                if alive:
                    assert int(slots.labels[row, m, k]) == int(batch.tokens[row, place])
                    assert int(slots.previous[row, m, k]) == int(batch.tokens[row, place - 1])
                    assert int(slots.position[row, m, k]) == place - 1
    assert torch.equal(slots.weights > 0, slots.mask)


def test_decay():
    torch.testing.assert_close(decay(3, 4.0), torch.tensor([1.0, 0.7788, 0.6065]), atol=1e-4, rtol=0)
    assert torch.equal(decay(3, None), torch.ones(3))
    assert torch.equal(decay(3, 0.0), torch.ones(3))


def test_no_anchors_is_refused():
    with pytest.raises(ValueError, match="count=0"):
        sample_anchors(torch.ones(1, 4, dtype=torch.bool), 0)


def test_spaced_anchors_reach_both_ends():
    anchors, keep = spaced_anchors(torch.tensor([[False, *[True] * 9]]), 3)
    assert anchors.tolist() == [[1, 4, 8]]
    assert bool(keep.all())
