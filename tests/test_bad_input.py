"""Bad input is refused before any work, with the argument, its value and what would be accepted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hspark.speculator as face
from hspark import HybridSpeculator
from hspark.building import settle
from hspark.config import EngineConfig
from hspark.policy.selection import Proposed
from tests.circle import CIRCLE, params, speculator
from tests.saved_target import save_tiny_target
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, toy_tokenizer

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt is empty"),
    ([[]], "prompt is empty"),
    ([], "prompts is empty"),
    (torch.tensor([], dtype=torch.int64), "prompts is empty"),
    ([1, 2, TOY_VOCAB], rf"prompt holds token id {TOY_VOCAB}; the target's ids are 0 to {TOY_VOCAB - 1}"),
    ([1, -1], r"prompt holds token id -1; the target's ids are 0 to"),
    ([1] * 128, r"prompt has 128 tokens, which leaves no room in max_length=128; use at most 127"),
    ("a" * 500, r"prompt has 500 tokens"),
    ([1, True], "prompt holds True"),
    ([[1.5]], "prompt holds 1.5"),
    ([1.5, 2.5], r"prompt=1\.5 is not usable; use a string, token ids, or a list of chat messages"),
    (torch.tensor([0.5, 1.0]), r"prompt=0\.5 is not usable"),
    (None, "prompts=None is not usable"),
    (7, "prompts=7 is not usable"),
    ({1, 2}, "prompts={1, 2} is not usable"),
    ([1, "a"], "prompt=1 is not usable"),
    ([[1, "a"]], "prompt holds 'a'"),
    ([{"role": "user", "content": "x"}, 3], r"prompt holds {'role'"),
    ([{"content": "x"}], r"use messages with the keys 'role' and 'content'"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[str(i) for i in range(len(BAD_PROMPTS))])
def test_bad_prompts_are_refused_before_any_work(prompt: Any, message: str) -> None:
    """Alone, and as the last of a list whose other prompts are fine: nothing is queued, no step is taken."""
    made = speculator()
    with pytest.raises(ValueError, match=message):
        made.generate(prompt, params(3))
    with pytest.raises(ValueError, match=r"^prompt"):
        made.generate([CIRCLE[:1], prompt], params(3))
    assert not made.engine.has_work
    assert made.engine.step_number == 0


def test_bad_prompts_of_streams_are_refused_at_once() -> None:
    made = speculator()
    for prompt in ("", [1, TOY_VOCAB], [1] * 128, None, [[1]]):
        with pytest.raises(ValueError, match="prompt"):
            made.stream(prompt, params(3))  # type: ignore[arg-type]
    assert not made.engine.has_work


def test_prompts_need_what_they_are_made_of() -> None:
    with pytest.raises(
        ValueError, match=r"prompt is a string, but this target has no tokenizer; use a list of token ids"
    ):
        speculator(tokenizer=None).generate("abc", params(3))
    for tokenizer in (None, toy_tokenizer()):
        with pytest.raises(ValueError, match="this target has no chat template; use a string or token ids"):
            speculator(tokenizer=tokenizer).generate([{"role": "user", "content": "x"}], params(3))
    with pytest.raises(
        ValueError, match=r"stop=\('x',\) needs a tokenizer, and this target has none; use stop_token_ids"
    ):
        speculator(tokenizer=None).generate(CIRCLE[:1], params(3, stop="x"))


def test_text_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"prompt='\\ud800abc' cannot be tokenized: .*; use valid Unicode text"):
        speculator().generate("\ud800abc")
    with pytest.raises(ValueError, match=r"b'abc' is not usable; use a string, token ids"):
        speculator().generate(b"abc", params(3))  # type: ignore[arg-type]


def test_stop_strings_that_the_text_never_holds_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"holds the special token '<eos>'.*use stop_token_ids=\[{TOY_EOS}\]"):
        speculator().generate(CIRCLE[:1], params(5, stop=["x", "a<eos>"]))


def test_end_tokens_are_ids_of_the_vocabulary() -> None:
    for ends in (5, (TOY_VOCAB,), (-5,), ("x",)):
        with pytest.raises(ValueError, match=r"eos_token_ids=.* is not usable; use a tuple of token ids from 0 to"):
            speculator(eos_token_ids=ends)


def test_a_delay_that_the_devices_run_ahead_cannot_serve_is_refused() -> None:
    """Also where nobody gave `run_ahead`: an accelerator's is 1."""
    with pytest.raises(ValueError, match=r"budget_delay=1 needs survivals that run_ahead=1 has not read yet"):
        settle(EngineConfig(budget_delay=1), torch.device("cuda"), has_model=True)
    assert settle(EngineConfig(budget_delay=1), torch.device("cpu"), has_model=True).run_ahead == 0


def test_a_chat_template_that_refuses_is_reported() -> None:
    tokenizer = copy.copy(toy_tokenizer())
    tokenizer.chat_template = "{{ raise_exception('only one message, please') }}"
    with pytest.raises(ValueError, match="does not fit this target's chat template: only one message, please"):
        speculator(tokenizer=tokenizer).generate([{"role": "user", "content": "x"}], params(3))


def test_bad_parameter_lists_are_refused() -> None:
    made = speculator()
    prompts = [CIRCLE[:1], CIRCLE[:2]]
    bad: list[tuple[Any, str]] = [
        ([params()], r"params has 1 entries for 2 prompts; use one, or one for each"),
        ([params(), {"temperature": 1}], r"params holds {'temperature': 1}; use SamplingParams"),
        ({"temperature": 1}, r"params holds {'temperature': 1}; use SamplingParams"),
        ("greedy", "params holds 'g'"),
        (params(logit_bias={TOY_VOCAB: 1.0}), rf"logit_bias holds token id {TOY_VOCAB}; the target's ids are 0 to"),
        (params(stop_token_ids=[TOY_VOCAB]), rf"stop_token_ids holds token id {TOY_VOCAB}; the target's ids are 0 to"),
    ]
    for value, message in bad:
        with pytest.raises(ValueError, match=message):
            made.generate(prompts, value)
    assert not made.engine.has_work


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"policy": "best"}, r"policy='best' is unknown; use one of 'proposed'"),
    ({"verify": "maybe"}, r"verify='maybe' is not a verifier; use one of coupled, rejection"),
    ({"drafting": "wild"}, r"drafting='wild' is unknown; use 'greedy' or 'probabilistic'"),
    ({"budget": "most"}, r"budget='most' is unknown; use 'adaptive', 'all', or an integer"),
    ({"budget": -1}, r"budget=-1 is out of range"),
    ({"budget": 1.5}, r"budget=1.5 is not an integer"),
    ({"lookup": "trie"}, r"lookup='trie' is unknown; use 'ngram' or None"),
    ({"estimator": "gpt-9"}, r"estimator='gpt-9'.*qwen3-4b"),
    ({"cost": "/no/such/cost.json"}, r"cost file '/no/such/cost.json' cannot be read"),
    ({"dtype": "int8"}, r"dtype='int8' is not supported; use 'auto', 'float32'"),
    ({"device": "tpu"}, r"device='tpu'"),
    ({"max_batch_size": 0}, r"max_batch_size=0 is out of range; use an integer of at least 1"),
    ({"max_length": 1}, r"max_length=1 is out of range"),
    ({"prefill_tokens": 0}, r"prefill_tokens=0 is out of range"),
    ({"budget_delay": -1}, r"budget_delay=-1 is out of range"),
    ({"compile": "fast"}, r"compile='fast' is unknown; use 'auto', True, False or 'step'"),
    ({"allow_lossy": "yes"}, r"allow_lossy='yes' is not a bool"),
    ({"run_ahead": -1}, r"run_ahead=-1 is out of range"),
    ({"run_ahead": 2}, r"budget_delay=2 needs survivals that run_ahead=2 has not read yet"),
    ({"policy": 5}, r"policy=5 is no policy; use one of proposed, .*, or a Policy object"),
    ({"policy": Proposed}, r"policy=<class .*Proposed'> is no policy"),
    ({"verify": None}, r"verify=None is not a verifier; use .*'coupled'.*'rejection'.*callable"),
    ({"lookup": 5}, r"lookup=5 is no drafter; use 'ngram', None, or a Drafter"),
    ({"drafter": 5}, r"drafter=5 is no drafter; use 'auto', None, a directory, a hub id, or a Drafter"),
    ({"drafter": 5, "policy": "ngram_only"}, r"drafter=5 is no drafter"),
    ({"estimator": 5}, r"estimator=5"),
    ({"estimator": None}, r"estimator=None"),
    ({"cost": 5}, r"cost=5 is no cost model; use 'auto', a saved file, or a CostModel"),
    ({"compile": 1}, r"compile=1 is unknown"),
    ({"budget": 10**30}, r"budget=10+ is out of range; use .*, up to 2147483647"),
    ({"polcy": "proposed"}, r"polcy='proposed' is not a setting; use .*policy"),
    ({"drafter": "/no/such/drafter"}, r"/no/such/drafter"),
    ({"policy": "model_only", "drafter": None}, r"policy='model_only' needs a model drafter"),
    ({"policy": "ngram_only", "lookup": None}, r"policy='ngram_only' needs lookup='ngram'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused_before_the_target_is_loaded(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(face, "load_target", lambda *args, **kwargs: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=message):
        HybridSpeculator.from_pretrained("smollm2-135m", **{"progress": False, **settings})


@pytest.mark.parametrize("target", ["smollm3", "", "no/such/file.gguf", None])
def test_unknown_targets_are_refused_with_the_known_names(target: Any) -> None:
    with pytest.raises(ValueError, match="'smollm2-135m'"):
        HybridSpeculator.from_pretrained(target, progress=False)


def test_truncated_model_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(range(40)))
    with pytest.raises(ValueError, match=r"model\.gguf is truncated or corrupt"):
        HybridSpeculator.from_pretrained(broken, progress=False)
    directory = save_tiny_target(tmp_path / "target")
    weights = next(directory.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"safetensors is truncated or corrupt"):
        HybridSpeculator.from_pretrained(directory, progress=False)


def test_max_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_length=513 is more than this model's 512 positions; use at most 512"):
        speculator(max_length=513)
