# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`per_head_muon`: attention projections are orthogonalized head by head, in every engine, wherever they are cut."""

from types import SimpleNamespace

import pytest
import torch

from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import Gradients, ProductModel, Reference

# 4 query heads and 2 heads of keys and values, of 6 rows. The first parameter has an odd size.
SHAPES = {
    "layers.0.mlp.down_proj.weight": (13, 29),
    "layers.0.self_attn.q_proj.weight": (24, 16),
    "layers.0.self_attn.k_proj.weight": (12, 16),
    "layers.0.self_attn.v_proj.weight": (12, 16),
    "layers.0.self_attn.o_proj.weight": (16, 24),
    "layers.0.mlp.up_proj.weight": (29, 16),
    "norm.weight": (16, ),
}
HEADS = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
MUON = contract.muon_names(SHAPES)
EVERY_ENGINE = [(engine, "bf16" if engine == "bf16_optimizer" else "fp32") for engine in contract.ENGINES]


def heads_of(name, tensor):
    return list(tensor.chunk(HEADS.get(name.split(".")[-2], 1)))


def train_and_check(world_size, engine, dtype, per_head, **sections):
    model = ProductModel(SHAPES)
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=6, hidden_size=16)
    matrices_of = heads_of if per_head else contract.rows_by_columns
    reference = Reference(dict(model.named_parameters()), MUON, matrices_of)
    gradients = Gradients(SHAPES, world_size, gas=2)
    clip = contract.clip_of("active", gradients, 3)
    options = {"ns_dtype": "float32", "per_head_muon": per_head}
    trained = contract.initialize(model, contract.ds_config(engine, dtype, 2, clip, optimizer=options, **sections))
    for step in range(3):
        contract.train_step(trained, gradients, step)
        reference.step(gradients.mean(step), clip)
    contract.check(trained, reference, steps=3, norm=gradients.norm(2))
    weights = contract.master_weights(trained)
    trained.destroy()
    return weights, reference.start


class TestPerHeadMuon(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.support(feature="heads (`per_head_muon`)", state="exact")
    @pytest.mark.parametrize("engine, dtype", EVERY_ENGINE)
    def test_each_head_is_a_matrix(self, engine, dtype):
        per_head, start = train_and_check(self.world_size, engine, dtype, True)
        whole, _ = train_and_check(self.world_size, engine, dtype, False)
        for name in MUON:
            apart = contract.distance(per_head[name], whole[name], start[name])
            assert apart > 0.1 if name.split(".")[-2] in HEADS else torch.equal(per_head[name], whole[name]), name

    @pytest.mark.parametrize("flags", [{"parameter_alignment": True}, {"round_robin_gradients": True}])
    @pytest.mark.parametrize("engine", ["zero1", "zero2"])
    def test_where_partitions_are_padded_or_dealt(self, engine, flags):
        train_and_check(self.world_size, engine, "fp32", True, zero_optimization=flags)
