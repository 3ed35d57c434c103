# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO++: a second copy of the weights on each node (hpZ), weights and gradients that are quantized on the way.

DeepSpeed's quantizer runs on CUDA alone. Here a stand-in rounds in its place (quantizer.py): what these tests show
of qwZ and qgZ is all but the kernel: Muon steps the fp32 masters with the gradients that the engine has reduced.
"""

import pytest

import deepspeed.comm as dist
from deepspeed.utils import groups, safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference
from unit.v1.ops.muon.quantizer import quantizing

# The quantizer wants whole groups of 8 on each of 4 ranks.
EIGHTS = {
    "layers.0.weight": (32, 24),
    "layers.1.weight": (16, 40),
    "layers.2.weight": (64, 8),
    "norm.weight": (32, ),
    "embed_tokens.weight": (16, 16),
}
STEPS = 3


def secondary_group():
    """Ranks that hold a whole copy of the weights together, or None."""
    group = groups._get_zero_param_intra_parallel_group()
    return None if group is None else dist.get_all_ranks_from_group(group)


def gradients_of(engine):
    """Whole gradients as the engine has reduced them, before clipping. A collective."""
    return {name: safe_get_full_grad(parameter).cpu().float() for name, parameter in engine.module.named_parameters()}


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._ALL_TO_ALL_GROUP.clear()


@pytest.mark.support(feature="ZeRO++ hpZ (zero_hpz_partition_size)", engine="ZeRO-3", state="exact")
class TestSecondaryPartitions(DistributedTest):
    """Forward and backward gather from a node's copy; masters, gradients and momenta are cut over all ranks."""
    world_size = 4

    @pytest.mark.parametrize("dtype, sections", [("fp32", {}), ("bf16", {}),
                                                 ("bf16", {
                                                     "offload_optimizer": {
                                                         "device": "cpu"
                                                     }
                                                 })])
    def test(self, dtype, sections):
        gradients = Gradients(SHAPES, 4, 2)
        clip = contract.clip_of("active", gradients, STEPS)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), contract.muon_names(SHAPES))
        config = contract.ds_config("zero3",
                                    dtype,
                                    2,
                                    clip,
                                    zero_optimization={
                                        "zero_hpz_partition_size": 2,
                                        **sections
                                    })
        engine = contract.initialize(model, config)
        contract.equal("ranks of a copy", secondary_group(), [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1])
        for step in range(STEPS):
            contract.train_step(engine, gradients, step)
            reference.step(gradients.mean(step), clip)
        contract.check(engine, reference, steps=STEPS, norm=gradients.norm(STEPS - 1))
        assert contract.straddling(engine)
        engine.destroy()


@pytest.mark.support(feature="ZeRO++ qwZ, qgZ (quantized weights, gradients)",
                     engine="ZeRO-3",
                     state="exact; another quantizer stands in for DeepSpeed's")
@pytest.mark.parametrize("sections, weights, reductions", [
    ({
        "zero_quantized_weights": True
    }, True, False),
    ({
        "zero_quantized_gradients": True
    }, False, True),
    ({
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2
    }, True, True),
],
                         ids=["weights", "gradients", "all"])
class TestQuantized(DistributedTest):
    """Exact: equal to the reference fed with the gradients that the engine itself has reduced."""
    world_size = 4

    def test(self, sections, weights, reductions):
        gradients = Gradients(EIGHTS, 4, 2)
        clip = contract.clip_of("active", gradients, STEPS)
        model = ProductModel(EIGHTS)
        muon = contract.muon_names(EIGHTS)
        reference = Reference(dict(model.named_parameters()), muon)
        config = contract.ds_config("zero3", "bf16", 2, clip, zero_optimization=sections)
        with quantizing(local_size=2) as quantizer:
            engine = contract.initialize(model, config)
            for step in range(STEPS):
                reduced = self.reduce(engine, gradients, step)
                # Not what another rank's share would be, and not exact where it is quantized.
                error = contract.largest_distance(reduced, gradients.mean(step))
                assert (0 < error < 0.3) if reductions else error == 0, error
                reference.step(reduced, clip)
                engine.step()
            contract.equal("weights, gradients quantized",
                           (quantizer.weights_quantized > 0, quantizer.gradients_reduced > 0), (weights, reductions))
        masters = contract.master_weights(engine)
        contract.below("weights", contract.largest_distance(masters, reference.weights, reference.start),
                       contract.ROUNDING.weights)
        contract.below("momenta", contract.largest_distance(contract.momenta(engine, muon), reference.momenta),
                       contract.ROUNDING.momenta)
        norm = contract.norm_of(reduced)
        contract.below("norm", abs(float(engine.get_global_grad_norm()) / norm - 1), contract.ROUNDING.norm)
        contract.check_momentum_shards(engine, reference)
        contract.check_counts(engine, reference, STEPS)
        engine.destroy()

    def reduce(self, engine, gradients, step):
        """All backwards of a step; the gradients before it is made."""
        for micro in range(gradients.gas):
            if micro:
                engine.step()
            engine.backward(engine(gradients.local(step, micro, dist.get_rank())))
        return gradients_of(engine)


@pytest.mark.support(feature="MiCS", engine="ZeRO-3", state="removed by DeepSpeed")
class TestMiCS(DistributedTest):
    world_size = 1

    def test(self):
        config = contract.ds_config("zero3", zero_optimization={"mics_shard_size": 2})
        with pytest.raises(Exception, match="MiCS ZeRO-3 sharding has been removed"):
            contract.initialize(ProductModel(SHAPES), config)
