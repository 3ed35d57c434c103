# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The support table holds what passed tests show."""

import pytest

from unit.harness.inner import copy_case, run_pytest, start_pytest
from unit.support import Claim, table

ROWS = """\
| Experts (SuperOffload: refused) |  |  | exact |  |  | `test_support_case.py::test_one` |
| Heads | exact | exact | exact | exact | exact | `test_support_case.py::TestHeads` |
| NVMe |  |  |  | refused | exact | `test_support_case.py::test_twice` |
| Weights in bf16 |  |  | exact |  |  | `test_support_case.py::test_parameters` |
| Weights in fp32 |  |  |  |  | exact | `test_support_case.py::test_parameters` |
"""


def test_rows(tmp_path):
    copy_case("support", tmp_path / "test_support_case.py")
    page = tmp_path / "support.md"
    output = run_pytest(tmp_path, "-p", "unit.support", f"--support={page}")
    assert "7 passed, 1 skipped" in output
    assert page.read_text().endswith("|---|---|---|---|---|---|---|\n" + ROWS)
    assert "is not what" not in run_pytest(tmp_path, "-p", "unit.support", f"--support-check={page}")
    page.write_text(page.read_text().replace("refused", "exact"))
    process = start_pytest(tmp_path, "-p", "unit.support", f"--support-check={page}")
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 1 and "is not what this run of the tests shows" in output
    assert "-| NVMe |  |  |  | exact | exact |" in output


def test_contradiction():
    with pytest.raises(ValueError, match="a says that heads under ZeRO-1 is exact, another test that it is refused"):
        table([Claim("heads", "all", "exact", "a"), Claim("heads", "ZeRO-1", "refused", "b")])
