# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Optimizers that the user builds, and what is refused before the first step, with what to do instead."""

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.config import DeepSpeedConfigError
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

MUON = contract.muon_names(SHAPES)
EVERY_ENGINE = [(engine, "bf16" if engine == "bf16_optimizer" else "fp32") for engine in contract.ENGINES]
every_engine = pytest.mark.parametrize("engine, dtype", EVERY_ENGINE)
zero_engines = pytest.mark.parametrize("engine, dtype", [pair for pair in EVERY_ENGINE if pair[0] != "stage0"])


def users_muon(model):
    named = dict(model.named_parameters())
    return MuonWithAuxAdam([
        dict(params=[named[name] for name in MUON],
             use_muon=True,
             lr=contract.MUON_LR,
             momentum=contract.BETA,
             weight_decay=contract.WEIGHT_DECAY,
             ns_method="standard",
             ns_dtype="float32"),
        dict(params=[named[name] for name in SHAPES if name not in MUON],
             use_muon=False,
             lr=contract.ADAM_LR,
             betas=(0.9, 0.95),
             eps=1e-10,
             weight_decay=contract.WEIGHT_DECAY)
    ])


@pytest.mark.support(feature="a MuonWithAuxAdam of the user's (`optimizer=`)", state="exact")
class TestUsersMuon(DistributedTest):
    """`MuonWithAuxAdam` given as `optimizer=`: group flags count, in every engine."""
    world_size = [1, 2]

    @every_engine
    def test_is_orthogonalized(self, engine, dtype):
        gradients = Gradients(SHAPES, self.world_size, gas=2)
        clip = contract.clip_of("active", gradients, 3)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        config = contract.ds_config(engine, dtype, 2, clip)
        trained = contract.initialize(model, config, optimizer=users_muon(model))
        for step in range(3):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step), clip)
        contract.check(trained, reference, steps=3, norm=gradients.norm(2))
        trained.destroy()

    @every_engine
    def test_can_be_a_function(self, engine, dtype):
        gradients = Gradients(SHAPES, self.world_size)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        trained = contract.initialize(model,
                                      contract.ds_config(engine, dtype),
                                      optimizer=lambda parameters: users_muon(model),
                                      model_parameters=list(model.parameters()))
        contract.train_step(trained, gradients, 0)
        reference.step(gradients.mean(0))
        contract.check(trained, reference, steps=1, norm=gradients.norm(0))
        trained.destroy()


class TestRefused(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="torch.optim.Muon (`optimizer=`)", state="refused")
    @zero_engines
    def test_muon_of_torch(self, engine, dtype):
        model = torch.nn.Linear(5, 3, bias=False)
        config = contract.ds_config(engine, dtype, zero_allow_untested_optimizer=True)
        with pytest.raises(ValueError, match=r"torch\.optim\.Muon .*\"type\": \"Muon\".*MuonWithAuxAdam"):
            contract.initialize(model, config, optimizer=torch.optim.Muon(model.parameters()))

    @zero_engines
    def test_muon_of_torch_in_a_subclass(self, engine, dtype):

        class Muon(torch.optim.Muon):
            pass

        model = torch.nn.Linear(5, 3, bias=False)
        config = contract.ds_config(engine, dtype, zero_allow_untested_optimizer=True)
        with pytest.raises(ValueError, match=r"torch\.optim\.Muon"):
            contract.initialize(model, config, optimizer=Muon(model.parameters()))

    def test_graph_harvesting(self):
        config = contract.ds_config("bf16_optimizer", "bf16", graph_harvesting=True)
        with pytest.raises(DeepSpeedConfigError, match="Graph harvesting.*'graph_harvesting'"):
            contract.initialize(ProductModel(SHAPES), config)


class TensorParallel:
    """A Megatron-like mpu: all ranks share each layer."""

    def __init__(self):
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        self.all = dist.new_group(list(range(dist.get_world_size())))

    def get_model_parallel_rank(self):
        return dist.get_rank(group=self.all)

    def get_model_parallel_world_size(self):
        return dist.get_world_size(group=self.all)

    def get_model_parallel_group(self):
        return self.all

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.alone


class TestTensorParallel(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="Tensor-parallel shards along an unknown dimension", state="refused")
    @zero_engines
    def test_shards_of_which_nothing_is_known_are_refused(self, engine, dtype):
        model = ProductModel(SHAPES)
        model.products["layers.1.weight"].weight.tensor_model_parallel = True
        with pytest.raises(ValueError, match=r"layers\.1\.weight is .*cut over .*tensor-parallel ranks"):
            contract.initialize(model, contract.ds_config(engine, dtype), mpu=TensorParallel())

    @zero_engines
    def test_whole_matrices_are_not(self, engine, dtype):
        """What is not cut is the same on all tensor-parallel ranks, and each steps it by itself."""
        model = ProductModel(SHAPES)
        model.products["norm.weight"].weight.tensor_model_parallel = True
        trained = contract.initialize(model, contract.ds_config(engine, dtype), mpu=TensorParallel())
        gradients = Gradients(SHAPES, 1)
        reference = Reference(dict(ProductModel(SHAPES).named_parameters()), MUON)
        for step in range(2):
            trained.backward(trained(gradients.local(step, 0, 0)))
            trained.step()
            reference.step(gradients.mean(step))
        masters = contract.master_weights(trained)
        for name in MUON:
            contract.below(name, contract.distance(masters[name], reference.weights[name], reference.start[name]),
                           contract.ROUNDING.weights)
        contract.equal("orthogonalizations", trained.basic_optimizer.orthogonalizations, 2 * len(MUON))
        trained.destroy()
