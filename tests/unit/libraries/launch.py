# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Starts scripts of the libraries' users on two ranks, as those start them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).resolve().parent / "cases"
EXAMPLES = ROOT / "examples" / "libraries"


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one launch found, by case, and the end of what they said."""
    results: Mapping[str, Any]
    status: int
    output: str

    def __getitem__(self, case: str) -> dict[str, Any]:
        if case not in self.results:
            raise AssertionError(f"the ranks did not finish the case {case}:\n{self.output}")
        return self.results[case]


def on_two_ranks(script: Path, *arguments: str, timeout: float = 400) -> tuple[int, str]:
    """Exit status, and the end of the output, of a script under torchrun. What it leaves running is ended."""
    environment = dict(os.environ)
    own = [str(ROOT / "tests"), str(EXAMPLES)]
    inherited = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment.update(PYTHONPATH=os.pathsep.join(own + inherited), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    # On CPUs always: two ranks cannot share one GPU.
    environment.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("on_cpu.py")), str(script), *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun then ends its ranks, which have sessions of their own.
        process.terminate()
        output = process.communicate(timeout=60)[0] + f"\nended after {timeout} s"
    return process.returncode, output[-8000:]


def run_case(name: str, out: Path) -> Outcome:
    """All cases of cases/NAME_case.py in one launch."""
    status, output = on_two_ranks(CASES / f"{name}_case.py", str(out))
    found = out / "results.json"
    return Outcome(json.loads(found.read_text()) if found.exists() else {}, status, output)


def check_exact(found: dict[str, Any], bound: float) -> None:
    """The run is the one on whole matrices, the ranks shared data and work, and resuming changed nothing."""
    assert found["steps"] == 4
    assert found["different batches on ranks"]
    assert found["distance"] < bound
    assert found["orthogonalizations"] == found["matrices"] * found["steps"]
    assert found["resumed differs in"] is None
    # A schedule that does not move, or is zero, would show nothing.
    assert len({tuple(rates) for rates in found["rates"]}) > 1
