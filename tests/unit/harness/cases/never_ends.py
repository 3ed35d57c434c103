# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A test that never ends, with a child process of a rank. Run by test_orphans.py."""

import subprocess
import threading
from pathlib import Path

import deepspeed.comm as dist
from unit.common import DistributedTest


class TestNeverEnds(DistributedTest):
    world_size = 2

    def test(self):
        if dist.get_rank() == 0:
            subprocess.Popen(["sleep", "600"])
        dist.barrier()
        Path(f"rank{dist.get_rank()}.runs").touch()
        threading.Event().wait()
