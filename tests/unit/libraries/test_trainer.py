# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Trainer of transformers with Muon in its ds_config and "auto" in it."""

import pytest

from unit.libraries.launch import Outcome, check_exact, run_case

# fp32 against float64, over 4 steps: measured 1.1e-5 (zero1, zero2), 1.2e-5 (zero3), 1.4e-5 (two rates).
ROUNDING = 5e-5


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_case("trainer", tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize(
    "case, bound",
    [
        pytest.param("zero1",
                     ROUNDING,
                     marks=pytest.mark.support(feature="transformers Trainer", engine="ZeRO-1", state="exact")),
        pytest.param("zero2",
                     ROUNDING,
                     marks=pytest.mark.support(feature="transformers Trainer", engine="ZeRO-2", state="exact")),
        pytest.param("zero3",
                     ROUNDING,
                     marks=pytest.mark.support(feature="transformers Trainer", engine="ZeRO-3", state="exact")),
        # The gradients are those of a model in bf16: measured 0.12.
        pytest.param("bf16",
                     0.3,
                     marks=pytest.mark.support(feature="transformers Trainer", engine="BF16_Optimizer",
                                               state="exact")),
        ("two rates", ROUNDING),
    ])
def test_trains_and_resumes_as_on_whole_matrices(outcome: Outcome, case: str, bound: float):
    check_exact(outcome[case], bound)
    assert outcome[case]["resumed at step"] == 4
    # Where it starts: log(64).
    assert outcome[case]["evaluation"] < 4.15


def test_stage_1_in_bf16_with_fp32_accumulation_is_bf16_optimizer(outcome: Outcome):
    assert outcome["bf16"]["optimizer"] == "BF16_Optimizer"
    assert outcome["zero3"]["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"


def test_auto_takes_one_rate_for_both_halves(outcome: Outcome):
    assert outcome["zero2"]["rates"][-1] == [3e-3, 3e-3]


def test_schedule_of_the_trainer_keeps_the_halves_apart(outcome: Outcome):
    rates = outcome["two rates"]["rates"]
    assert [muon for muon, _ in rates] == [0.0, 0.01, 0.02, 0.01]
    assert all(muon * 3 == pytest.approx(adam * 20) for muon, adam in rates)


def test_example_learns(outcome: Outcome):
    # It starts at about log(64), 4.16.
    assert outcome["example"]["loss"] < 3.9
    assert outcome.status == 0, outcome.output
