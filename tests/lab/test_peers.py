"""The comparison with other engines: same weights for all, right counts and times, a word for what is absent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hspark.config import SamplingParams
from hspark.lab import llama as llama_module
from hspark.lab.arms import plain_copy
from hspark.lab.bench import weight_bytes
from hspark.lab.gguf_copy import float_copy, write_float_copy
from hspark.lab.llama import CountedLookup, LlamaArm, missing_llama
from hspark.lab.peers import Peers, PeersReport, check_assistant, peer_settings, run_peers
from hspark.lab.peers_text import render_peers
from hspark.lab.runs import BenchPrompt
from hspark.lab.startup import StartUp
from hspark.models import LoadedTarget
from hspark.policy import LinearCost
from tests.lab.fake_llama import Clock, FakeLlama, counter, install_fake_llama
from tests.tiny import VOCAB, plain_logits, tiny_llama

COST = LinearCost(1.0, 0.05)
CPU = torch.device("cpu")


# -- weights for llama.cpp ---------------------------------------------------------------------------------------------


METADATA: dict[str, tuple[Any, Any, Any]] = {
    "general.name": ("tiny", gguf.GGUFValueType.STRING, None),
    "llama.context_length": (64, gguf.GGUFValueType.UINT32, None),
    "llama.rope.freq_base": (10000.0, gguf.GGUFValueType.FLOAT32, None),
    "tokenizer.ggml.add_bos_token": (False, gguf.GGUFValueType.BOOL, None),
    "tokenizer.ggml.tokens": (["a", "ü", "<eos>"], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING),
    "tokenizer.ggml.token_type": ([1, 1, 3], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32),
}


def write_packed(path: Path) -> dict[str, np.ndarray]:
    """A small .gguf file with a 4-bit matrix and a float vector; returns what they unpack to."""
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(6, 64)).astype(np.float32)
    vector = generator.normal(size=64).astype(np.float32)
    packed = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_quantization_version(2)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    for name, (value, kind, item) in METADATA.items():
        writer.add_key_value(name, value, kind, sub_type=item)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unpacked = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    return {"blk.0.attn_q.weight": unpacked, "output_norm.weight": vector}


@pytest.mark.parametrize(
    ("dtype", "name", "file_type"),
    [(torch.bfloat16, "BF16", "MOSTLY_BF16"), (torch.float16, "F16", "MOSTLY_F16"), (torch.float32, "F32", "ALL_F32")],
)
def test_float_copy_holds_the_values_that_a_model_would(
    tmp_path: Path, dtype: torch.dtype, name: str, file_type: str
) -> None:
    unpacked = write_packed(tmp_path / "packed.gguf")
    write_float_copy(tmp_path / "packed.gguf", tmp_path / "float.gguf", dtype)
    reader = gguf.GGUFReader(tmp_path / "float.gguf")
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == {
        "blk.0.attn_q.weight": name,
        "output_norm.weight": "F32",
    }
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = torch.tensor(unpacked[tensor.name]).to(dtype).float()
        assert torch.equal(torch.tensor(values), expected)
    for key, (value, _, _) in METADATA.items():
        field = reader.get_field(key)
        assert field is not None
        assert field.contents() == value
    stated = reader.get_field("general.file_type")
    assert stated is not None
    assert stated.contents() == gguf.LlamaFileType[file_type]


def test_float_copy_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSPARK_CACHE", str(tmp_path / "cache"))
    write_packed(tmp_path / "packed.gguf")
    first = float_copy(tmp_path / "packed.gguf", torch.bfloat16)
    made = first.stat()
    assert float_copy(tmp_path / "packed.gguf", torch.bfloat16) == first
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert float_copy(tmp_path / "packed.gguf", torch.float16) != first
    assert len(list((tmp_path / "cache" / "converted").iterdir())) == 2
    with pytest.raises(ValueError, match=r"dtype='torch.float64' has no GGUF form; use bfloat16"):
        float_copy(tmp_path / "packed.gguf", torch.float64)


# -- llama.cpp as an arm -----------------------------------------------------------------------------------------------


def test_llama_arm_books_prompt_and_decoding_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(llama_module.time, "perf_counter", clock)
    fake = FakeLlama(counter, clock)
    run = LlamaArm(fake, (8,)).run([[1, 2, 3], [0] * 6], [SamplingParams(max_new_tokens=4)] * 2)
    assert run.token_ids == [[3, 4, 5, 6], [6, 7, 8]]  # the second ends at 8
    assert run.prefill_seconds == pytest.approx(2.0)
    assert run.seconds == pytest.approx(2.0 + 0.3 + 0.2)
    assert (run.decode_tokens, run.forwards, fake.resets) == (5, 5, 2)
    on = LlamaArm(fake, (8,)).run([[0] * 6], [SamplingParams(max_new_tokens=4, ignore_eos=True)])
    assert on.token_ids == [[6, 7, 8, 9]]
    with pytest.raises(ValueError, match=r"temperature=1\.0: llama.cpp is measured greedily"):
        LlamaArm(fake, ()).run([[1]], [SamplingParams(temperature=1.0)])


def test_llama_arm_counts_the_forwards_of_its_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(llama_module.time, "perf_counter", clock)
    lookup = CountedLookup(lambda text: text)
    run = LlamaArm(FakeLlama(counter, clock, lookup), (), lookup).run(
        [[1], [1]], [SamplingParams(max_new_tokens=5)] * 2
    )
    assert run.token_ids == [[1, 2, 3, 4, 5]] * 2
    assert (run.decode_tokens, run.forwards) == (8, 4)
    assert run.seconds - run.prefill_seconds == pytest.approx(0.4)


def test_llama_is_opened_with_the_same_threads_and_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = install_fake_llama(monkeypatch, counter)
    assert missing_llama() is None
    for dtype, kind in (("float32", 0), ("bfloat16", 1)):
        LlamaArm.open(tmp_path / "f.gguf", 128, dtype, 3, (2,), on_cpu=True, lookup=dtype == "float32")
        options = opened[-1].options
        assert options["n_ctx"] == 128 + 11  # its lookup drafts past the end
        assert options["logits_all"] == (dtype == "float32")
        assert (options["type_k"], options["type_v"], options["n_gpu_layers"]) == (kind, kind, 0)
        assert options["n_threads"] == options["n_threads_batch"] == 3
    assert [fake.draft is None for fake in opened] == [False, True]
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "llama-cpp-python is not installed" in str(missing_llama())


# -- the comparison ----------------------------------------------------------------------------------------------------


def prompts() -> list[BenchPrompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        BenchPrompt(f"p{i}", "edit", torch.randint(0, VOCAB, (6 + i,), generator=generator).tolist()) for i in range(3)
    ]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PeersReport:
    """Every kind of arm; llama.cpp is played by the target itself."""
    model = tiny_llama()
    reference = plain_copy(model)
    install_fake_llama(monkeypatch, lambda text: int(plain_logits(reference, torch.tensor(text))[-1].argmax()))
    peers = Peers(plain_copy(tiny_llama()), "tiny", tmp_path / "f.gguf", {"another": "nobody has it"})
    settings = peer_settings(max_new_tokens=12, cost=COST)
    starts = {
        "vanilla": StartUp(2.0, 1.5, 3_000_000),
        "ngram_only": StartUp(error="status 1: x"),
    }
    target = LoadedTarget("tiny", model, None, (), None)
    return run_peers(target, prompts(), settings, peers, workload="w", starts=starts, bandwidth=1e6)


def test_all_engines_emit_the_same_text_and_are_set_beside_transformers(report: PeersReport) -> None:
    names = ["transformers", "transformers-lookup", "vanilla", "ngram_only"]
    names += ["transformers-assistant", "llama.cpp", "llama.cpp-lookup"]
    assert [row.arm.name for row in report.rows] == names
    assert [(row.arm.compared, row.arm.different) for row in report.rows] == [(3, 0)] * 7
    base = report.rows[0].arm
    assert (base.speedup.value, base.decode_speedup.low, base.decode_speedup.high) == (1.0, 1.0, 1.0)
    for row in report.rows:
        arm = row.arm
        assert arm.prefill_tokens_per_second == pytest.approx((6 + 7 + 8) / arm.prefill_seconds)
        assert arm.speedup.value == pytest.approx(arm.tokens_per_second / base.tokens_per_second)
        assert arm.forward_seconds is not None
        assert row.over_floor == pytest.approx(arm.forward_seconds / row.floor_seconds)
    forwards = {arm: [run["forwards"] for run in runs[0]] for arm, runs in report.bench.batches[0].runs["runs"].items()}
    assert forwards["transformers"] == forwards["llama.cpp"] == [11] * 3
    assert forwards["vanilla"] == [12] * 3
    assert forwards["llama.cpp-lookup"] == [6] * 3
    assert max(forwards["transformers-assistant"]) < 11  # the target itself assists, so drafts are accepted


def test_the_floor_counts_weights_and_mean_context(report: PeersReport) -> None:
    model = tiny_llama()
    untied = sum(each.numel() * 4 for each in model.parameters()) - VOCAB * 32 * 4
    assert report.bench.header["weight_bytes"] == weight_bytes(model) == untied
    per_token = 3 * 2 * (8 + 8) * 4  # layers, heads of keys and values, their sizes, bytes
    assert report.bench.header["kv_bytes_per_token"] == per_token
    for row in report.rows:
        assert row.mean_context == pytest.approx(7 + 12 / 2)
        assert row.floor_seconds == pytest.approx((untied + per_token * 13) / 1e6)
    tied = tiny_llama(tie_word_embeddings=True)
    assert weight_bytes(tied) == sum(each.numel() * 4 for each in tied.parameters())


def test_peers_report_for_people_and_programs(report: PeersReport) -> None:
    text = render_peers(report)
    assert "left out  another: nobody has it" in text
    assert "no start-up figures of ngram_only: status 1: x" in text
    assert "kB of keys and values per token of context, at 0.0 GB/s of measured copy bandwidth" in text
    lines = [line for line in text.splitlines() if line.startswith("vanilla ")]
    assert len(lines) == 2
    assert "identical" in lines[0]
    assert lines[1].split()[-4:] == ["2.0", "1.5", "3", "-"]
    assert "texts: no difference from vanilla's first run" in text
    record = json.loads(json.dumps(report.to_dict()))
    assert record["peers"]["vanilla"]["start"]["loading_seconds"] == 1.5
    assert record["batches"][0]["baseline"] == "transformers"
    assert record["missing"] == {"another": "nobody has it"}


def test_an_assistant_of_another_vocabulary_is_refused() -> None:
    target, other = (LoadedTarget(n, tiny_llama(vocab_size=v), None, (), None) for n, v in (("t", 48), ("a", 50)))
    check_assistant(target, target)
    with pytest.raises(ValueError, match="assistant='a' has 50 token ids and the target 't' has 48"):
        check_assistant(other, target)
