"""Exported drafters: the package's own reader takes them, and their reports say what they should."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hspark.drafters.checkpoint import open_checkpoint
from hspark.drafters.confidence import Calibration
from hspark.drafters.dspark_model import SharedContext
from hspark.drafters.limits import DraftLimits
from hspark.train.evaluate import acceptance_length, greedy_runs
from hspark.train.export import calibrate, export_drafter, measure
from hspark.train.setup import drafter_config, new_drafter
from tests.tiny import VOCAB, tiny_llama
from tests.train.runs import TAPS, tiny_store


@pytest.fixture
def drafter():
    target = tiny_llama()
    config = drafter_config(target.config, mask_token_id=VOCAB - 1, layers=2, taps=TAPS, markov_rank=4, block_size=3)
    model: Any = new_drafter(config, target)
    with torch.no_grad():
        torch.nn.init.normal_(model.confidence_head.proj.weight)
    return model.eval()


@pytest.mark.parametrize("tables", [False, True])
def test_the_reader_takes_what_was_written(tmp_path, drafter, tables):
    calibration = Calibration(temperatures=(1.5, 2.0, 0.5))
    export_drafter(drafter, tmp_path, dtype=torch.float32, tables=tables, calibration=calibration)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "deepspec"
    assert checkpoint.config == drafter.config
    assert checkpoint.calibration == calibration
    loaded = checkpoint.load()
    expected = {
        k: v for k, v in drafter.state_dict().items() if tables or not k.startswith(("embed_tokens", "lm_head"))
    }
    assert set(dict(loaded.state_dict())) == set(expected)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_nothing_is_left_of_the_drafter_that_was_there(tmp_path, drafter):
    """Its calibration, its limits, and an index of shards, which a reader takes before model.safetensors."""
    export_drafter(drafter, tmp_path, calibration=Calibration(temperatures=(9.0,), biases=(-3.0,)))
    DraftLimits(length=1).save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    placed = dict.fromkeys(drafter.state_dict(), "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "README.md").touch()
    with torch.no_grad():
        drafter.norm.weight.fill_(7.0)
    export_drafter(drafter, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.calibration == Calibration()
    assert checkpoint.limits == DraftLimits()
    assert torch.equal(checkpoint.load().norm.weight, torch.full((32,), 7.0, dtype=torch.bfloat16))
    assert (tmp_path / "README.md").exists()


def test_layout_is_what_the_reference_loader_reads(tmp_path, drafter):
    export_drafter(drafter, tmp_path, tables=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    for key in ("target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank"):
        assert key in config
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == "bfloat16"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert {"embed_tokens.weight", "lm_head.weight", "fc.weight", "confidence_head.proj.bias"} <= set(names)
        assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in names)


def test_a_type_that_cannot_be_stored_is_refused(tmp_path, drafter):
    with pytest.raises(ValueError, match=r"torch\.int8"):
        export_drafter(drafter, tmp_path / "x", dtype=torch.int8)
    assert not (tmp_path / "x").exists()


def test_runs_are_what_drafting_gives(tmp_path, drafter):
    """The teacher-forced comparison against drafts made one block at a time by the network's own steps."""
    store = tiny_store(tmp_path)
    runs = greedy_runs(drafter, store, [0, 2], 5)
    batch = store.batch([0, 2], 5, None)
    place = 0
    for row in range(2):
        n = store.length((0, 2)[row])
        for anchor in batch.anchors[row].tolist():
            features = drafter.context_features(batch.taps[row : row + 1, :anchor].float())
            drafted = draft_alone(drafter, features, batch.tokens[row, anchor], anchor)
            alive = True
            for slot, token in enumerate(drafted):
                inside = anchor + slot + 1 < n
                alive = alive and inside and token == int(batch.tokens[row, anchor + slot + 1])
                assert bool(runs.hits[place, slot]) == alive
                assert bool(runs.inside[place, slot]) == inside
            assert int(runs.sequence[place]) == row
            place += 1
    assert place == len(runs.hits) == 10


def draft_alone(model: Any, features, token, anchor):
    layers = model.keys_values(features, torch.arange(anchor)[None])
    context = SharedContext(model.config, layers, torch.tensor([[anchor]]))
    tokens, positions = model.block_inputs(token[None], torch.tensor([anchor]))
    hidden = model.block_hidden(tokens, positions, context)[0]
    drafted, previous = [], token
    for slot in range(model.config.block_size):
        bias = model.markov_head.markov_w2(model.markov_head.markov_w1(previous))
        previous = (model.base_logits(hidden[slot]) + bias).argmax()
        drafted.append(int(previous))
    return drafted


def test_reports_agree_with_each_other(tmp_path, drafter):
    store = tiny_store(tmp_path)
    items = [(0, i) for i in range(len(store))]
    report = measure(drafter, [store], items, anchors=6, batch_size=3)
    lengths = acceptance_length(drafter, [store], items, anchors=6, batch_size=5)
    assert report.acceptance_length["all"] == lengths["all"]
    assert report.by_position[0] == lengths["first"]
    assert report.anchors == 6 * sum(store.temperatures[i] == 0 for i in range(len(store)))
    assert sum(count for *_, count in report.reliability) <= report.anchors * 3
    json.dumps(report.to_dict())


def test_calibration_lowers_the_error(tmp_path, drafter):
    store = tiny_store(tmp_path, count=24)
    items = [(0, i) for i in range(len(store))]
    calibration = calibrate(drafter, [store], items)
    assert len(calibration.temperatures) == 3
    before, after = (measure(drafter, [store], items, c) for c in (None, calibration))
    assert after.ece < before.ece


def test_invented_prompts_calibrate_only_where_there_are_no_others(tmp_path, drafter):
    store = tiny_store(tmp_path, count=24)
    halves = [[(0, i) for i in range(start, len(store), 2)] for start in (0, 1)]

    def fitted(items):
        return torch.tensor(calibrate(drafter, [store], items, batch_size=1).biases)

    written, others, everything = fitted(halves[0]), fitted(halves[1]), fitted(halves[0] + halves[1])
    assert min(float((a - everything).abs().max()) for a in (written, others)) > 1e-3
    for _, i in halves[1]:
        store.task_ids[i] = f"invented/{i}"
    torch.testing.assert_close(fitted(halves[0] + halves[1]), written)
    torch.testing.assert_close(fitted(halves[1]), others)


def test_nothing_greedy_to_measure_on(tmp_path, drafter):
    store = tiny_store(tmp_path)
    with pytest.raises(ValueError, match="none of the outputs is greedy"):
        measure(drafter, [store], [(0, 3)])
    assert acceptance_length(drafter, [store], [(0, 3)]) == {}
