# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""benchmarks/gpu.py runs, as far as it can without a GPU: all but the device is the same."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.runtime.zero.muon.coefficients import launches

SCRIPT = Path(__file__).resolve().parents[5] / "benchmarks" / "gpu.py"


def test_smoke_run(tmp_path):
    out = tmp_path / "found.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--engines", "zero1", "--out",
         str(out)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(out.read_text())
    assert all(found["machine"][key] > 0 for key in ("float16_flops_per_second", "bytes_per_second", "launch_seconds"))
    assert {(entry["method"], entry["kernel"])
            for entry in found["kernels"]} == {("gram", "batched"), ("standard", "batched")}
    # Measured: 0.004 in fp16, 0.017 in bf16.
    assert all(entry["relative_error"] < 0.04 and entry["floor_seconds"] > 0 for entry in found["kernels"])
    assert len(found["steps"]) == 4 and all(entry["step_seconds"] > 0 for entry in found["steps"])
    ran = {(entry["engine"], entry["optimizer"], entry["ranks"]): entry for entry in found["engines"]}
    assert sorted(ran) == [("zero1", "adamw", 1), ("zero1", "muon", 1)]
    assert all(entry.get("step_seconds", 0) > 0 for entry in ran.values()), ran


@pytest.mark.parametrize("gram", [True, False])
def test_bytes_of_the_products(gram):
    """A square one of each reads three operands at most and writes one: between 2 and 4 m^2 a product."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    products = launches(gram, 5)
    assert 2 * products <= module.product_bytes(1, 1, gram, 5, 1) <= 4 * products
    # X is read for X X^T and for the product with it, and written there.
    assert module.product_bytes(1, 10**6, gram, 5, 2) // 10**6 == 2 * 3 * (2 if gram else 5)
