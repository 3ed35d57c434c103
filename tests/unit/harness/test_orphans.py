# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""No process survives pytest, however pytest ends."""

import os
import signal
import time
import uuid
from pathlib import Path
from typing import Callable, List

import psutil
import pytest

from unit.harness.inner import copy_case, start_pytest


def _marked(name: str) -> List[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if name in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_pytest(tmp_path: Path, sent: signal.Signals):
    copy_case("never_ends", tmp_path / "test_never_ends.py")
    name = f"RANKS_{uuid.uuid4().hex}"
    # A killed pytest cannot remove its temporary files: they go where pytest removes them later.
    process = start_pytest(tmp_path, "test_never_ends.py", variables={name: "1", "TMPDIR": str(tmp_path)})
    try:
        assert _wait_for(lambda: len(list(tmp_path.glob("rank*.runs"))) == 2 or process.poll() is not None, 100)
        # pytest, two ranks, the child of one of them, and what multiprocessing starts.
        assert len(_marked(name)) >= 4, process.communicate()[0]
        os.kill(process.pid, sent)
        printed = process.communicate(timeout=60)[0]
        assert _wait_for(lambda: not _marked(name), 20), [one.cmdline() for one in _marked(name)]
        if sent == signal.SIGINT:
            assert "KeyboardInterrupt" in printed
    finally:
        process.kill()
        for orphan in _marked(name):
            orphan.kill()
