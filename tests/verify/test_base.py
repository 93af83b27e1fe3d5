"""The registry, the packed layout, and the chi-square that the statistical tests rest on."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hspark.verify
from hspark.policy import lossy_reason, policy
from hspark.verify import CoupledVerifier, RejectionVerifier, pack, register, verifier, verifier_names
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


def test_what_is_no_verifier_is_not_registered() -> None:
    class Named:
        name = "named"

    wrong: list[tuple[Any, str]] = [
        (CoupledVerifier, "entry=CoupledVerifier is a class; use an instance of it"),
        (Named(), "entry=.* is not a verifier; use one of 'coupled', 'rejection', or a callable with a name"),
        (lambda *arguments: None, "entry=<function .* is not a verifier"),
    ]
    for entry, message in wrong:
        with pytest.raises(ValueError, match=message):
            register(entry)
    assert verifier_names() == ("coupled", "rejection")


def test_a_verifier_says_itself_whether_drafts_matter() -> None:
    """By name or as an object; one that does not say is taken for one like rejection, and greedy drafts suit any."""

    class Mine(RejectionVerifier):
        name = "mine"

    class Invariant(Mine):
        depends_on_drafts = False

    for verify in ("rejection", "mine", RejectionVerifier(), Mine()):
        assert lossy_reason(policy("proposed"), "greedy", verify, 0) is None
        assert lossy_reason(policy("model_only"), "probabilistic", verify, 2) is None
        name = verify if isinstance(verify, str) else verify.name
        for rule, delay in (("proposed", 2), ("model_only", 0)):
            assert f'verify="{name}" changes the output' in str(
                lossy_reason(policy(rule), "probabilistic", verify, delay)
            )
    for free in ("coupled", CoupledVerifier(), Invariant()):
        for drafting in ("greedy", "probabilistic"):
            assert lossy_reason(policy("proposed"), drafting, free, 0) is None


def test_what_a_verifier_is_called_with_can_be_made_from_here() -> None:
    import hspark.policy

    for module in (hspark.verify, hspark.policy):
        assert (module.SOURCE_TARGET, module.SOURCE_MODEL, module.SOURCE_FREE) == (0, 1, 2)
        assert {"Chain", "SOURCE_TARGET", "SOURCE_MODEL", "SOURCE_FREE"} <= set(module.__all__)
    state, mode = hspark.verify.SamplingState.defaults(2), hspark.verify.SamplingMode(sampled=False)
    law = hspark.verify.target_log_probs(torch.eye(2), state, mode)
    assert law.argmax(-1).tolist() == [0, 1]


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


@pytest.mark.parametrize("distance", [0.02, 0.05, 0.08])
def test_the_miss_rate_of_two_equal_cells_is_that_of_a_normal_deviate(distance: float) -> None:
    """There the bound is reached: the statistic is the square of a normal deviate with mean 2 D sqrt(samples), and the
    chi-square test of counts misses as often as a sum over the binomial law says."""
    samples, false_alarm = 1000, 0.0455002639
    mean = 2 * distance * math.sqrt(samples)  # at this false-alarm rate the deviate passes inside (-2, 2)

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    missed = miss_rate(distance, samples, 2, false_alarm)
    assert missed == pytest.approx(below(2 - mean) - below(-2 - mean), abs=1e-6)
    law, wrong = torch.tensor([0.5, 0.5]), 0.5 + distance
    exact = 0.0
    for count in range(samples + 1):
        if chi_square(torch.tensor([count, samples - count]), law) >= false_alarm:
            ways = math.lgamma(samples + 1) - math.lgamma(count + 1) - math.lgamma(samples - count + 1)
            exact += math.exp(ways + count * math.log(wrong) + (samples - count) * math.log(1 - wrong))
    assert exact == pytest.approx(missed, abs=0.02)
