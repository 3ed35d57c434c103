# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The engines' own flags: how gradients are reduced and partitions cut is not seen in the result."""

import pytest
import torch

import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

MUON = contract.muon_names(SHAPES)
FLAGS = pytest.mark.support(feature="`reduce_scatter`, `overlap_comm`, `round_robin_gradients` and other flags",
                            state="exact")

ZERO_1_2 = [
    {
        "reduce_scatter": False
    },
    {
        "reduce_scatter": False,
        "overlap_comm": True
    },
    {
        "use_multi_rank_bucket_allreduce": False
    },
    {
        "use_multi_rank_bucket_allreduce": False,
        "overlap_comm": True
    },
    {
        "overlap_comm": True
    },
    {
        "contiguous_gradients": False
    },
    {
        "contiguous_gradients": False,
        "overlap_comm": True
    },
    {
        "round_robin_gradients": True
    },
    {
        "round_robin_gradients": True,
        "reduce_scatter": False
    },
    {
        "reduce_bucket_size": 150
    },
    {
        "reduce_bucket_size": 150,
        "overlap_comm": True
    },
    {
        "reduce_bucket_size": 150,
        "reduce_scatter": False
    },
    {
        "allgather_bucket_size": 64
    },
    {
        "allgather_partitions": False
    },
    {
        "parameter_alignment": True
    },
]
ZERO_3 = [
    {
        "reduce_scatter": True
    },
    {
        "reduce_scatter": False
    },
    {
        "overlap_comm": True
    },
    {
        "overlap_comm": False
    },
    {
        "contiguous_gradients": False
    },
    {
        "sub_group_size": 100
    },
    {
        "sub_group_size": 1
    },
    {
        "sub_group_size": 100,
        "reduce_scatter": False
    },
    {
        "stage3_param_persistence_threshold": 10**6
    },
    {
        "stage3_param_persistence_threshold": 100
    },
    {
        "reduce_bucket_size": 150
    },
    {
        "stage3_gather_16bit_weights_on_model_save": True
    },
]


def names_of(flags):
    return ",".join(f"{name}={value}" for name, value in flags.items())


def train_and_check(world_size, engine, dtype, **sections):
    """Three steps of two micro-batches with an active clip."""
    gradients = Gradients(SHAPES, world_size, gas=2)
    clip = contract.clip_of("active", gradients, 3)
    model = ProductModel(SHAPES)
    reference = Reference(dict(model.named_parameters()), MUON)
    trained = contract.initialize(model, contract.ds_config(engine, dtype, 2, clip, **sections))
    for step in range(3):
        contract.train_step(trained, gradients, step)
        reference.step(gradients.mean(step), clip)
    contract.check(trained, reference, steps=3, norm=gradients.norm(2))
    assert contract.straddling(trained)
    return trained


class TestZero1And2(DistributedTest):
    world_size = [2, 3]

    @FLAGS
    @pytest.mark.parametrize("flags", ZERO_1_2, ids=names_of)
    @pytest.mark.parametrize("engine, dtype", [("zero1", "bf16"), ("zero2", "bf16")])
    def test(self, engine, dtype, flags):
        train_and_check(self.world_size, engine, dtype, zero_optimization=flags).destroy()

    @pytest.mark.parametrize("flags", [{"round_robin_gradients": True}, {"contiguous_gradients": False}], ids=names_of)
    def test_with_offload(self, flags):
        train_and_check(self.world_size, "zero2_offload", "bf16", zero_optimization=flags).destroy()


class TestZero3(DistributedTest):
    world_size = [2, 3]

    @FLAGS
    @pytest.mark.parametrize("flags", ZERO_3, ids=names_of)
    @pytest.mark.parametrize("engine, dtype", [("zero3", "fp32"), ("zero3", "bf16"), ("zero3_offload", "bf16")])
    def test(self, engine, dtype, flags):
        train_and_check(self.world_size, engine, dtype, zero_optimization=flags).destroy()


@pytest.mark.support(feature="immediate_grad_update", state="exact", engine="BF16_Optimizer")
class TestBF16Optimizer(DistributedTest):
    world_size = [2, 3]

    def test_immediate_grad_update(self):
        train_and_check(self.world_size, "bf16_optimizer", "bf16", bf16={"immediate_grad_update": True}).destroy()


def split_groups(model):
    """The two groups that Muon's config makes, for any optimizer."""
    named = dict(model.named_parameters())
    others = [name for name in named if name not in MUON]
    return [dict(params=[named[name] for name in names]) for names in (MUON, others)]


@pytest.mark.parametrize("engine, flags", [("zero1", {}), ("zero2", {}), ("zero2", {
    "reduce_scatter": False
}), ("zero2", {
    "use_multi_rank_bucket_allreduce": False
}), ("zero3", {}), ("bf16_optimizer", {})])
class TestNothingElseTravels(DistributedTest):
    """Against AdamW with the same groups: the exchange of slices and the norms, as planned, and not one byte more."""
    world_size = 3

    def test(self, engine, flags):
        adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
        gradients = Gradients(SHAPES, self.world_size, gas=2)
        counts = {}
        for optimizer in ("muon", "adamw"):
            model = ProductModel(SHAPES)
            config = contract.ds_config(engine, "bf16", 2, clip=1.0, zero_optimization=flags)
            given = {}
            if optimizer == "adamw":
                config.update(adamw)
                given["model_parameters"] = split_groups(model)
            trained = contract.initialize(model, config, **given)
            contract.train_step(trained, gradients, 0)
            with contract.counted_collectives() as counts[optimizer]:
                contract.train_step(trained, gradients, 1)
            if optimizer == "muon":
                report, = trained.basic_optimizer.plan_reports()
            trained.destroy()
        added = {
            name: tuple(a - b for a, b in zip(counts["muon"][name], counts["adamw"].get(name, (0, 0))))
            for name in counts["muon"]
        }
        received = report.received_bytes[dist.get_rank()]
        expected = {"all_to_all_single": (report.exchanges, received), "all_reduce": (1, report.norm_bytes)}
        contract.equal("collectives", {name: found for name, found in added.items() if found != (0, 0)}, expected)
        assert set(counts["adamw"]) <= set(counts["muon"])
        assert received > 0 and report.norm_bytes % torch.float64.itemsize == 0
