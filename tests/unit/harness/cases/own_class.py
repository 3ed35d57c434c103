# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A test with a class of its own among its values. Run by test_import_modes.py under names that nothing can import."""

import os
from dataclasses import dataclass

import pytest

import deepspeed.comm as dist
from unit.common import DistributedFixture, DistributedTest


@dataclass(frozen=True)
class Value:
    number: int


class file_of_ranks(DistributedFixture):
    world_size = 1

    def run(self, class_tmpdir):
        with open(os.path.join(class_tmpdir, "file"), "w") as file:
            file.write(__file__)


class TestValue(DistributedTest):

    class TestInner(DistributedTest):
        world_size = 1

        def test(self):
            assert dist.get_world_size() == 1

    @pytest.mark.parametrize("value", [Value(3)])
    def test(self, value, file_of_ranks, class_tmpdir):
        assert isinstance(value, Value) and value == Value(3)
        with open(os.path.join(class_tmpdir, "file")) as file:
            assert file.read() == __file__
        assert self.world_size == dist.get_world_size() == 2
