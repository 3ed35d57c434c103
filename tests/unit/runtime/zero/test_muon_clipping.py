# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`gradient_clipping` clips gradients, and the norm is that of the gradients, in every ZeRO stage.

Runs on stock DeepSpeed as well, see https://github.com/deepspeedai/DeepSpeed/issues/7776.
"""

import pytest

from unit.common import DistributedTest
from unit.v1.ops.muon import contract, faults
from unit.v1.ops.muon.contract import Gradients, ProductModel

SHAPES = faults.ALIKE
MUON = contract.muon_names(SHAPES)
# Measured against float64: at most 2.1e-2 of the way, by the rounding of the iteration to bf16.
TOLERANCE = 0.05


@pytest.mark.parametrize("stage", [1, 2, 3])
class TestMuonClipping(DistributedTest):
    world_size = [1, 2]

    def test_clips_the_gradient_and_not_the_update(self, stage):
        gradients = Gradients(SHAPES, self.world_size)
        model = ProductModel(SHAPES)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        # Stock refuses ZeRO-3 with its default of reduce_scatter.
        config = contract.ds_config(f"zero{stage}",
                                    "fp32",
                                    1,
                                    1.0,
                                    optimizer={},
                                    zero_optimization={"reduce_scatter": False})
        engine = contract.initialize(model, config)
        for step in range(3):
            contract.train_step(engine, gradients, step)
            assert gradients.norm(step) > 1
            matrices = contract.master_weights(engine, MUON)
            faults.assert_muon(matrices, start, gradients, steps=step + 1, clip=1.0, tolerance=TOLERANCE)
        contract.below("norm", abs(float(engine.get_global_grad_norm()) / gradients.norm(2) - 1), 1e-6)
        engine.destroy()
