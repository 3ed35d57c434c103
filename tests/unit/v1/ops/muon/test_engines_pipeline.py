# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Pipeline parallelism: each stage has matrices, a plan and an engine of its own; the norm is that of all stages."""

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import Reference

WIDTHS = [13, 29, 17, 31, 15]
MICRO, GAS, STEPS = 64, 2, 3


class Layer(torch.nn.Linear):
    """Its weights are exact in bf16, as the reference has to start from the same numbers."""

    def __init__(self, index):
        super().__init__(WIDTHS[index], WIDTHS[index + 1], bias=False)
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            self.weight.copy_(torch.randint(-8, 9, self.weight.shape, generator=generator) / 32)

    def forward(self, batch):
        # Linear layers alone would have gradients of the rank of the output, and what is left then is rounding.
        return torch.tanh(super().forward(batch))


def loss_of(output, target):
    return (output.float() - target.float()).square().mean()


def batch(step, micro, replica):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + replica)
    return tuple(torch.randn(MICRO, width, generator=generator).bfloat16() for width in (WIDTHS[0], WIDTHS[-1]))


def reference_step(model, step, replicas):
    """The gradients of the whole model in bf16, averaged over micro-batches and replicas in fp32."""
    total = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for micro in range(GAS):
        for replica in range(replicas):
            model.zero_grad()
            inputs, target = batch(step, micro, replica)
            (loss_of(model(inputs), target) / GAS).backward()
            for name, parameter in model.named_parameters():
                total[name] += parameter.grad.float() / replicas
    return total


@pytest.mark.parametrize("accumulation", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.support(feature="pipeline parallelism", state="exact", engine="BF16_Optimizer")
class TestBF16Optimizer(DistributedTest):
    """Stage 1 accumulates in fp32; stage 0 with bf16 has this wrapper only under a pipeline."""
    world_size = [2, 4]

    def test(self, clip, accumulation):
        replicas = self.world_size // 2
        module = PipelineModule(layers=[LayerSpec(Layer, index) for index in range(4)],
                                num_stages=2,
                                loss_fn=loss_of,
                                partition_method="uniform")
        config = contract.ds_config("bf16_optimizer" if accumulation == "fp32" else "stage0", "bf16", GAS, clip)
        config["train_micro_batch_size_per_gpu"] = MICRO
        engine = deepspeed.initialize(model=module,
                                      config=config,
                                      model_parameters=[p for p in module.parameters() if p.requires_grad])[0]
        assert type(engine.optimizer).__name__ == "BF16_Optimizer"
        whole = torch.nn.Sequential(*(Layer(index) for index in range(4))).bfloat16()
        reference = Reference(dict(whole.named_parameters()), list(dict(whole.named_parameters())))
        replica = engine.grid.get_data_parallel_rank()
        for step in range(STEPS):
            engine.train_batch(iter([batch(step, micro, replica) for micro in range(GAS)]))
            gradients = reference_step(whole, step, replicas)
            norm = contract.norm_of(gradients)
            assert clip == 0 or norm > clip
            contract.below("norm", abs(float(engine.get_global_grad_norm()) / norm - 1), 0.01)
            reference.step(gradients, clip)
            with torch.no_grad():
                for name, parameter in whole.named_parameters():
                    parameter.copy_(reference.weights[name])
        masters = contract.master_weights(engine)
        momenta = contract.momenta(engine, list(masters))
        assert len(masters) == 2
        for name, master in masters.items():
            # Measured, with gradients that are rounded to bf16 in another order: momenta 5.6e-3, weights 8.4e-2.
            contract.below(name, contract.distance(momenta[name], reference.momenta[name]), 0.02)
            way = contract.distance(master, reference.weights[name], reference.start[name])
            contract.below(name, way, 0.15)
        contract.equal("orthogonalizations", contract.over_ranks(engine.basic_optimizer.orthogonalizations), 4 * STEPS)
        dist.barrier()
