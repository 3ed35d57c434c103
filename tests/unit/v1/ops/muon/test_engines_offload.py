# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Offload of ZeRO-3 to the host: in part, in many sub-groups, pinned or not, with DeepSpeed's own Adam on the CPU."""

from unittest import mock

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

STEPS = 3
MUON = contract.muon_names(SHAPES)
# One parameter each, or a few small ones, on any number of ranks.
MANY_SUB_GROUPS = {"sub_group_size": 20}


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

    def test_schedules_and_checkpoints_reach_what_stays(self, tmpdir):
        """Adam's states of sub-groups on the accelerator are saved with the others, and their rate is the group's."""
        folder = str(tmpdir)
        gradients = Gradients(SHAPES, self.world_size)
        config = contract.ds_config("zero3",
                                    "bf16",
                                    optimizer={
                                        "ns_dtype": "float32",
                                        "torch_adam": False
                                    },
                                    **offloaded(ratio=0.0))
        ends = []
        with mock.patch.object(get_accelerator(), "_name", "cpu:0"):
            for resumed in (False, True):
                engine = contract.initialize(ProductModel(SHAPES), config)
                assert type(engine.basic_optimizer.aux_optimizer) is DeepSpeedCPUAdam
                if resumed:
                    engine.load_checkpoint(folder)
                for step in range(1 if resumed else 0, 2):
                    if step:
                        for group in engine.basic_optimizer.param_groups:
                            group["lr"] *= 0.5
                    contract.train_step(engine, gradients, step)
                    if step == 0:
                        engine.save_checkpoint(folder)
                ends.append(bits(engine))
                engine.destroy()
        for name, found in ends[1].items():
            assert torch.equal(found, ends[0][name]), name


class TestSubGroups(DistributedTest):
    world_size = [1, 3]

    @pytest.mark.parametrize("pin_memory", [True, False])
    @pytest.mark.parametrize("engine, options", [
        ("zero2", {
            "offload_optimizer": {
                "device": "cpu"
            }
        }),
        ("zero3", {
            "offload_optimizer": {
                "device": "cpu"
            },
            **MANY_SUB_GROUPS
        }),
        ("zero3", {
            "offload_optimizer": {
                "device": "cpu"
            },
            "offload_param": {
                "device": "cpu"
            },
            **MANY_SUB_GROUPS
        }),
    ],
                             ids=["zero2", "zero3", "zero3_and_parameters"])
    def test(self, engine, options, pin_memory):
        options = {
            key: {
                **value, "pin_memory": pin_memory
            } if isinstance(value, dict) else value
            for key, value in options.items()
        }
        run(engine, "bf16", zero_optimization=options)[0].destroy()


# Measured: 1.9e-5 of the way, which is Adam's at its first step (eps in another place); momenta as elsewhere.
CPU_ADAM = contract.Tolerances(weights=1e-4, momenta=5e-7, norm=5e-7)


@pytest.mark.support(feature="DeepSpeedCPUAdam for the auxiliary groups", engine="all", state="exact")
class TestCPUAdam(DistributedTest):
    """The Adam that zero_force_ds_cpu_optimizer stands for: DeepSpeed's kernel, compiled at first use."""
    world_size = 2

    @pytest.mark.parametrize("engine", ["zero1_offload", "zero2_offload", "zero3_offload"])
    def test(self, engine):
        trained, _ = run(engine,
                         "bf16",
                         CPU_ADAM,
                         zero_force_ds_cpu_optimizer=True,
                         optimizer={
                             "ns_dtype": "float32",
                             "torch_adam": False
                         })
        assert type(trained.basic_optimizer.aux_optimizer) is DeepSpeedCPUAdam
        trained.destroy()
