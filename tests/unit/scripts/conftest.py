# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Runs one of scripts/check_*.py as pre-commit does: a process of its own, the file's path relative to the root."""

import subprocess
import sys
from pathlib import Path
from typing import Callable, List

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
CheckFile = Callable[..., List[str]]


@pytest.fixture
def check_file(tmp_path: Path) -> CheckFile:
    """check_file("check_license", text, path="a/b.py") -> the lines printed; asserts that the exit status is 1 with
    lines and 0 without, and that the file was left as it was."""

    def run(script: str, text: str, path: str = "deepspeed/module.py") -> List[str]:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, str(SCRIPTS / f"{script}.py"), path],
                              cwd=tmp_path,
                              capture_output=True,
                              text=True,
                              timeout=60)
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert done.returncode == (1 if lines else 0)
        assert all(line.startswith(f"{path}:") for line in lines)
        assert target.read_text(encoding="utf-8") == text
        return lines

    return run
