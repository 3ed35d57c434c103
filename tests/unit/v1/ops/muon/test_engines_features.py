# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What else a config or a user can ask for: sequence parallelism, low-precision master weights, gradient hooks; and
what is refused together with Muon."""

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference
from unit.v1.ops.muon.test_engines_clients import every_engine, users_muon

MUON = contract.muon_names(SHAPES)
SUPER_OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}
ZENFLOW = {
    "zero_optimization": {
        "offload_optimizer": {
            "device": "cpu"
        },
        "zenflow": {
            "topk_ratio": 0.1,
            "update_interval": 2,
            "select_strategy": "step",
            "select_interval": 4
        }
    }
}


def refused(feature):
    return pytest.mark.support(feature=feature, state="refused")


class TestRefused(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize(
        "engine, sections, key", [
            pytest.param("zero3", SUPER_OFFLOAD, r"offload_optimizer\.super_offload", marks=refused("SuperOffload")),
            pytest.param("zero1", ZENFLOW, "zenflow", marks=refused("ZenFlow")),
            pytest.param("zero2", ZENFLOW, "zenflow", marks=refused("ZenFlow")),
            pytest.param("zero3", ZENFLOW, "zenflow", marks=refused("ZenFlow")),
            *(pytest.param(
                engine, {"compile": {
                    "deepcompile": True
                }}, r"compile\.deepcompile", marks=refused("DeepCompile")) for engine in ("zero1", "zero2", "zero3")),
        ])
    @pytest.mark.parametrize("given", ["config", "optimizer"])
    def test(self, engine, sections, key, given):
        model = ProductModel(SHAPES)
        optimizer = {"optimizer": users_muon(model)} if given == "optimizer" else {}
        with pytest.raises(ValueError, match=f"Muon: .*{key} is on, but .*Remove it from the config"):
            contract.initialize(model, contract.ds_config(engine, "bf16", **sections), **optimizer)


@pytest.mark.support(feature="sequence parallelism (Ulysses)", state="exact")
class TestSequenceParallel(DistributedTest):
    """Two replicas of two sequence ranks: all four share the matrices. The reference has the gradient that DeepSpeed
    gives any optimizer: BF16_Optimizer and ZeRO-1/2 add up what the ranks of a sequence have, ZeRO-3 averages."""
    world_size = 4
    reuse_dist_env = False

    @pytest.mark.parametrize("engine, dtype", [("bf16_optimizer", "bf16"), ("zero1", "bf16"), ("zero2", "fp32"),
                                               ("zero3", "fp32"), ("zero3_offload", "bf16")])
    def test(self, engine, dtype):
        sequence_ranks = 2
        gradients = Gradients(SHAPES, self.world_size, gas=2)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        config = contract.ds_config(engine, dtype, 2)
        parallel_state_sp.initialize_sequence_parallel(sequence_ranks)
        trained = contract.initialize(model, config, mpu=parallel_state_sp)
        assert dist.get_world_size(group=trained.seq_data_parallel_group) == self.world_size
        for step in range(2):
            contract.train_step(trained, gradients, step)
            factor = 1 if engine.startswith("zero3") else sequence_ranks
            mean = {name: gradient * factor for name, gradient in gradients.mean(step).items()}
            reference.step(mean)
        contract.check(trained, reference, steps=2, norm=contract.norm_of(mean))
        assert contract.straddling(trained)
        trained.destroy()


class TestGradientHooks(DistributedTest):
    """A hook of the user's changes the gradient before it is accumulated and reduced."""
    world_size = 2

    @every_engine
    @pytest.mark.support(feature="gradient hooks of the user's", state="exact")
    def test(self, engine, dtype):
        gradients = Gradients(SHAPES, self.world_size, gas=2)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        trained = contract.initialize(model, contract.ds_config(engine, dtype, 2))
        doubled = ["layers.0.weight", "layers.2.weight", "norm.weight"]
        for name, parameter in trained.module.named_parameters():
            if name in doubled:
                parameter.register_hook(lambda gradient: gradient * 2)
        for step in range(2):
            contract.train_step(trained, gradients, step)
            mean = {name: gradient * (2 if name in doubled else 1) for name, gradient in gradients.mean(step).items()}
            reference.step(mean)
        contract.check(trained, reference, steps=2, norm=contract.norm_of(mean))
        trained.destroy()


BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
FP16_MASTERS = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}


class TestBf16Masters(DistributedTest):
    """Master weights in bf16 are rounded after each step, which starts from what they were rounded to. The momentum
    stays fp32."""
    world_size = 2

    @pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
    @pytest.mark.support(feature="`bf16_master_weights_and_grads`, `bf16_optimizer_states`", state="exact")
    def test(self, engine):
        gradients = Gradients(SHAPES, self.world_size)
        model = ProductModel(SHAPES)
        weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
        trained = contract.initialize(model, contract.ds_config(engine, "bf16", **BF16_MASTERS))
        reference = Reference(weights, MUON)
        for step in range(3):
            before = contract.module_weights(trained)
            contract.train_step(trained, gradients, step)
            reference.oracle.weights = [before[name].double() for name in MUON]
            reference.step(gradients.mean(step))
            found = contract.module_weights(trained)
            for name in MUON:
                expected = reference.weights[name]
                # Half a unit in the last place, and what fp32 gets wrong before the rounding.
                bound = expected.abs() * torch.finfo(torch.bfloat16).eps * 0.51 + 1e-6
                assert ((found[name].double() - expected).abs() <= bound).all(), name
        for partition, momentum in contract.momentum_shards(trained):
            assert momentum.dtype == torch.float32
        # DeepSpeed hands the fp32 momentum out in the dtype of the masters: 2.1e-3 measured in bf16.
        contract.below("momenta", contract.largest_distance(contract.momenta(trained, MUON), reference.momenta), 4e-3)
        contract.check_counts(trained, reference, 3)
        trained.destroy()

    @pytest.mark.parametrize("engine", ["zero2_offload", "zero3_offload"])
    @pytest.mark.parametrize("dtype, sections", [("bf16", BF16_MASTERS), ("fp16", FP16_MASTERS)])
    @pytest.mark.support(feature="16-bit master weights with CPU offload", state="refused")
    def test_offload_is_refused(self, engine, dtype, sections):
        """By DeepSpeed, which allows that with its Adam for CPUs alone."""
        config = contract.ds_config(engine, dtype, zero_force_ds_cpu_optimizer=True, **sections)
        with contract.fp16_accepted(), pytest.raises(AssertionError, match="requires .*DeepSpeedCPUAdam"):
            contract.initialize(ProductModel(SHAPES), config)
