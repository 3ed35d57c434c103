# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-1 and ZeRO-2 with `reduce_scatter`: a rank that gets its own slice of the gradients only steps like one that
gets all of them. See https://github.com/deepspeedai/DeepSpeed/issues/7807.
"""

import pytest
import torch

from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

MUON = contract.muon_names(SHAPES)
GAS = 3
VARIANTS = {
    "plain": {},
    "overlap": {
        "overlap_comm": True
    },
    "one_rank_at_a_time": {
        "use_multi_rank_bucket_allreduce": False
    },
    "extra_large": {
        "reduce_bucket_size": 100
    },
    "not_contiguous": {
        "contiguous_gradients": False
    },
}


def train(world_size, stage, ns_method, flags):
    """Three steps of three micro-batches with an active clip; checked, and the weights."""
    gradients = Gradients(SHAPES, world_size, GAS)
    clip = contract.clip_of("active", gradients, 3)
    model = ProductModel(SHAPES)
    reference = Reference(dict(model.named_parameters()), MUON)
    options = {"ns_method": ns_method, "ns_dtype": "float32"}
    config = contract.ds_config(f"zero{stage}", "fp32", GAS, clip, optimizer=options, zero_optimization=flags)
    trained = contract.initialize(model, config)
    for step in range(3):
        contract.train_step(trained, gradients, step)
        reference.step(gradients.mean(step), clip)
    contract.check(trained, reference, steps=3, norm=gradients.norm(2))
    assert contract.straddling(trained)
    weights = contract.master_weights(trained)
    trained.destroy()
    return weights


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ns_method", ["gram", "standard"])
@pytest.mark.parametrize("stage", [1, 2])
class TestMuonReduceScatter(DistributedTest):
    world_size = [2, 3]

    def test(self, stage, ns_method, variant):
        flags = VARIANTS[variant]
        scattered = train(self.world_size, stage, ns_method, {**flags, "reduce_scatter": True})
        reduced = train(self.world_size, stage, ns_method, {**flags, "reduce_scatter": False})
        for name, weight in reduced.items():
            # Thirds are rounded, and three ranks are summed in another order.
            contract.below(name, contract.distance(scattered[name], weight), 1e-6)
        assert len(reduced) == len(SHAPES) and all(torch.isfinite(weight).all() for weight in reduced.values())
