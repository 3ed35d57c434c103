# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A parameter that has no gradient in a step is stepped with a zero one, in every engine, with every optimizer."""

from unittest import mock

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference
from unit.v1.ops.muon.test_engines_parameters import train_and_check

CASES = [(engine, dtype) for engine in contract.ENGINES
         for dtype in (["bf16"] if engine == "bf16_optimizer" else ["fp32", "bf16"])]
every_case = pytest.mark.parametrize("engine, dtype", CASES)
# Where the parts that DeepSpeed keeps from step to step had to be cleared.
KEEPING = ["zero1_offload", "zero2_offload", "zero3", "zero3_offload"]
SOME = ("layers.0.weight", "layers.2.weight", "norm.weight")


@pytest.mark.support(feature="unused parameters", engine="all", state="exact")
class TestUnused(DistributedTest):
    world_size = [1, 2]

    @every_case
    def test_in_some_micro_batches(self, engine, dtype):
        """One micro-batch uses each of these, the first, the second or the last."""
        only = {name: micro for micro, name in enumerate(SOME)}

        def unused(name, step, micro, rank):
            return only.get(name, micro) != micro

        train_and_check(engine, dtype, SHAPES, gas=3, unused=unused).destroy()

    @every_case
    def test_in_some_steps(self, engine, dtype):
        """Momentum goes on by itself, as with every optimizer of DeepSpeed's flat partitions."""
        # Without ZeRO, torch's Adam passes over a parameter without a gradient.
        some = SOME[:2] if engine == "stage0" else SOME

        def unused(name, step, micro, rank):
            return name in some and (step + some.index(name)) % 2 == 0

        train_and_check(engine, dtype, SHAPES, gas=2, unused=unused).destroy()

    @pytest.mark.parametrize("engine", KEEPING)
    def test_after_a_discarded_step(self, engine):
        """The infinite gradient of a parameter that is not used any more does not discard the steps to come."""
        gradients = Gradients(SHAPES, self.world_size, 2, unused=lambda name, step, *where: name in SOME and step > 1)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), contract.muon_names(SHAPES))

        def overflow(factors, micro):
            factors["layers.0.weight"].fill_(float("inf"))

        with contract.fp16_accepted():
            trained = contract.initialize(model, contract.ds_config(engine, "fp16", 2))
            for step in range(4):
                contract.train_step(trained, gradients, step, overflow if step == 1 else None)
                if step != 1:
                    reference.step(gradients.mean(step))
            contract.equal("discarded steps", trained.skipped_steps, 1)
            contract.check(trained, reference, steps=3, norm=gradients.norm(3))
        trained.destroy()

    @pytest.mark.parametrize("engine", KEEPING)
    def test_other_optimizers(self, engine):
        """Stock DeepSpeed's fault was one of the engines, not of Muon: SGD moved what had no gradient."""
        gradients = Gradients(SHAPES, self.world_size, 2, unused=lambda name, step, *where: name in SOME and step > 0)
        model = ProductModel(SHAPES)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        config = contract.ds_config(engine, "fp32", 2, zero_allow_untested_optimizer=True)
        trained = contract.initialize(model, config, optimizer=optimizer)
        for step in range(3):
            contract.train_step(trained, gradients, step)
        means = [gradients.mean(step) for step in range(3)]
        for name, weight in contract.master_weights(trained).items():
            expected = start[name] - 0.5 * sum(mean[name] for mean in means)
            # Multiples of a power of two: exact.
            assert torch.equal(weight, expected), name
        trained.destroy()

    @pytest.mark.parametrize("engine", ["zero2", "zero2_offload", "zero3", "zero3_offload"])
    def test_windows_that_the_caller_ends(self, engine):
        """Without managed_gradient_accumulation, step() alone says where a step ends."""
        gradients = Gradients(SHAPES,
                              self.world_size,
                              2,
                              unused=lambda name, step, micro, rank: name in SOME and (step == 1 or micro == step % 2))
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), contract.muon_names(SHAPES))
        config = contract.ds_config(engine, "fp32", 2, managed_gradient_accumulation=False)
        trained = contract.initialize(model, config)
        for step in range(3):
            for micro in range(2):
                factors = gradients.local(step, micro, dist.get_rank())
                trained.backward(trained(factors))
            trained.step()
            reference.step(gradients.mean(step))
        contract.check(trained, reference, steps=3, norm=gradients.norm(2))
        trained.destroy()

    @pytest.mark.parametrize("engine", KEEPING)
    def test_its_gradient_reads_as_zero(self, engine):
        gradients = Gradients(SHAPES, self.world_size, unused=lambda name, step, *where: name in SOME and step > 0)
        trained = contract.initialize(ProductModel(SHAPES), contract.ds_config(engine))
        contract.train_step(trained, gradients, 0)
        trained.backward(trained(gradients.local(1, 0, dist.get_rank())))
        mean = gradients.mean(1)
        for name, parameter in trained.module.named_parameters():
            assert torch.equal(safe_get_full_grad(parameter).cpu(), mean[name]), name
        trained.destroy()

    @pytest.mark.parametrize("engine", KEEPING)
    def test_costs_nothing_where_all_are_used(self, engine):
        gradients = Gradients(SHAPES, self.world_size, 2)
        trained = contract.initialize(ProductModel(SHAPES), contract.ds_config(engine, "fp32", 2))
        contract.train_step(trained, gradients, 0)
        cleared = []
        with mock.patch.object(torch.Tensor, "zero_", lambda tensor: cleared.append(tensor.shape)):
            contract.train_step(trained, gradients, 1)
        contract.equal("tensors cleared", cleared, [])
        trained.destroy()
