# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Offload of ZeRO-3 to the host in part, in many sub-groups."""

from unittest import mock

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

STEPS = 3
MUON = contract.muon_names(SHAPES)
# Between one and a few parameters each.
MANY_SUB_GROUPS = {"sub_group_size": 60}


def run(engine_name, dtype, tolerances=contract.ROUNDING, **sections):
    """Three steps against the reference. Returns the engine, and what it received in the last step's all-to-alls."""
    gradients = Gradients(SHAPES, dist.get_world_size(), 2)
    clip = contract.clip_of("active", gradients, STEPS)
    model = ProductModel(SHAPES)
    reference = Reference(dict(model.named_parameters()), MUON)
    engine = contract.initialize(model, contract.ds_config(engine_name, dtype, 2, clip, **sections))
    for step in range(STEPS):
        with contract.counted_collectives() as counts:
            contract.train_step(engine, gradients, step)
        reference.step(gradients.mean(step), clip)
    contract.check(engine, reference, steps=STEPS, norm=gradients.norm(STEPS - 1), tolerances=tolerances)
    return engine, counts.get("all_to_all_single", (0, 0))[1]


def bits(engine):
    return {
        **contract.master_weights(engine),
        **{
            f"{name} m": m
            for name, m in contract.momenta(engine, MUON).items()
        }
    }


def offloaded(**options):
    return {"zero_optimization": {"offload_optimizer": {"device": "cpu", **options}, **MANY_SUB_GROUPS}}


@pytest.mark.support(feature="partial CPU offload (ratio)", engine="ZeRO-3", state="exact")
class TestPartialOffload(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7])
    def test_the_same_bits_as_in_full(self, ratio):
        """On a CPU both places are one; a name of their own has the engine treat them apart."""
        with mock.patch.object(get_accelerator(), "_name", "cpu:0"):
            engine, received = run("zero3", "bf16", **offloaded(ratio=ratio))
        devices = list(engine.optimizer.subgroup_to_device.values())
        assert len(devices) > 4
        contract.equal("sub-groups on the accelerator", devices.count("cpu:0"), int((1 - ratio) * len(devices)))
        rank = dist.get_rank()
        planned = sum(report.received_bytes[rank] for report in engine.basic_optimizer.plan_reports())
        contract.equal("received bytes", received, planned)
        whole, _ = run("zero3", "bf16", **offloaded())
        expected = bits(whole)
        for name, found in bits(engine).items():
            assert torch.equal(found, expected[name]), name
        engine.destroy()
        whole.destroy()
