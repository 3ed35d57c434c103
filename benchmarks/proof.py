# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Shows that the mirrored regressions find what they are for: they pass here and fail on stock DeepSpeed 0.19.7, each
for the reason that it names. Makes build/stock-0.19.7 at first use. Exits with 1 where a test does anything else.

    python benchmarks/proof.py
"""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

from stock import python_of

ROOT = Path(__file__).resolve().parent.parent
STOCK = "0.19.7"
BF16 = "tests/unit/runtime/zero/test_muon_without_zero_optimizer.py"
CLIPPING = "tests/unit/runtime/zero/test_muon_clipping.py"
ZERO3 = "tests/unit/v1/ops/muon/test_muon_zero3_grad_accum.py"
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Regression:
    """Tests whose names match `tests`, and what each of them has to say on stock; None: it has to pass there too."""
    file: str
    tests: str
    reason: Optional[str]
    fault: str


REGRESSIONS = [
    Regression(BF16, r"TestMuonBF16Optimizer", r"Muon cannot be used with the BF16_Optimizer",
               "bf16 with fp32 accumulation: no Muon at all"),
    Regression(CLIPPING, r"TestMuonClipping", r"the clip is that of the update", "the clip is that of the update"),
    Regression(ZERO3, r"once_per_matrix_per_step\[1-False\]", None, "one micro-batch: once a step, as it should be"),
    Regression(ZERO3, r"once_per_matrix_per_step\[[23]-False\]", r"orthogonalizations: found (10|15)\.0, expected 5",
               "accumulation: orthogonalized at every micro-batch"),
    Regression(ZERO3, r"one_large_micro_batch\[[23]-False\]", r"momentum and Newton-Schulz at every micro-batch",
               "accumulation: momentum advances at every micro-batch"),
    Regression(ZERO3, r"TestMuonZero3GradAccum.*-True\]", r"Muon and reduce scatter cannot be used together",
               "reduce_scatter, the default, is refused"),
]


def run(python: str, name: str) -> Dict[str, Optional[str]]:
    """What each test of the three files says with the DeepSpeed of `python`: None, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        environment = {
            **os.environ,
            "PYTHONPATH": "tests",
            "DS_ACCELERATOR": "cpu",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            # Compiled operators are kept by name alone: two releases would take each other's.
            "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / f"torch_extensions-{name}")
        }
        command = [
            python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", BF16, CLIPPING, ZERO3
        ]
        done = subprocess.run(command,
                              cwd=ROOT,
                              env=environment,
                              capture_output=True,
                              text=True,
                              timeout=TIMEOUT_SECONDS)
        if not report.exists():
            sys.exit(f"pytest did not get to a report with {python}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return dict(_outcomes(report))


def _outcomes(report: Path) -> List[tuple[str, Optional[str]]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        said = f"{bad[0].get('message')}\n{bad[0].text}" if bad else None
        found.append((f"{case.get('classname')}.{case.get('name')}", said))
    return found


def covered(regression: Regression, outcomes: Dict[str, Optional[str]]) -> Dict[str, Optional[str]]:
    """The outcomes of the tests of a regression. Raises SystemExit where there are none."""
    module = regression.file.removeprefix("tests/").removesuffix(".py").replace("/", ".")
    chosen = {
        name: outcome
        for name, outcome in outcomes.items() if module in name and re.search(regression.tests, name)
    }
    if not chosen:
        sys.exit(f"no test matches {regression.tests} in {regression.file}")
    return chosen


def as_named(regression: Regression, outcome: Optional[str]) -> bool:
    """Whether this outcome on stock is the one that the regression names."""
    if regression.reason is None:
        return outcome is None
    return outcome is not None and re.search(regression.reason, outcome) is not None


def main() -> int:
    here, stock = run(sys.executable, "fork"), run(str(python_of(STOCK)), STOCK)
    wrong = [f"{name} fails here: {outcome}" for name, outcome in here.items() if outcome is not None]
    counts: Dict[str, List[int]] = defaultdict(lambda: [0, 0, 0])
    for regression in REGRESSIONS:
        for name, outcome in covered(regression, stock).items():
            right = as_named(regression, outcome)
            row = counts[regression.fault]
            row[0] += 1
            row[1] += right
            row[2] += here.get(name, "not run") is None
            if not right:
                wrong.append(f"{name} on stock {STOCK}, expected {regression.reason!r}: {outcome or 'it passed'}")
    print(f"| fault of stock {STOCK} | tests | on stock as named | pass here |\n|---|---|---|---|")
    for fault, (tests, right, passed) in counts.items():
        print(f"| {fault} | {tests} | {right} | {passed} |")
    print("\n".join(wrong[:10]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
