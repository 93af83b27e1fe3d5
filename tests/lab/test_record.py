"""Recording: the chains and verdicts of a real engine at every position, resuming, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hspark.drafters.causal_lm import CausalLMDrafter
from hspark.drafters.dspark import DSparkDrafter
from hspark.lab.outputs import RecordedOutput
from hspark.lab.record import greedy_outputs, record
from hspark.lab.replay import replay_ngram
from hspark.lab.table import NO_LIMIT, RecordTable
from tests.circle import speculator
from tests.drafters.test_dspark_end_to_end import KINDS
from tests.fixtures import serve
from tests.lab.pairs import ESTIMATOR, Seen, dspark, engine, jobs, ngram, recorded, target_model, watch
from tests.tiny import tiny_llama


def made(directory: Path, family: str = "qwen3", count: int = 3, **options: Any) -> RecordTable:
    outputs = options.pop("outputs", None) or recorded(family, count)
    model = copy.deepcopy(target_model(family))
    return record(
        outputs, directory, **{"ngram": ngram(), "model": model, "drafter": dspark(family), "blocks": 5, **options}
    )


def leading(draft: list[int], truth: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(draft), len(truth)) and draft[count] == truth[count]:
        count += 1
    return count


def check_chains(table: RecordTable, seen: list[Seen], source: str, chain: Any) -> None:
    """Every chain that an engine proposed is in the table, with the length that the output accepts."""
    texts = [(*output.prompt_token_ids, *output.output_token_ids) for output in table.recorded()]
    visited = set()
    for text, tokens, acceptance in seen:
        owner = next(m for m, whole in enumerate(texts) if whole[: len(text)] == text)
        at = int(table.start[owner]) + len(text) - int(table.prompt_length[owner])
        visited.add(at)
        length = int(getattr(table, f"{source}_length")[at])
        assert getattr(table, f"{source}_tokens")[at, :length].tolist() == tokens
        torch.testing.assert_close(chain.acceptance[at, :length], acceptance, atol=1e-5, rtol=1e-4)
        assert getattr(table, f"{source}_accepted")[at] == leading(tokens, texts[owner][len(text) :])
        assert table.token[at] == texts[owner][len(text)]
    assert visited == set(range(table.positions))


@pytest.mark.parametrize("family", KINDS)
def test_every_chain_is_the_one_that_the_engine_proposes(family: str, tmp_path: Path) -> None:
    table = made(tmp_path, family)
    free = lambda n, a, m: ESTIMATOR(n + 4, a, m)  # noqa: E731
    decoding = engine(family, rows=2, budget=0)
    model_seen: list[Seen] = []
    free_seen: list[Seen] = []
    watch(decoding.device_step.model_drafter, model_seen)
    watch(decoding.device_step.free_drafter, free_seen)
    serve(decoding, jobs(3))
    check_chains(table, model_seen, "model", table.model_chain())
    check_chains(table, free_seen, "free", table.free_chain(free))
    assert table.free_accepted.max() > 0
    assert table.model_width == dspark(family).width
    assert table.model_length.min() == table.model_width


def test_sampled_drafts_are_those_of_the_recorded_seed(tmp_path: Path) -> None:
    outputs = recorded("qwen3", 3, temperature=0.8)
    seeds = [params.seed for _, params in jobs(3)]
    drafter = DSparkDrafter(dspark("qwen3").source, drafting="probabilistic")
    table = made(tmp_path, outputs=outputs, drafter=drafter, seeds=seeds)
    decoding = engine("qwen3", rows=2, budget=0, drafting="probabilistic")
    seen: list[Seen] = []
    watch(decoding.device_step.model_drafter, seen)
    serve(decoding, jobs(3, temperature=0.8))
    check_chains(table, seen, "model", table.model_chain())
    with pytest.raises(ValueError, match="seeds has none for output 0"):
        made(tmp_path / "other", outputs=outputs, drafter=drafter)


@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_results_do_not_depend_on_how_the_work_is_cut(blocks: int, tmp_path: Path) -> None:
    whole, cut = made(tmp_path / "a"), made(tmp_path / "b", blocks=blocks, chunk=4, shard_positions=1)
    assert len(list((tmp_path / "b").glob("outputs-*.npz"))) == 3
    check_equal(whole, cut, exact=False)


def check_equal(one: RecordTable, other: RecordTable, exact: bool = True) -> None:
    for field in dataclasses.fields(RecordTable):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if field.name == "model_acceptance" and not exact:
            np.testing.assert_allclose(left, right, atol=1e-5)
        else:
            np.testing.assert_equal(left, right)


def test_a_run_that_was_cut_short_goes_on_to_the_same_table(tmp_path: Path) -> None:
    outputs = recorded("qwen3", 3)
    whole = made(tmp_path / "whole", outputs=outputs)
    seen: list[int] = []

    def die(tokens: int) -> None:
        seen.append(tokens)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "cut", outputs=outputs, shard_positions=1, progress=die)
    partial = tmp_path / "cut" / "outputs-00000002-00000003.partial"
    partial.write_bytes(b"half a shard")
    assert RecordTable.load(tmp_path / "cut").outputs == 2
    told: list[int] = []
    resumed = made(tmp_path / "cut", outputs=outputs, progress=told.append)
    check_equal(whole, resumed)
    assert told == [sum(len(out.output_token_ids) for out in outputs[:2]), len(outputs[2].output_token_ids)]
    check_equal(whole, made(tmp_path / "cut", outputs=outputs))


def test_the_model_free_part_is_that_of_replay(tmp_path: Path) -> None:
    outputs = recorded("llama", 3)
    table = record(outputs, tmp_path, ngram=ngram())
    replay = replay_ngram(outputs, ngram())
    matched = table.free_length > 0
    assert table.model_width == 0
    assert table.positions == replay.visited
    for ours, theirs in (("match_length", "match_length"), ("agreement", "agreement"), ("copy_length", "copy_length"),
                         ("free_length", "drafted"), ("free_accepted", "accepted")):  # fmt: skip
        np.testing.assert_array_equal(getattr(table, ours)[matched], getattr(replay, theirs))
    np.testing.assert_array_equal(table.graded("free")[matched], replay.graded)
    np.testing.assert_array_equal(table.output[matched], replay.output)
    np.testing.assert_array_equal(table.position[matched], replay.position)
    assert table.model_chain().length.sum() == 0


def test_parts_and_copies_of_a_table(tmp_path: Path) -> None:
    table = made(tmp_path / "a")
    part = table.select([2, 0, 2])
    assert part.recorded() == [table.recorded()[m] for m in (2, 0, 2)]
    np.testing.assert_array_equal(part.model_tokens[: part.start[1]], table.model_tokens[table.start[2] :])
    part.save(tmp_path / "b")
    loaded = RecordTable.load(tmp_path / "b")
    check_equal(part, loaded)
    assert (table.remaining[table.start[:-1]] == table.output_length).all()


def test_limits(tmp_path: Path) -> None:
    outputs = [RecordedOutput((1, 2), (3, 4, 5)), RecordedOutput((1, 2), (3, 9)), RecordedOutput((1,), ())]
    assert record(outputs, tmp_path / "a", stop_token_ids=[9]).limit.tolist() == [3, NO_LIMIT, 0]
    table = record(outputs, tmp_path / "b", max_new_tokens=8)
    assert table.limit.tolist() == [8, 8, 8]
    assert table.output_length.tolist() == [3, 2, 0]
    assert np.isnan(table.temperature).all()
    assert table.seed.tolist() == [-1, -1, -1]


def test_greedy_outputs_are_what_the_target_answers() -> None:
    model = speculator(max_batch_size=2)
    prompts = [[1, 2, 3], [4, 5]]
    outputs = greedy_outputs(model, prompts, max_new_tokens=6, task_ids=["a", "b"])
    assert [out.task_id for out in outputs] == ["a", "b"]
    assert [list(out.prompt_token_ids) for out in outputs] == prompts
    assert all(len(out.output_token_ids) == 6 and out.temperature == 0.0 for out in outputs)
    with pytest.raises(ValueError, match="task_ids has 1 entries for 2 prompts"):
        greedy_outputs(model, prompts, task_ids=["a"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": []}, "outputs is empty"),
        ({"blocks": 0}, "blocks=0 is not usable"),
        ({"chunk": True}, "chunk=True is not usable"),
        ({"shard_positions": 0}, "shard_positions=0 is not usable"),
        ({"model": None}, "model=None, but the other is given"),
        ({"max_new_tokens": 3}, "max_new_tokens=3 does not fit output 0"),
        ({"max_new_tokens": [99]}, "max_new_tokens has 1 entries for 3 outputs"),
        ({"seeds": [1]}, "seeds has 1 entries for 3 outputs"),
        ({"seeds": [-1, 0, 0]}, r"seeds\[0\]=-1 is not usable"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": target_model("qwen3"), "drafter": dspark("qwen3"), **options}
    outputs = settings.pop("outputs", recorded("qwen3", 3))
    with pytest.raises(ValueError, match=message):
        record(outputs, tmp_path, **settings)
    assert not list(tmp_path.glob("*.npz"))


def test_other_drafters_and_long_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a DSparkDrafter"):
        record(recorded("qwen3", 1), tmp_path, model=target_model("llama"), drafter=CausalLMDrafter(tiny_llama()))
    with pytest.raises(ValueError, match="has the token id 5000, and the target knows"):
        record([RecordedOutput((1,), (5000,))], tmp_path, model=target_model("qwen3"), drafter=dspark("qwen3"))
    with pytest.raises(ValueError, match="a text of 601 tokens, and the target knows 512 positions"):
        record([RecordedOutput((1,), (2,) * 600)], tmp_path, model=target_model("qwen3"), drafter=dspark("qwen3"))


def test_a_directory_of_another_table_is_refused(tmp_path: Path) -> None:
    outputs = recorded("qwen3", 3)
    record(outputs, tmp_path, ngram=ngram())
    with pytest.raises(ValueError, match="holds a table made with ngram="):
        record(outputs, tmp_path)
    with pytest.raises(ValueError, match="output 0 is not the one given"):
        record(outputs[1:], tmp_path, ngram=ngram())
    with pytest.raises(ValueError, match="holds 3 outputs, and output 2 is not"):
        record(outputs[:2], tmp_path, ngram=ngram())
    with pytest.raises(ValueError, match="holds a table already"):
        RecordTable.load(tmp_path).save(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no record table"):
        RecordTable.load(tmp_path)
    record(recorded("qwen3", 3), tmp_path, shard_positions=1)
    shards = sorted(tmp_path.glob("*.npz"))
    whole = shards[0].read_bytes()
    shards[0].write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"outputs-00000000-00000001\.npz' cannot be read"):
        RecordTable.load(tmp_path)
    shards[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"outputs-00000000-00000001\.npz' cannot be read"):
        RecordTable.load(tmp_path)
    shards[0].write_bytes(whole)
    shards[1].unlink()
    with pytest.raises(ValueError, match="lacks outputs 1 to 1"):
        RecordTable.load(tmp_path)
    info = json.loads((tmp_path / "info.json").read_text())
    (tmp_path / "info.json").write_text(json.dumps({**info, "version": 99}))
    with pytest.raises(ValueError, match="is not of kind"):
        RecordTable.load(tmp_path)


def test_wrong_widths_and_numbers_are_refused(tmp_path: Path) -> None:
    table = record(recorded("qwen3", 1), tmp_path)
    with pytest.raises(ValueError, match=r"estimator gave shape"):
        table.free_chain(lambda n, a, m: torch.zeros(len(n), 3))
    with pytest.raises(ValueError, match=r"acceptance has shape \(2, 2\)"):
        table.model_chain(np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"outputs=\[1\] is out of range; use numbers from 0 to 0"):
        table.select([1])
    with pytest.raises(ValueError, match="source='both' is unknown"):
        table.graded("both")
