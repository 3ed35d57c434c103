# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks stay from test to test, and what a test changes in them does not."""

import gc
import logging
import os
import random
import threading
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import groups
from unit.common import DistributedTest
from unit.ranks.pool import MOST_THREADS

_KEPT = []


def _leave(directory, name: str, value: object) -> None:
    Path(directory, f"{name}.{dist.get_rank()}").write_text(str(value))


def _left(directory, name: str) -> str:
    return Path(directory, f"{name}.{dist.get_rank()}").read_text()


class TestRanksStay(DistributedTest):
    world_size = 2

    def test_first(self, class_tmpdir):
        _leave(class_tmpdir, "pid", os.getpid())

    @pytest.mark.world_size([3, 1, 2])
    def test_same_processes_serve_other_world_sizes(self, class_tmpdir):
        if dist.get_rank() < 2:
            assert _left(class_tmpdir, "pid") == str(os.getpid())
        dist.barrier()

    def test_ranks_are_processes_of_their_own(self, class_tmpdir):
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        assert pids[0] != pids[1] and os.getppid() != os.getpid()


class TestRankWithManyThreads(DistributedTest):
    world_size = 2

    def test_first(self, class_tmpdir):
        _leave(class_tmpdir, "pid", os.getpid())
        if dist.get_rank() == 1:
            for _ in range(MOST_THREADS):
                threading.Thread(target=time.sleep, args=(1000, ), daemon=True).start()

    def test_is_replaced(self, class_tmpdir):
        assert (_left(class_tmpdir, "pid") == str(os.getpid())) == (dist.get_rank() == 0)


class TestGroup(DistributedTest):
    world_size = 2

    def test_first(self, class_tmpdir):
        _KEPT[:] = [dist.get_world_group()]
        _KEPT.append(dist.new_group([0, 1]))
        groups.mpu = object()
        groups._EXPERT_PARALLEL_GROUP["left behind"] = _KEPT[1]
        dist.configure(enabled=True, prof_all=True)
        dist.all_reduce(torch.ones(1))

    def test_is_a_new_one(self):
        assert _KEPT and dist.get_world_group() is not _KEPT[0], "the module is the one of the test before"
        assert groups.mpu is None and groups._EXPERT_PARALLEL_GROUP == {}
        assert not dist.comm.comms_logger.enabled and not dist.comm.comms_logger.comms_dict
        assert len(torch.distributed.distributed_c10d._world.pg_map) == 1


class TestReusedGroup(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_first(self, class_tmpdir):
        _KEPT[:] = [dist.get_world_group()]
        _leave(class_tmpdir, "port", os.environ["MASTER_PORT"])

    def test_is_the_same(self, class_tmpdir):
        assert dist.get_world_group() is _KEPT[0]
        assert _left(class_tmpdir, "port") == os.environ["MASTER_PORT"]
        dist.barrier()

    @pytest.mark.world_size(3)
    def test_is_another_for_another_world_size(self):
        assert dist.get_world_size() == 3
        dist.barrier()

    def test_is_another_after_that(self):
        assert dist.get_world_group() is not _KEPT[0]
        dist.barrier()


class TestReusedGroupOfAnotherKind(DistributedTest):
    world_size = 2
    reuse_dist_env = True
    init_distributed = False

    def test_is_not_the_one_before(self):
        assert not dist.is_initialized()


class TestSettings(DistributedTest):
    world_size = 2

    def test_first(self, class_tmpdir):
        _leave(class_tmpdir, "settings", _settings())
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        torch.autograd.set_detect_anomaly(True)
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("medium")
        os.environ["LEFT_BEHIND"] = "1"
        os.environ.pop("HOME", None)
        os.chdir("/")
        warnings.simplefilter("error")
        logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
        checkpointing.configure(None, partition_activations=True)
        deepspeed.runtime.zero.partition_parameters.zero_init_context = 3
        torch.empty = None
        assert str(_settings()) != _left(class_tmpdir, "settings")

    def test_are_as_before(self, class_tmpdir):
        assert str(_settings()) == _left(class_tmpdir, "settings")
        assert not checkpointing.PARTITION_ACTIVATIONS and not checkpointing.deepspeed_checkpointing_enabled
        assert deepspeed.runtime.zero.partition_parameters.zero_init_context == 0
        assert torch.empty(2).shape == (2, )


def _settings() -> tuple:
    return (torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.get_num_threads(),
            torch.get_float32_matmul_precision(), os.environ.get("LEFT_BEHIND"), os.environ.get("HOME"), os.getcwd(),
            len(warnings.filters), logging.getLogger("DeepSpeed").level)


class TestRandomStates(DistributedTest):
    world_size = 2

    def test_first(self, class_tmpdir):
        _leave(class_tmpdir, "drawn", self._draw())
        torch.manual_seed(7)

    def test_are_as_before(self, class_tmpdir):
        assert _left(class_tmpdir, "drawn") == str(self._draw())

    def _draw(self) -> tuple:
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


class TestMemory(DistributedTest):
    world_size = 1

    def test_first(self):

        class Node:
            pass

        node = Node()
        node.itself = node
        gc.disable()
        _KEPT[:] = [weakref.ref(node)]

    def test_cycles_of_the_last_test_are_collected(self):
        assert gc.isenabled() and _KEPT[0]() is None
