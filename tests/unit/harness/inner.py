# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Runs pytest on cases that must not be collected with the rest of the suite: they fail, hang or never end."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

_TESTS = Path(__file__).parents[2]
_CASES = Path(__file__).parent / "cases"


def copy_case(name: str, to: Path) -> Path:
    """Copies a case under a name that pytest collects, making the directories of ``to``; returns ``to``."""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text((_CASES / f"{name}.py").read_text())
    return to


def start_pytest(directory: Path, *arguments: str, variables: Optional[Dict[str, str]] = None) -> subprocess.Popen:
    """Starts pytest in ``directory`` without this project's configuration, but with the ranks' plugin.

    ``variables`` are added to the environment, which ranks inherit. The output is a pipe of text.
    """
    command: List[str] = [sys.executable, "-m", "pytest", "-p", "unit.ranks.plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(directory), *arguments]
    path = os.pathsep.join([str(_TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    environ = {**os.environ, **(variables or {}), "PYTHONPATH": path, "COLUMNS": "200"}
    # What a surrounding run of pytest or pytest-xdist says about itself is not for this one.
    for name in [name for name in environ if name.startswith("PYTEST_")]:
        del environ[name]
    return subprocess.Popen(command,
                            cwd=directory,
                            env=environ,
                            stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT,
                            text=True,
                            preexec_fn=_take_interrupts)


def _take_interrupts() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_pytest(directory: Path, *arguments: str) -> str:
    """Runs pytest as ``start_pytest`` does, to its end, and returns its output."""
    process = start_pytest(directory, *arguments)
    try:
        return process.communicate(timeout=150)[0]
    finally:
        process.kill()
