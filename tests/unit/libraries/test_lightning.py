# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Lightning's DeepSpeedStrategy with Muon in the ds_config."""

import pytest

from unit.libraries.launch import Outcome, check_exact, run_case


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_case("lightning", tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("case", [
    pytest.param(f"zero{stage}", marks=pytest.mark.support(feature="Lightning", engine=f"ZeRO-{stage}", state="exact"))
    for stage in (1, 2, 3)
])
def test_trains_and_resumes_as_on_whole_matrices(outcome: Outcome, case: str):
    # Measured 1.3e-5, fp32 against float64.
    check_exact(outcome[case], bound=5e-5)


def test_example_learns(outcome: Outcome):
    # It starts at about log(64), 4.16.
    assert outcome["example"]["loss"] < 3.9
    assert outcome.status == 0, outcome.output
