# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Muon with bf16 weights and fp32 accumulation, which DeepSpeed gives to BF16_Optimizer and not to a ZeRO optimizer.

Runs on stock DeepSpeed as well, where these are the regressions of https://github.com/deepspeedai/DeepSpeed/pull/8141.
"""

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from unit.common import DistributedTest
from unit.v1.ops.muon import contract, faults
from unit.v1.ops.muon.contract import Gradients, ProductModel

# Neither divides into the partitions of two ranks: one of them lies across the boundary.
SHAPES = {"up.weight": (17, 13), "down.weight": (9, 17), "norm.weight": (5, )}
MUON = contract.muon_names(SHAPES)

# Measured against float64: standard iterates in bf16, at most 1.3e-2 of the way; gram in fp32, 3.1e-6, or, where the
# accelerator has it, in fp16, which rounds 8 times finer than bf16.
TOLERANCES = {"standard": 0.05, "gram": 0.02 if get_accelerator().is_fp16_supported() else 1e-5}
methods = pytest.mark.parametrize("ns_method", ["standard", "gram"])


def build(ns_method, engine="bf16_optimizer", gas=1, clip=0.0):
    model = ProductModel(SHAPES)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = contract.ds_config(engine, "bf16", gas, clip, optimizer={"ns_method": ns_method})
    return contract.initialize(model, config), start


def matrices(engine):
    return contract.master_weights(engine, MUON)


def assert_same(found, expected):
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} differs"


class TestMuonBF16Optimizer(DistributedTest):
    world_size = [1, 2]

    @methods
    def test_irregular_matrices_are_orthogonalized_whole(self, ns_method):
        engine, start = build(ns_method)
        assert type(engine.optimizer).__name__ == "BF16_Optimizer"
        gradients = Gradients(SHAPES, self.world_size)
        for step in range(3):
            contract.train_step(engine, gradients, step)
        faults.assert_muon(matrices(engine), start, gradients, steps=3, clip=0.0, tolerance=TOLERANCES[ns_method])
        if self.world_size == 2:
            partition = engine.optimizer.fp32_groups_flat_partition[0].numel()
            assert any(partition % size for size in (17 * 13, 9 * 17)) and partition < 17 * 13 + 9 * 17
        engine.destroy()

    @methods
    def test_moves_at_accumulation_boundaries_only(self, ns_method):
        engine, start = build(ns_method, gas=3)
        gradients = Gradients(SHAPES, self.world_size, gas=3)
        for step in range(2):
            before = matrices(engine)
            for micro in range(3):
                assert_same(matrices(engine), before)
                factors = gradients.local(step, micro, dist.get_rank())
                engine.backward(engine({name: factor.to(engine.device) for name, factor in factors.items()}))
                engine.step()
            assert not torch.equal(matrices(engine)["up.weight"], before["up.weight"])
        faults.assert_muon(matrices(engine), start, gradients, steps=2, clip=0.0, tolerance=TOLERANCES[ns_method])
        engine.destroy()

    def test_momentum_is_fp32_and_of_the_size_of_the_partition(self):
        engine, _ = build("standard")
        contract.train_step(engine, Gradients(SHAPES, self.world_size), 0)
        partition = engine.optimizer.fp32_groups_flat_partition[0]
        state = engine.basic_optimizer.state[partition]
        assert set(state) == {contract.MOMENTUM}, f"the partition's states are {sorted(state)}: no Newton-Schulz here"
        assert state[contract.MOMENTUM].dtype == torch.float32 and state[contract.MOMENTUM].shape == partition.shape
        engine.destroy()

    @methods
    def test_bf16_accumulation_is_the_same_muon(self, ns_method):
        """One key less in the config, and ZeRO-1 is what trains. Sums of these gradients are exact in both."""
        results = []
        for engine_name in ("bf16_optimizer", "zero1"):
            engine, start = build(ns_method, engine_name, gas=2)
            gradients = Gradients(SHAPES, self.world_size, gas=2)
            for step in range(3):
                contract.train_step(engine, gradients, step)
            faults.assert_muon(matrices(engine), start, gradients, steps=3, clip=0.0, tolerance=TOLERANCES[ns_method])
            results.append((type(engine.optimizer).__name__, matrices(engine)))
            engine.destroy()
        assert [name for name, _ in results] == ["BF16_Optimizer", "DeepSpeedZeroOptimizer"]
        assert_same(results[0][1], results[1][1])

    @methods
    def test_clips_gradients_after_accumulation(self, ns_method):
        engine, start = build(ns_method, gas=3, clip=0.05)
        gradients = Gradients(SHAPES, self.world_size, gas=3)
        for step in range(3):
            contract.train_step(engine, gradients, step)
            norm = gradients.norm(step)
            assert norm > 0.05
            # Measured: 9.2e-8.
            contract.below("norm", abs(float(engine.get_global_grad_norm()) / norm - 1), 1e-6)
        faults.assert_muon(matrices(engine), start, gradients, steps=3, clip=0.05, tolerance=TOLERANCES[ns_method])
        engine.destroy()

    @methods
    def test_replays_exactly_from_a_checkpoint(self, ns_method, tmpdir):
        engine, start = build(ns_method, gas=2, clip=0.5)
        gradients = Gradients(SHAPES, self.world_size, gas=2)
        for step in range(2):
            contract.train_step(engine, gradients, step)
        engine.save_checkpoint(str(tmpdir), tag="two")
        for step in (2, 3):
            contract.train_step(engine, gradients, step)
        straight = matrices(engine), contract.momenta(engine, MUON)
        engine.destroy()
        again, _ = build(ns_method, gas=2, clip=0.5)
        again.load_checkpoint(str(tmpdir), tag="two")
        for step in (2, 3):
            contract.train_step(again, gradients, step)
        assert_same(matrices(again), straight[0])
        assert_same(contract.momenta(again, MUON), straight[1])
        faults.assert_muon(straight[0], start, gradients, steps=4, clip=0.5, tolerance=TOLERANCES[ns_method])
        again.destroy()
