# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a test method finds on a rank: world size, environment, values of parameters and fixtures."""

import os
from pathlib import Path

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from unit.common import (DistributedFixture, DistributedTest, allclose_on_all_ranks, enable_determinism,
                         get_master_port, get_test_path, preferred_dtype, reduce_boolean_flags)


@pytest.fixture(params=["amber", "blue"])
def color(request):
    return request.param


def _write(directory, name: str, text: str) -> None:
    Path(directory, f"{name}.{dist.get_rank()}").write_text(text)


class TestWorldSize(DistributedTest):
    world_size = [1, 4, 2]

    def test_list_makes_one_test_each(self, request_id):
        assert dist.get_world_size() == self.world_size
        assert f"[ranks{self.world_size}]" in request_id
        total = torch.ones(3, device=get_accelerator().current_device_name()) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        assert total.tolist() == [self.world_size * (self.world_size + 1) / 2] * 3

    @pytest.mark.world_size(3)
    def test_mark_comes_before_the_class(self):
        assert dist.get_world_size() == self.world_size == 3

    @pytest.mark.parametrize("world_size", [2, 1])
    def test_parameter_comes_before_both(self, world_size):
        assert dist.get_world_size() == self.world_size == world_size

    @pytest.fixture
    def request_id(self, request):
        return request.node.nodeid


class TestEnvironment(DistributedTest):
    world_size = 2

    def test_of_a_launched_rank(self):
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR")
        assert [os.environ[name] for name in names] == [rank, rank, size, size, "127.0.0.1"]
        assert int(os.environ["MASTER_PORT"]) > 0
        assert os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
        assert dist.get_local_rank() == dist.get_rank()

    def test_of_pytest_is_taken_over(self, variable):
        assert os.environ[variable] == "from pytest"
        assert os.getcwd() == os.environ["EXPECTED_DIRECTORY"]

    @pytest.fixture
    def variable(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HARNESS_VARIABLE", "from pytest")
        monkeypatch.setenv("EXPECTED_DIRECTORY", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        return "HARNESS_VARIABLE"


class TestWithoutGroup(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_group_is_left_to_the_test(self):
        assert not dist.is_initialized()
        dist.init_distributed(get_accelerator().communication_backend_name())
        assert dist.get_world_size() == 2

    def test_group_of_the_test_is_gone(self):
        assert not dist.is_initialized() and not torch.distributed.is_initialized()
        torch.distributed.init_process_group(get_accelerator().communication_backend_name())

    def test_group_made_without_deepspeed_is_gone(self):
        assert not dist.is_initialized() and not torch.distributed.is_initialized()


class TestWithoutEnvironment(DistributedTest):
    world_size = 1
    init_distributed = False
    set_dist_env = False

    def test_no_variables(self):
        assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ


@pytest.mark.parametrize("number, shape", [(7, (3, 5))])
class TestValues(DistributedTest):
    world_size = 2

    @pytest.fixture
    def doubled(self, number):
        return 2 * number

    def setup_method(self, method):
        self.set_up = method.__name__

    @pytest.mark.parametrize("dtype", [torch.bfloat16])
    def test_of_parameters_and_fixtures(self, number, shape, dtype, doubled, color, default="not a fixture"):
        assert (number, shape, dtype, doubled, default) == (7, (3, 5), torch.bfloat16, 14, "not a fixture")
        assert color in ("amber", "blue")

    def test_of_setup_method(self, number, shape):
        assert self.set_up == "test_of_setup_method"

    def test_of_directories_are_the_same_on_all_ranks(self, number, shape, tmpdir, tmp_path, class_tmpdir):
        for directory in (tmpdir, tmp_path, class_tmpdir):
            _write(directory, "rank", "here")
            dist.barrier()
            assert {path.name for path in Path(directory).glob("rank.*")} == {"rank.0", "rank.1"}
            dist.barrier()


class _written_by(DistributedFixture):

    def run(self, class_tmpdir, color):
        assert dist.get_world_size() == self.world_size
        _write(class_tmpdir, f"{type(self).__name__}-{color}", color)


class written_by_four(_written_by):
    world_size = 4


class written_by_one(_written_by):
    world_size = 1


class TestDistributedFixture(DistributedTest):
    world_size = 2

    def test_ran_before_on_its_own_ranks(self, written_by_four, written_by_one, class_tmpdir, color):
        for name, size in (("written_by_four", 4), ("written_by_one", 1)):
            found = {path.name: path.read_text() for path in Path(class_tmpdir).glob(f"{name}-{color}.*")}
            assert found == {f"{name}-{color}.{rank}": color for rank in range(size)}
        assert dist.get_world_size() == 2


class TestHelpers(DistributedTest):
    world_size = 2

    def test_reduce_boolean_flags(self):
        first = dist.get_rank() == 0
        assert reduce_boolean_flags(True) and not reduce_boolean_flags(first) and reduce_boolean_flags(first, any)

    def test_allclose_fails_on_all_ranks_together(self):
        expected = torch.zeros(3)
        allclose_on_all_ranks(torch.full((3, ), 1e-9), expected, rtol=0, atol=1e-6)
        with pytest.raises(AssertionError, match="must be zero"):
            allclose_on_all_ranks(torch.full((3, ), float(dist.get_rank())), expected, "must be zero")

    def test_enable_determinism(self):

        @enable_determinism(5)
        def draw():
            assert torch.are_deterministic_algorithms_enabled()
            return torch.rand(1).item()

        before = torch.get_rng_state()
        assert draw() == draw()
        assert torch.equal(torch.get_rng_state(), before) and not torch.are_deterministic_algorithms_enabled()
        drawn = torch.zeros(2)
        dist.all_gather_into_tensor(drawn, torch.tensor([draw()]))
        assert drawn[0] != drawn[1], "the seed depends on the rank"


def test_paths_ports_and_dtype():
    assert Path(get_test_path("common.py")).is_file()
    assert 29500 <= int(get_master_port()) < 30500 + 1000 * 64
    assert preferred_dtype() in (torch.bfloat16, torch.float16, torch.float32)
