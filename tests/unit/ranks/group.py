# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The process group of a test in a rank."""

import os
from typing import Any

import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from unit.ranks.messages import Meeting

_SHARED_MEMORY_OP = "deepspeed_shm_comm"


def forbid_shared_memory_op() -> None:
    """Keeps DeepSpeed's CPU shared-memory all-reduce out of this process: all collectives go through the backend.

    That operator keeps the first world size and the first peers it saw for the life of the process, so a rank that
    serves another group would wait for processes that are not there.
    """
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False


class Group:
    """Joins and leaves process groups for one rank. The class attributes of ``test`` say what it wants."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def join(self, test: Any, meeting: Meeting) -> None:
        """Sets the environment variables of a launched rank and, where the test wants it, the process group.

        A standing group is used as it is. Raises what ``deepspeed.init_distributed`` raises.
        """
        if test.set_dist_env:
            os.environ.update(self._launch_variables(meeting))
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            accelerator.set_device(self._rank)
        if test.init_distributed and not meeting.standing:
            deepspeed.init_distributed(dist_backend=test.backend,
                                       init_method=meeting.init_method,
                                       rank=self._rank,
                                       world_size=meeting.world_size)
            dist.barrier()

    def leave(self) -> None:
        """Ends every process group of this process, also one that the test made without DeepSpeed."""
        if torch.distributed.is_initialized() and not dist.is_initialized():
            # DeepSpeed adopts it, so that there is one way to end a group and to drop what DeepSpeed remembers of it.
            deepspeed.init_distributed(verbose=False)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _launch_variables(self, meeting: Meeting) -> dict:
        rank, size = str(self._rank), str(meeting.world_size)
        return {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": meeting.master_port,
        }
