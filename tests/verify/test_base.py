"""The registry, the packed layout, and the chi-square that the statistical tests rest on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hspark.verify
from hspark.verify import CoupledVerifier, pack, register, verifier, verifier_names
from hspark.verify.statistics import chi_square, miss_rate
from tests.assertions import assert_one_graph


def test_names_lead_to_verifiers() -> None:
    assert verifier_names() == ("coupled", "rejection")
    for name in verifier_names():
        assert verifier(name).name == name


def test_unknown_and_taken_names_are_refused() -> None:
    with pytest.raises(ValueError, match="verify='typical' is not a verifier; use one of coupled, rejection"):
        verifier("typical")
    with pytest.raises(ValueError, match="name='coupled' is taken"):
        register(CoupledVerifier())


def test_every_public_name_exists() -> None:
    for name in hspark.verify.__all__:
        assert getattr(hspark.verify, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'typical'"):
        _ = hspark.verify.typical


def test_verification_is_imported_without_the_rest() -> None:
    """The folder works in somebody else's engine: beside it, only core.py and sampling.py are needed, and torch."""
    code = (
        "import sys, types; package = types.ModuleType('hspark'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['hspark'] = package\n"
        "import hspark.verify; hspark.verify.verifier('rejection')\n"
        "print(*(m for m in sys.modules if m.startswith(('hspark', 'transformers'))))"
    )
    folder = str(Path(hspark.verify.__file__).parents[1])
    run = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    parts = ("base", "coupled", "layout", "rejection")
    allowed = {
        "hspark",
        "hspark.core",
        "hspark.sampling",
        "hspark.verify",
        *(f"hspark.verify.{part}" for part in parts),
    }
    assert set(run.stdout.split()) == allowed


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6), st.integers(0, 4))
def test_packing_lists_every_slot_once(rows: list[tuple[int, bool]], spare: int) -> None:
    kept = torch.tensor([k for k, _ in rows])
    running = torch.tensor([r for _, r in rows])
    slots = [(b, k) for b, (count, runs) in enumerate(rows) if runs for k in range(count + 1)]
    layout = pack(kept, running, 3, max(len(slots) + spare, 1))
    assert list(zip(layout.row.tolist(), layout.offset.tolist(), strict=True))[: len(slots)] == slots
    assert layout.valid.tolist() == [True] * len(slots) + [False] * (layout.valid.numel() - len(slots))
    assert not bool(layout.row[len(slots) :].any())
    assert not bool(layout.offset[len(slots) :].any())
    for place, (b, k) in enumerate(slots):
        assert int(layout.index[b, k]) == place
    assert bool(((layout.index >= 0) & (layout.index < layout.row.numel())).all())


def test_packing_compiles_to_one_graph() -> None:
    assert_one_graph(
        lambda kept, running: pack(kept, running, 3, 12), torch.tensor([2, 0, 3]), torch.tensor([1, 1, 0]).bool()
    )


# --- Statistics ---


def test_chi_square_gives_the_tabulated_tails() -> None:
    """The tail of one degree of freedom is 0.05 at 3.841 and 0.01 at 6.635."""
    half = torch.tensor([0.5, 0.5])
    assert chi_square(torch.tensor([50, 50]), half) == 1.0
    counts = torch.tensor([50_000 + 310, 50_000 - 310])  # 3.844
    assert chi_square(counts, half) == pytest.approx(0.0499, abs=2e-4)
    counts = torch.tensor([50_000 + 407, 50_000 - 407])  # 6.626
    assert chi_square(counts, half) == pytest.approx(0.01005, abs=1e-4)


def test_chi_square_pools_rare_cells_and_refuses_impossible_ones() -> None:
    law = torch.tensor([0.5, 0.4999, 0.00005, 0.00005, 0.0])
    assert chi_square(torch.tensor([500, 500, 0, 0, 0]), law) > 0.5
    assert chi_square(torch.tensor([500, 494, 3, 3, 0]), law) < 1e-6  # 6 counts where 0.1 is expected
    assert chi_square(torch.tensor([50_000, 49_960, 30, 10, 0]), law) < 1e-6  # a pool of its own: 10 are expected
    assert chi_square(torch.tensor([500, 500, 0, 0, 1]), law) == 0.0
    assert chi_square(torch.tensor([2, 1]), torch.tensor([0.5, 0.5])) > 0.05  # too few counts to say anything
    with pytest.raises(ValueError, match="counts has shape"):
        chi_square(torch.tensor([1, 2]), law)


def test_false_alarms_and_misses_come_as_often_as_stated() -> None:
    """2,000 tests at threshold 0.05: 100 +- 10 false alarms of a right law; a wrong one passes no more than bounded."""
    generator = torch.Generator().manual_seed(0)
    law = torch.full((8,), 1 / 8)
    wrong = law + torch.tensor([0.05, -0.05, 0, 0, 0, 0, 0, 0])  # total variation 0.05
    alarms = passes = 0
    for _ in range(2000):
        right = torch.bincount(torch.multinomial(law, 500, True, generator=generator), minlength=8)
        biased = torch.bincount(torch.multinomial(wrong, 500, True, generator=generator), minlength=8)
        alarms += chi_square(right, law) < 0.05
        passes += chi_square(biased, law) >= 0.05
    assert 60 < alarms < 140  # four standard deviations
    assert passes / 2000 < miss_rate(0.05, 500, 8, 0.05)
    assert miss_rate(0.0, 500, 8, 0.05) == pytest.approx(0.95, abs=1e-6)
