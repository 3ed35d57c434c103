# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""benchmarks/others.py runs and counts, without the packages that it compares with."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[5] / "benchmarks" / "others.py"


def test_smoke_run():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, str(SCRIPT), "--smoke", "--rounds", "1"],
                            capture_output=True,
                            text=True,
                            env=environment,
                            timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {
        cells[3]: cells
        for cells in ([cell.strip() for cell in line.split("|")] for line in result.stdout.splitlines()
                      if line.startswith("| 1x32"))
    }
    assert list(rows) == ["ZeRO-3 Muon, gram", "ZeRO-3 Muon, standard", "ZeRO-3 AdamW"]
    for name in ("ZeRO-3 Muon, gram", "ZeRO-3 Muon, standard"):
        received, orthogonalized, differs = (rows[name][column] for column in (8, 9, 11))
        # Half of what a rank needs is its own: 2 bytes an element on both ways together, and some for norms.
        assert 2 <= float(received) < 2.1
        assert orthogonalized == "3 of 6"
        # Measured: 1e-5.
        assert float(differs) < 1e-3
    assert float(rows["ZeRO-3 AdamW"][8]) < 0.01 and rows["ZeRO-3 AdamW"][9] == "0 of 0"
