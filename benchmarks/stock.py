# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Environments with a released DeepSpeed, made on demand under build/, for comparison."""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"


def python_of(version: str) -> Path:
    """The interpreter of build/stock-VERSION, in which PyPI's deepspeed of that version is installed.

    Made when it is first asked for, which takes a minute or two and the network. Raises CalledProcessError where pip
    fails; an environment that is not complete is made anew.
    """
    folder = ROOT / "build" / f"stock-{version}"
    python, done = folder / "bin" / "python", folder / ".complete"
    if not done.exists():
        print(f"making {folder} with deepspeed {version}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, TORCH, "setuptools", "wheel", "pytest", "pytest-timeout", "hypothesis"], check=True)
        # Without isolation, or pip would fetch a second torch to build with.
        subprocess.run([*pip, "--no-build-isolation", f"deepspeed=={version}"], check=True)
        done.touch()
    return python
