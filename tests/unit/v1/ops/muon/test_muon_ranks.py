# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The optimizer on gloo ranks: partitions bound by hand, no engine."""

from contextlib import contextmanager

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import matrices_of
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from unit.common import DistributedTest
from unit.v1.ops.muon.simulate import gather, scatter

SHAPES = [(17, 13), (9, 17), (64, 3), (1, 40), (40, 1)]
STEPS = 5
KERNELS = [("standard", "float32"), ("gram", "float32"), ("standard", "bfloat16")]


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def layout_of(kind, world_size, shapes=None):
    parameters = [matrices_of(f"layers.{index}.weight", shape) for index, shape in enumerate(shapes or SHAPES)]
    numels = [own[0].numel for own in parameters]
    if kind == "sharded":
        return GroupLayout.sharded(parameters=parameters, parameter_numels=numels, world_size=world_size)
    matrices = [own[0] for own in parameters]
    offsets = [sum(numels[:index]) for index in range(len(numels))]
    if kind == "replicated":
        return GroupLayout.replicate(matrices=matrices,
                                     offsets_in_partition=offsets,
                                     world_size=world_size,
                                     partition_numel=sum(numels))
    return GroupLayout.flat(matrices=matrices,
                            flat_offsets=offsets,
                            world_size=world_size,
                            partition_numel=-(-sum(numels) // world_size))


def bound_optimizer(layout, process_group, rank, **options):
    partition = torch.nn.Parameter(scatter(layout, values(0), rank))
    bias = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = MuonWithAuxAdam([
        dict(params=[partition], use_muon=True, lr=0.05, weight_decay=0.1, **options),
        dict(params=[bias], use_muon=False, lr=0.01)
    ])
    optimizer.bind(partition, layout, process_group)
    return optimizer, partition, bias


def whole_result(**options):
    """Five steps on one rank, unsharded: the weights, and the momenta as matrices."""
    layout = layout_of("flat", 1)
    optimizer, partition, bias = bound_optimizer(layout, None, 0, **options)
    for step in range(STEPS):
        partition.grad = scatter(layout, values(100 + step), 0)
        bias.grad = torch.full((7, ), 0.1 * step)
        optimizer.step()
    momentum = optimizer.state[partition]["momentum_buffer"]
    return gather(layout, [partition.detach()]), gather(layout, [momentum]), bias.detach()


@contextmanager
def counted_collectives():
    """Bytes received and calls of each collective of deepspeed.comm while the block runs."""
    counts = {}
    original = {name: getattr(dist, name) for name in ("all_to_all_single", "all_reduce", "all_gather_object")}

    def count(name, received):
        calls, total = counts.get(name, (0, 0))
        counts[name] = (calls + 1, total + received)

    def all_to_all_single(output, *args, **kwargs):
        count("all_to_all_single", output.numel() * output.element_size())
        return original["all_to_all_single"](output, *args, **kwargs)

    def all_reduce(tensor, *args, **kwargs):
        count("all_reduce", tensor.numel() * tensor.element_size())
        return original["all_reduce"](tensor, *args, **kwargs)

    def all_gather_object(*args, **kwargs):
        count("all_gather_object", 0)
        return original["all_gather_object"](*args, **kwargs)

    for name, replacement in (("all_to_all_single", all_to_all_single), ("all_reduce", all_reduce),
                              ("all_gather_object", all_gather_object)):
        setattr(dist, name, replacement)
    try:
        yield counts
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


@pytest.mark.parametrize("ns_method, ns_dtype", KERNELS)
@pytest.mark.parametrize("kind", ["flat", "sharded", "replicated"])
class TestEqualsOneRank(DistributedTest):
    world_size = [2, 3, 4]
    reuse_dist_env = True

    def test(self, kind, ns_method, ns_dtype):
        layout = layout_of(kind, self.world_size)
        options = dict(ns_method=ns_method, ns_dtype=ns_dtype)
        group = dist.get_world_group()
        optimizer, partition, bias = bound_optimizer(layout, group, dist.get_rank(), **options)
        # Small enough for several rounds, so that exchanges overlap.
        optimizer.limit_workspace(1, max_round_numel=230)
        for step in range(STEPS):
            partition.grad = scatter(layout, values(100 + step), dist.get_rank())
            bias.grad = torch.full((7, ), 0.1 * step)
            with counted_collectives() as counts:
                optimizer.step()
            report, = optimizer.plan_reports()
            calls, received = counts.get("all_to_all_single", (0, 0))
            assert (calls, received) == (report.exchanges, report.received_bytes[dist.get_rank()])
            assert counts.get("all_reduce", (0, 0))[1] == report.norm_bytes
            assert counts.get("all_gather_object", (0, 0))[0] == (1 if step == 0 else 0)
        assert report.exchanges >= 2
        expected, momenta, expected_bias = whole_result(**options)
        ranks = range(self.world_size)
        partitions = [torch.empty(layout.partition_numel) for _ in ranks]
        dist.all_gather(partitions, partition.detach())
        momentum_partitions = [torch.empty(layout.partition_numel) for _ in ranks]
        dist.all_gather(momentum_partitions, optimizer.state[partition]["momentum_buffer"])
        for whole, found in zip(expected + momenta, gather(layout, partitions) + gather(layout, momentum_partitions)):
            assert torch.equal(whole, found)
        assert torch.equal(bias.detach(), expected_bias)
        total = torch.tensor(optimizer.orthogonalizations)
        dist.all_reduce(total)
        assert total == STEPS * len(SHAPES)


class TestBytes(DistributedTest):
    world_size = 4

    def test_the_least_of_a_sharded_group(self):
        """2 * (N/W) * (1 - 1/W) elements of the wire and 8 bytes a matrix, on every rank."""
        shapes = [(32, 24)] * 8
        layout = layout_of("sharded", 4, shapes)
        partition = torch.nn.Parameter(torch.randn(layout.partition_numel))
        optimizer = MuonWithAuxAdam(
            [dict(params=[partition], use_muon=True, ns_method="standard", ns_dtype="bfloat16")])
        optimizer.bind(partition, layout, dist.get_world_group())
        partition.grad = torch.randn(layout.partition_numel)
        optimizer.step()
        with counted_collectives() as counts:
            optimizer.step()
        numel = 8 * 32 * 24
        assert counts["all_to_all_single"] == (2, 2 * numel // 4 * 3 // 4 * 2)
        assert counts["all_reduce"] == (1, 8 * 8)

    def test_nothing_where_no_matrix_straddles(self):
        layout = layout_of("flat", 4, [(8, 8)] * 4)
        partition = torch.nn.Parameter(torch.randn(layout.partition_numel))
        optimizer = MuonWithAuxAdam([dict(params=[partition], use_muon=True)])
        optimizer.bind(partition, layout, dist.get_world_group())
        partition.grad = torch.randn(layout.partition_numel)
        optimizer.step()
        with counted_collectives() as counts:
            optimizer.step()
        assert counts == {}


class TestMismatch(DistributedTest):
    world_size = 3

    def test_other_shapes_on_one_rank_raise_everywhere(self):
        shapes = [(6, 8), (8, 6) if dist.get_rank() == 1 else (4, 12), (5, 5)]
        layout = layout_of("sharded", 3, shapes)
        partition = torch.nn.Parameter(torch.randn(layout.partition_numel))
        optimizer = MuonWithAuxAdam([dict(params=[partition], use_muon=True)])
        optimizer.bind(partition, layout, dist.get_world_group())
        partition.grad = torch.randn(layout.partition_numel)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"ranks disagree on .* at layers\.1\.weight.*rank 1"):
                optimizer.step()

    def test_other_settings_on_one_rank_raise_everywhere(self):
        layout = layout_of("sharded", 3)
        partition = torch.nn.Parameter(torch.randn(layout.partition_numel))
        optimizer = MuonWithAuxAdam([dict(params=[partition], use_muon=True, ns_steps=5 if dist.get_rank() else 6)])
        optimizer.bind(partition, layout, dist.get_world_group())
        partition.grad = torch.randn(layout.partition_numel)
        with pytest.raises(RuntimeError, match="ranks disagree"):
            optimizer.step()

    def test_a_layout_of_another_world_size(self):
        layout = layout_of("sharded", 2)
        partition = torch.nn.Parameter(torch.randn(layout.partition_numel))
        optimizer = MuonWithAuxAdam([dict(params=[partition], use_muon=True)])
        optimizer.bind(partition, layout, dist.get_world_group())
        partition.grad = torch.randn(layout.partition_numel)
        with pytest.raises(RuntimeError, match="a layout over 2 ranks was bound to a process group of 3"):
            optimizer.step()
