"""Equation 1 with the published coefficients, which estimator a target gets, and files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspark.policy import AcceptanceEstimator, Coefficients
from tests.assertions import assert_one_graph

PUBLISHED = ("qwen3-4b", "qwen3-8b", "gemma4-12b", "north-mini-code", "llama3.1-8b")
LADDER = tuple(f"qwen3-4b/ladder-{level}" for level in range(1, 6))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _at(estimator: AcceptanceEstimator, n: int, a: int, m: int) -> list[float]:
    return estimator(torch.tensor([n]), torch.tensor([a]), torch.tensor([m]))[0].tolist()


# (preset, n, a, m, k, the logit written out from tables 5 and 7 of the paper)
BY_HAND = [
    ("qwen3-4b", 5, 0, 5, 1, -0.220),
    ("qwen3-4b", 5, 1, 5, 1, -0.220 + 1.2455),
    ("qwen3-4b", 14, 1, 200, 1, -0.220 - 0.0893 * 9 + 1.2455),  # no full match: the copy length is not read
    ("qwen3-4b", 15, 1, 15, 1, -0.220 - 0.0893 * 10 + 1.2455 + 1.1998),
    ("qwen3-4b", 15, 1, 256, 1, -0.220 - 0.0893 * 10 + 1.2455 + 1.1998 + 2.0118 * math.log(256 / 15)),
    ("qwen3-4b", 15, 1, 9999, 1, -0.220 - 0.0893 * 10 + 1.2455 + 1.1998 + 2.0118 * math.log(256 / 15)),
    ("qwen3-4b", 15, 0, 30, 2, 0.155 - 0.0001 * 10 + 0.1322 + 1.8333 * math.log(2)),
    ("qwen3-4b", 10, 1, 10, 15, 0.811 - 0.0001 * 5 + 1.2455),
    ("qwen3-8b", 15, 0, 60, 1, -0.414 - 0.1301 * 10 + 1.2694 + 2.5317 * math.log(4)),
    ("qwen3-8b", 8, 1, 8, 10, 0.448 + 0.0303 * 3 + 1.3938),
    ("gemma4-12b", 15, 1, 15, 3, -0.087 + 0.0683 * 10 + 1.1741 + 0.1844),
    ("north-mini-code", 15, 1, 45, 11, -0.582 - 0.0757 * 10 + 2.0234 + 0.9809 + 1.6321 * math.log(3)),
    ("llama3.1-8b", 5, 0, 5, 8, -0.420),  # as printed; its neighbours are 0.897 and 0.607
    ("llama3.1-8b", 15, 0, 150, 2, 0.287 + 0.0233 * 10 + 0.0714 + 1.51 * math.log(10)),
    ("qwen3-4b/ladder-1", 12, 0, 12, 9, 2.117),
    ("qwen3-4b/ladder-2", 15, 0, 99, 15, 3.046),
    ("qwen3-4b/ladder-3", 9, 0, 9, 1, 0.793 + 0.196 * 4),
    ("qwen3-4b/ladder-3", 9, 1, 9, 2, 1.293 + 0.196 * 4),
    ("qwen3-4b/ladder-4", 15, 1, 75, 5, 1.987 + 2.070 * math.log(5)),
    ("qwen3-4b/ladder-5", 15, 1, 15, 1, -0.247 + 1.261),
]


@pytest.mark.parametrize(("preset", "n", "a", "m", "k", "logit"), BY_HAND)
def test_published_coefficients_in_equation_1(preset: str, n: int, a: int, m: int, k: int, logit: float) -> None:
    assert _at(AcceptanceEstimator.preset(preset), n, a, m)[k - 1] == pytest.approx(_sigmoid(logit), rel=1e-5)


def test_what_the_paper_says_of_its_coefficients() -> None:
    assert _at(AcceptanceEstimator.preset("qwen3-4b/ladder-1"), 5, 0, 5) == pytest.approx([0.893] * 15, abs=5e-4)
    rising = _at(AcceptanceEstimator.preset("qwen3-4b/ladder-2"), 5, 0, 5)
    assert (round(rising[0], 2), round(rising[-1], 2)) == (0.76, 0.95)
    full = AcceptanceEstimator.preset("qwen3-4b")
    features = torch.tensor([15, 15]), torch.tensor([1, 1]), torch.tensor([15, 256])
    gain = full.logits(*features)[:, 0].diff()
    assert float(gain) == pytest.approx(5.7, abs=0.05)


@given(st.integers(0, 20), st.integers(0, 1), st.integers(0, 400), st.sampled_from(PUBLISHED + LADDER))
def test_equation_1_written_as_a_loop(n: int, a: int, m: int, preset: str) -> None:
    estimator = AcceptanceEstimator.preset(preset)
    c = estimator.coefficients
    expected = []
    for k in range(15):
        part = "first" if k == 0 else "rest"
        logit = c.beta[k] + getattr(c, f"w_{part}") * (n - 5) + c.delta * a
        if n >= 15:
            logit += getattr(c, f"l_{part}") + getattr(c, f"kappa_{part}") * math.log(max(15, min(m, 256)) / 15)
        expected.append(_sigmoid(logit))
    assert _at(estimator, n, a, m) == pytest.approx(expected, rel=1e-4)


def test_every_preset_is_named_and_says_where_it_is_from() -> None:
    assert set(PUBLISHED + LADDER) <= set(AcceptanceEstimator.preset_names())
    for name in AcceptanceEstimator.preset_names():
        estimator = AcceptanceEstimator.preset(name)
        shortest = 1 if name == "smollm2-135m" else 5
        assert (estimator.min_match, estimator.max_match, estimator.copy_cap) == (shortest, 15, 256)
        assert estimator.width == 15
        assert ("paper, table" in estimator.provenance["source"]) is (name in PUBLISHED + LADDER)
    with pytest.raises(ValueError, match=r"estimator='gpt' is unknown; use one of 'qwen3-4b'.*'qwen3-4b/ladder-5'"):
        AcceptanceEstimator.preset("gpt")


@pytest.mark.parametrize(
    ("target", "preset"),
    [
        ("Qwen/Qwen3-4B", "qwen3-4b"),
        ("/models/Qwen3-8B/", "qwen3-8b"),
        ("google/gemma-4-12B-it", "gemma4-12b"),
        ("CohereLabs/North-Mini-Code-1.0-w4a16", "north-mini-code"),
        ("qwen3-4b", "qwen3-4b"),
        ("Qwen3-4B/ladder-1", "qwen3-4b/ladder-1"),
    ],
)
def test_a_known_target_gets_its_own_fit(target: str, preset: str) -> None:
    estimator, note = AcceptanceEstimator.for_target(target)
    assert estimator.coefficients == AcceptanceEstimator.preset(preset).coefficients
    assert repr(preset) in note


def test_the_doubtful_coefficient_is_pointed_out() -> None:
    _, note = AcceptanceEstimator.for_target("meta-llama/Llama-3.1-8B-Instruct")
    assert "misprint" in note


@pytest.mark.parametrize("target", ["acme/unheard-of", "Qwen/Qwen3-4B-Instruct-2507", ""])
def test_an_unknown_target_gets_the_default_and_a_note_that_says_so(target: str) -> None:
    estimator, note = AcceptanceEstimator.for_target(target)
    assert estimator.coefficients == AcceptanceEstimator.preset("qwen3-4b").coefficients
    assert f"no coefficients are known for {target}" in note
    assert "'qwen3-4b'" in note


def test_resolve_takes_auto_a_name_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    AcceptanceEstimator.preset("gemma4-12b").save(path)
    for spec, preset in (("auto", "qwen3-8b"), ("north-mini-code", "north-mini-code"), (path, "gemma4-12b")):
        estimator, note = AcceptanceEstimator.resolve(spec, "Qwen/Qwen3-8B")
        assert estimator.coefficients == AcceptanceEstimator.preset(preset).coefficients
        assert note.startswith("estimator: ")
    with pytest.raises(ValueError, match=r"estimator='nowhere.json' is neither a file nor a preset.*'auto'"):
        AcceptanceEstimator.resolve("nowhere.json", "x")


def test_wider_and_narrower_chains() -> None:
    estimator = AcceptanceEstimator.preset("qwen3-4b")
    base = _at(estimator, 15, 1, 60)
    assert _at(estimator.with_width(18), 15, 1, 60) == [*base, *[base[-1]] * 3]
    assert _at(estimator.with_width(4), 15, 1, 60) == base[:4]
    assert _at(estimator.with_width(1), 15, 1, 60) == base[:1]
    with pytest.raises(ValueError, match="width=0"):
        estimator.with_width(0)


def test_the_limits_of_the_drafter_are_carried() -> None:
    c = Coefficients((0.5,), w_first=0.25, l_first=1.0, kappa_first=2.0)
    estimator = AcceptanceEstimator(c, min_match=2, max_match=4, copy_cap=8)
    assert _at(estimator, 3, 0, 3)[0] == pytest.approx(_sigmoid(0.75))
    assert _at(estimator, 4, 0, 100)[0] == pytest.approx(_sigmoid(0.5 + 0.5 + 1.0 + 2.0 * math.log(2)))
    assert estimator.with_width(3).max_match == 4


def test_dtype_follows_to_and_bool_agreement_works() -> None:
    estimator = AcceptanceEstimator.preset("qwen3-4b")
    features = torch.tensor([5, 15]), torch.tensor([True, False]), torch.tensor([5, 40])
    assert estimator(*features).dtype == torch.float32
    exact = estimator.to("cpu", torch.float64)(*features)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(estimator(*features).double(), exact, rtol=1e-6, atol=1e-7)
    assert estimator.to("meta").device.type == "meta"


def test_rows_without_a_match_are_finite() -> None:
    assert all(math.isfinite(h) for h in _at(AcceptanceEstimator.preset("qwen3-4b"), 0, 0, 0))


def test_one_graph() -> None:
    features = torch.tensor([5, 15, 0]), torch.tensor([1, 0, 0]), torch.tensor([5, 40, 0])
    assert assert_one_graph(AcceptanceEstimator.preset("qwen3-4b"), *features).shape == (3, 15)


def test_files_round_trip(tmp_path: Path) -> None:
    c = Coefficients((0.5, -1.0), delta=1 / 3)
    path = tmp_path / "estimator.json"
    AcceptanceEstimator(c, min_match=4, max_match=9, copy_cap=64, provenance={"target": "tiny"}).save(path)
    loaded = AcceptanceEstimator.load(path)
    assert loaded.coefficients == c
    assert (loaded.min_match, loaded.max_match, loaded.copy_cap) == (4, 9, 64)
    assert loaded.provenance == {"target": "tiny"}
    assert "unknown source" in repr(loaded)


def test_the_width_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "estimator.json"
    wide = AcceptanceEstimator.preset("qwen3-4b").with_width(20)
    wide.save(path)
    loaded = AcceptanceEstimator.load(path)
    assert loaded.width == 20
    assert _at(loaded, 15, 1, 60) == _at(wide, 15, 1, 60)
    record = wide.to_record()
    del record["width"]  # as in files without it: one position for each intercept
    path.write_text(json.dumps(record))
    assert AcceptanceEstimator.load(path).width == 15


GOOD: dict[str, Any] = AcceptanceEstimator.preset("qwen3-4b").to_record()
WEIGHTS: dict[str, Any] = GOOD["coefficients"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("", "is not JSON"),
        ([1], "key 'kind' is None"),
        (GOOD | {"kind": "table"}, "key 'kind' is 'table'"),
        (GOOD | {"betas": []}, r"unknown keys \['betas'\]"),
        (GOOD | {"coefficients": None}, "key 'coefficients' is None"),
        (GOOD | {"coefficients": {"beta": [1.0]}}, "'w_first'"),
        (GOOD | {"coefficients": WEIGHTS | {"beta": []}}, r"beta=\[\]"),
        (GOOD | {"coefficients": WEIGHTS | {"beta": [0.0, None]}}, r"beta\[1\]=None"),
        (GOOD | {"coefficients": WEIGHTS | {"delta": float("nan")}}, "delta=nan"),
        (GOOD | {"min_match": 0}, "min_match=0"),
        (GOOD | {"max_match": 4}, "max_match=4"),
        (GOOD | {"copy_cap": 14}, "copy_cap=14"),
        (GOOD | {"width": 0}, "width=0"),
        (GOOD | {"provenance": "me"}, "key 'provenance' is 'me'"),
    ],
)
def test_a_bad_file_is_named_with_the_key(tmp_path: Path, record: Any, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(ValueError, match=message) as raised:
        AcceptanceEstimator.load(path)
    assert "mine.json" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.json' cannot be read"):
        AcceptanceEstimator.load(tmp_path / "absent.json")
