# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tensor parallelism as Megatron-LM has it: an mpu, and parameters that say along which dimension they are cut."""

import logging

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import logger
from unit.common import DistributedTest
from unit.v1.ops.muon import contract, experts
from unit.v1.ops.muon.contract import Gradients, ProductModel, Reference

TENSOR, DATA = 2, 2


class Mpu:
    """As Megatron-LM's parallel_state: tensor ranks follow one another, pipeline stages are the outermost."""

    def __init__(self, pipeline=1):
        size = dist.get_world_size()
        stage_size, rank = size // pipeline, dist.get_rank()
        self.pipeline = pipeline
        self.tensor = self._group([list(range(first, first + TENSOR)) for first in range(0, size, TENSOR)])
        self.data = self._group([
            list(range(stage + first, stage + stage_size, TENSOR)) for stage in range(0, size, stage_size)
            for first in range(TENSOR)
        ])
        data_rank = rank % stage_size // TENSOR
        self.model = self._group(
            [[stage + TENSOR * replica + tensor for stage in range(0, size, stage_size) for tensor in range(TENSOR)]
             for replica in range(stage_size // TENSOR)])
        assert dist.get_rank(group=self.data) == data_rank

    @staticmethod
    def _group(several):
        """The group of this rank; all ranks make all groups."""
        return [dist.new_group(ranks) for ranks in several][[dist.get_rank() in ranks
                                                             for ranks in several].index(True)]

    def get_model_parallel_rank(self):
        return dist.get_rank(group=self.model)

    def get_model_parallel_world_size(self):
        return dist.get_world_size(group=self.model)

    def get_model_parallel_group(self):
        return self.model

    def get_tensor_model_parallel_rank(self):
        return dist.get_rank(group=self.tensor)

    def get_tensor_model_parallel_world_size(self):
        return dist.get_world_size(group=self.tensor)

    def get_tensor_model_parallel_group(self):
        return self.tensor

    def get_data_parallel_rank(self):
        return dist.get_rank(group=self.data)

    def get_data_parallel_world_size(self):
        return dist.get_world_size(group=self.data)

    def get_data_parallel_group(self):
        return self.data

    def get_pipeline_model_parallel_world_size(self):
        return self.pipeline


# Shapes of the whole model, and the dimension along which Megatron-LM's layers cut them.
WHOLE = {
    "column.weight": (24, 13),
    "row.weight": (9, 34),
    "bias.weight": (24, ),
    "kernel.weight": (6, 10, 3, 3),
    "dense.weight": (7, 5),
    "norm.weight": (7, ),
    "embed_tokens.weight": (10, 5),
}
CUTS = {"column.weight": 0, "row.weight": 1, "bias.weight": 0, "kernel.weight": 1, "embed_tokens.weight": 0}
MATRICES = ["column.weight", "row.weight", "kernel.weight", "dense.weight"]


def block_of(name, tensor, tensor_rank):
    return tensor.chunk(TENSOR, CUTS[name])[tensor_rank].contiguous() if name in CUTS else tensor


def megatron_model(tensor_rank):
    """A tensor rank's blocks of the whole model, marked as Megatron-LM marks parameters."""
    blocks = {
        name: block_of(name, param.detach(), tensor_rank)
        for name, param in ProductModel(WHOLE).named_parameters()
    }
    model = ProductModel({name: tuple(block.shape) for name, block in blocks.items()})
    for name, param in model.named_parameters():
        with torch.no_grad():
            param.copy_(blocks[name])
        param.tensor_model_parallel = name in CUTS
        param.partition_dim = CUTS.get(name, -1)
        param.partition_stride = 1
    return model


def megatron_row(engine, dtype, name):
    return pytest.param(engine,
                        dtype,
                        marks=pytest.mark.support(feature="Tensor parallelism (Megatron-LM's mpu)",
                                                  engine=name,
                                                  state="exact"))


@pytest.mark.parametrize("engine, dtype", [
    megatron_row("zero1", "fp32", "ZeRO-1"),
    megatron_row("zero2", "fp32", "ZeRO-2"),
    megatron_row("zero3", "fp32", "ZeRO-3"),
    megatron_row("bf16_optimizer", "bf16", "BF16_Optimizer"), ("zero2_offload", "fp32")
])
class TestMegatron(DistributedTest):
    world_size = 4

    def test_two_by_two_equals_the_unsharded_model(self, engine, dtype):
        steps, mpu = 3, Mpu()
        tensor_rank, data_rank = mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank()
        gradients = Gradients(WHOLE, DATA, gas=2)
        clip = contract.clip_of("active", gradients, steps)
        reference = Reference(dict(ProductModel(WHOLE).named_parameters()), MATRICES)
        trained = contract.initialize(megatron_model(tensor_rank), contract.ds_config(engine, dtype, 2, clip), mpu=mpu)
        for step in range(steps):
            for micro in range(2):
                factors = gradients.local(step, micro, data_rank)
                trained.backward(trained({name: block_of(name, f, tensor_rank) for name, f in factors.items()}))
                trained.step()
            reference.step(gradients.mean(step), clip)
        norm = float(trained.get_global_grad_norm())
        contract.below("norm", abs(norm / gradients.norm(steps - 1) - 1), contract.ROUNDING.norm)
        for name, master in contract.master_weights(trained).items():
            expected, start = (block_of(name, whole[name], tensor_rank)
                               for whole in (reference.weights, reference.start))
            contract.below(name, contract.distance(master, expected, start), contract.ROUNDING.weights)
        # What is not cut is stepped by each tensor rank for itself.
        contract.equal("orthogonalizations", contract.over_ranks(trained.basic_optimizer.orthogonalizations),
                       steps * (len(MATRICES) - 1 + TENSOR))
        trained.destroy()


class Records(logging.Handler):

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


ENGINES = [("bf16_optimizer", "bf16"), ("zero1", "fp32"), ("zero2", "fp32"), ("zero3", "fp32")]


class TestShard(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="\"tensor_parallel\": \"shard\"", state="each shard by itself, one warning")
    @pytest.mark.parametrize("engine, dtype", ENGINES)
    def test_warns_once(self, engine, dtype):
        mpu = Mpu()
        model = megatron_model(mpu.get_tensor_model_parallel_rank())
        named = dict(model.named_parameters())
        config = contract.ds_config(engine, dtype, optimizer={"tensor_parallel": "shard"})
        logger.warning_once.cache_clear()
        records = Records()
        logger.addHandler(records)
        try:
            trained = contract.initialize(model,
                                          config,
                                          mpu=mpu,
                                          model_parameters=[{
                                              "params": [named[name]]
                                          } for name in ("column.weight", "row.weight")])
        finally:
            logger.removeHandler(records)
        found = [message for message in records.messages if "orthogonalizes each tensor-parallel shard" in message]
        contract.equal("warnings", len(found), 1 if dist.get_rank() == 0 else 0)
        trained.destroy()


class SlicedLinear(contract.LinearProduct):
    """A pipeline's layer that is cut over tensor ranks."""

    def __init__(self):
        super().__init__((6, 5))
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 0


class TestRefused(DistributedTest):
    world_size = 4

    @pytest.mark.support(feature="Tensor with pipeline parallelism", state="refused")
    @pytest.mark.parametrize("engine, dtype", ENGINES[:2])
    def test_pipeline(self, engine, dtype):
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=TENSOR, num_dp=1)
        layers = [LayerSpec(SlicedLinear) for _ in range(2)]
        module = PipelineModule(layers, topology=topology, partition_method="uniform")
        message = r"data x tensor ranks are 2 of 4 ranks.*pipeline or expert parallelism.*\"shard\""
        with pytest.raises(ValueError, match=message):
            contract.initialize(module, contract.ds_config(engine, dtype))

    @pytest.mark.support(feature="Tensor with expert parallelism", state="refused")
    @pytest.mark.parametrize("engine, dtype", ENGINES[:3])
    def test_experts_that_are_cut(self, engine, dtype):
        mpu = Mpu()
        model = experts.ExpertModel(2, enable_expert_tensor_parallelism=True)
        for name, param in model.by_global_name.items():
            param.tensor_model_parallel = experts.expert_of(name) >= 0
            param.partition_dim = 0
        with pytest.raises(ValueError, match=r"data x tensor ranks are 2 of 4 ranks.*pipeline or expert parallelism"):
            contract.initialize(model, contract.ds_config(engine, dtype), mpu=mpu)

    @pytest.mark.support(feature="Tensor-parallel shards of different sizes", state="refused")
    @pytest.mark.parametrize("engine, dtype", ENGINES)
    def test_uneven_shards(self, engine, dtype):
        mpu = Mpu()
        rows = 5 + 3 * mpu.get_tensor_model_parallel_rank()
        model = ProductModel({"column.weight": (rows, 13)})
        for param in model.parameters():
            param.tensor_model_parallel, param.partition_dim = True, 0
        with pytest.raises(ValueError, match="uneven tensor-parallel shards are supported with .* \"shard\" only"):
            contract.initialize(model, contract.ds_config(engine, dtype), mpu=mpu)

    @pytest.mark.support(feature="Tensor-parallel shards along an unknown dimension", engine="ZeRO-1", state="refused")
    @pytest.mark.parametrize("shape, dim", [((6, 13), -1), ((6, 13), 2), ((6, 5, 3, 3), 2), ((6, 13), None)])
    def test_unknown_dimension(self, shape, dim):
        model = ProductModel({"column.weight": shape})
        for param in model.parameters():
            param.tensor_model_parallel, param.partition_dim = True, dim
        with pytest.raises(ValueError, match=f"column.weight is cut over tensor-parallel ranks along dimension {dim}"):
            contract.initialize(model, contract.ds_config("zero1"), mpu=Mpu())

    @pytest.mark.support(feature="Tensor parallelism (Megatron-LM's mpu)", engine="stage 0", state="refused")
    def test_stage_0(self):
        mpu = Mpu()
        with pytest.raises(ValueError, match="stage 0 does not support tensor parallelism"):
            contract.initialize(megatron_model(mpu.get_tensor_model_parallel_rank()),
                                contract.ds_config("stage0"),
                                mpu=mpu)
