# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tests that go wrong in every way a rank can, each followed by one that must still run. Run by test_failures.py."""

import ctypes
import os
import signal
import threading
import time

import pytest
import torch

import deepspeed.comm as dist
from unit.common import DistributedTest


class TestGoesWrong(DistributedTest):
    world_size = 2

    def test_raises(self):
        expected = dist.get_rank()
        print(f"printed by rank {expected}")
        assert expected == 0
        dist.barrier()

    def test_after_raises(self):
        dist.barrier()

    def test_raises_on_both(self):
        if dist.get_rank() == 0:
            time.sleep(0.5)
        raise ValueError(f"own error of rank {dist.get_rank()}")

    def test_exits(self):
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    def test_after_exits(self):
        dist.barrier()

    def test_is_killed(self):
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_after_is_killed(self):
        dist.barrier()

    def test_crashes(self):
        if dist.get_rank() == 0:
            ctypes.string_at(0)
        dist.barrier()

    def test_after_crashes(self):
        dist.barrier()

    def test_peer_does_not_notice(self):
        if dist.get_rank() == 1:
            raise KeyError("the only cause")
        threading.Event().wait()

    def test_after_peer_does_not_notice(self):
        dist.barrier()

    def test_skips(self):
        pytest.skip("skipped inside")

    def test_after_skips(self):
        dist.barrier()

    def test_skips_on_one(self):
        if dist.get_rank() == 1:
            pytest.skip("only rank 1 wants to skip")
        dist.barrier()

    def test_after_skips_on_one(self):
        dist.barrier()

    def test_xfails(self):
        pytest.xfail("known")

    def test_breaks_what_tidies_up(self):

        def refuse():
            raise OSError("no way back")

        dist.destroy_process_group = refuse

    def test_after_breaks_what_tidies_up(self):
        dist.barrier()

    def test_dies_when_it_has_passed(self):
        threading.Timer(1, os._exit, [5]).start()

    @pytest.fixture
    def after_its_death(self):
        time.sleep(2)

    def test_after_dies_when_it_has_passed(self, after_its_death):
        dist.barrier()

    def test_wants_what_cannot_be_sent(self, request):
        raise AssertionError("not reached")

    @pytest.mark.timeout(3, method="signal")
    def test_meets_pytest_timeout(self):
        threading.Event().wait()

    def test_after_meets_pytest_timeout(self):
        dist.barrier()


class TestHangs(DistributedTest):
    world_size = 3
    exec_timeout = 3

    def test_in_a_collective(self):
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(4))

    def test_after_in_a_collective(self):
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [3.0] * 4
