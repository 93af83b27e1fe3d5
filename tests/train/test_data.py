"""Feature stores: what they hold is what the target computes, and interrupted work goes on."""

import pytest
import torch

from hspark.lab.outputs import RecordedOutput
from hspark.train.data import FeatureStore, group_of, is_held_out
from tests.tiny import tiny_cohere2_moe, tiny_llama
from tests.train.runs import TAPS, tiny_outputs, tiny_store


@torch.inference_mode()
def test_states_are_the_targets_own(tmp_path):
    target = tiny_llama()
    store = tiny_store(tmp_path, target)
    assert bool(store.done.all())
    for i in (0, 5, 11):
        tokens = store.tokens[store.offsets[i] : store.offsets[i + 1]].long()
        states = target(input_ids=tokens[None], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1).bfloat16()
        span = slice(store.offsets[i], store.offsets[i + 1])
        torch.testing.assert_close(store.taps[span], expected, atol=0.02, rtol=0.02)
        torch.testing.assert_close(store.final[span], states[-1][0].bfloat16(), atol=0.02, rtol=0.02)


def test_interrupted_work_goes_on(tmp_path):
    outputs = tiny_outputs()
    store = FeatureStore.create(tmp_path, outputs, [o.task_id for o in outputs], TAPS, 32)

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.fill(tiny_llama(), max_tokens=100, progress=stop)
    finished = int(store.done.sum())
    assert 0 < finished < len(store)
    again = FeatureStore.create(tmp_path, outputs, [o.task_id for o in outputs], TAPS, 32)
    seen = []
    again.fill(tiny_llama(), max_tokens=100, progress=lambda done, total: seen.append(total))
    assert bool(again.done.all())
    assert seen[0] == sum(again.length(i) for i in range(len(again))) - sum(
        sorted(again.length(i) for i in range(len(again)))[:finished]
    )


def test_batches_are_padded_and_supervise_outputs_only(tmp_path):
    store = tiny_store(tmp_path)
    batch = store.batch([0, 3], 4, torch.Generator().manual_seed(0))
    for row, i in enumerate((0, 3)):
        n, prompt = store.length(i), store.prompt_lengths[i]
        assert batch.loss_mask[row].tolist() == [prompt <= j < n for j in range(batch.tokens.shape[1])]
        assert torch.equal(batch.tokens[row, :n], store.tokens[store.offsets[i] : store.offsets[i + 1]].long())
        assert not bool(batch.taps[row, n:].any())
    assert bool(batch.keep.all())


def test_prompts_are_supervised_if_asked_for(tmp_path):
    store = tiny_store(tmp_path)
    batch = store.batch([0, 3], 30, torch.Generator().manual_seed(0), prompts=True)
    assert torch.equal(batch.loss_mask.sum(1), torch.tensor([store.length(0), store.length(3)]))
    assert batch.anchors[0, 0] == 0
    assert bool((batch.anchors[:, 1] < min(store.prompt_lengths[0], store.prompt_lengths[3])).all())


@torch.inference_mode()
def test_logits_that_the_target_scales(tmp_path):
    """The head alone gives the target's logits from what is stored, also where the target multiplies them."""
    target = tiny_cohere2_moe()
    assert target.config.logit_scale == 0.5
    store = tiny_store(tmp_path, target)
    tokens = store.tokens[: store.offsets[1]].long()
    logits = target(input_ids=tokens[None], use_cache=False).logits[0]
    ours = store.final[: store.offsets[1]].float() @ target.get_output_embeddings().weight.T
    torch.testing.assert_close(ours, logits, atol=0.03, rtol=0.03)


def test_short_outputs_are_left_out(tmp_path):
    outputs = [*tiny_outputs(3), RecordedOutput((1, 2), (3,) * 13, 0.0, "short")]
    store = FeatureStore.create(tmp_path, outputs, [o.task_id for o in outputs], TAPS, 32)
    assert len(store) == 3
    with pytest.raises(ValueError, match="14 tokens or more"):
        FeatureStore.create(tmp_path / "b", outputs[3:], ["short"], TAPS, 32)


def test_a_store_of_other_outputs_is_not_overwritten(tmp_path):
    tiny_store(tmp_path)
    with pytest.raises(ValueError, match="other outputs"):
        tiny_store(tmp_path, seed=1)


def test_a_folder_without_a_store(tmp_path):
    with pytest.raises(ValueError, match=r"no index\.json"):
        FeatureStore(tmp_path)


def test_groups_keep_variants_together():
    code = "Explain this.\n```python\ndef f():\n    pass\n```"
    assert group_of("edit/1", code) == group_of("ask/2", code.replace("Explain", "Translate"))
    assert group_of("chat/3-1", "a") == group_of("chat/3-2", "b")
    assert group_of("gsm8k/1", "a") != group_of("gsm8k/2", "a")
    assert group_of("", "one") != group_of("", "two")


def test_the_held_out_share():
    held = sum(is_held_out(f"group {i}", 0.1) for i in range(4000))
    assert 320 < held < 480  # 400 expected, four standard deviations are 76
    assert not any(is_held_out(f"group {i}", 0.0) for i in range(100))
