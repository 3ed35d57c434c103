# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 with gradient accumulation: one momentum step and one orthogonalization for each optimizer step.

Runs on stock DeepSpeed as well, see https://github.com/deepspeedai/DeepSpeed/issues/8443.
"""

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from unit.common import DistributedTest
from unit.v1.ops.muon import contract, faults
from unit.v1.ops.muon.contract import Gradients, ProductModel

SHAPES = faults.ALIKE
MUON = contract.muon_names(SHAPES)
# Measured against float64: at most 1.7e-2 of the way, by the rounding of the iteration to bf16.
TOLERANCE = 0.05
reduce_scatter = pytest.mark.parametrize("reduce_scatter", [False, True])


@contextmanager
def counted_orthogonalizations(engine):
    """A function for how many matrices this rank has orthogonalized in the block: the optimizer's own counter, or,
    where it has none, the calls of stock DeepSpeed's `muon_update`."""
    optimizer = engine.basic_optimizer
    if hasattr(optimizer, "orthogonalizations"):
        before = optimizer.orthogonalizations
        yield lambda: optimizer.orthogonalizations - before
        return
    calls = []
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            function = vars(module).get("muon_update") if name.startswith("deepspeed.") else None
            if function is not None:

                def counted(*arguments, _function=function, **named):
                    calls.append(1)
                    return _function(*arguments, **named)

                patches.enter_context(mock.patch.object(module, "muon_update", counted))
        yield lambda: len(calls)


@dataclass(frozen=True)
class Merged(Gradients):
    """The micro-batches of another run as one."""
    parts: int = 1

    def local(self, step, micro, rank):
        several = [
            Gradients(self.shapes, self.world_size, self.parts).local(step, part, rank) for part in range(self.parts)
        ]
        return {name: sum(one[name] for one in several) / self.parts for name in self.shapes}


def build(gas, reduce_scatter):
    model = ProductModel(SHAPES)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = contract.ds_config("zero3",
                                "fp32",
                                gas,
                                optimizer={},
                                zero_optimization={"reduce_scatter": reduce_scatter})
    return contract.initialize(model, config), start


class TestMuonZero3GradAccum(DistributedTest):
    world_size = 2

    @reduce_scatter
    @pytest.mark.parametrize("gas", [1, 2, 3])
    def test_newton_schulz_runs_once_per_matrix_per_step(self, gas, reduce_scatter):
        engine, _ = build(gas, reduce_scatter)
        gradients = Gradients(SHAPES, self.world_size, gas)
        for step in range(3):
            with counted_orthogonalizations(engine) as count:
                contract.train_step(engine, gradients, step)
                contract.equal("orthogonalizations", contract.over_ranks(count()), len(MUON))
        engine.destroy()

    @reduce_scatter
    @pytest.mark.parametrize("gas", [2, 3])
    def test_gradient_accumulation_matches_one_large_micro_batch(self, gas, reduce_scatter):
        engine, start = build(gas, reduce_scatter)
        gradients = Gradients(SHAPES, self.world_size, gas)
        for step in range(3):
            contract.train_step(engine, gradients, step)
        accumulated = contract.master_weights(engine, MUON)
        engine.destroy()
        faults.assert_muon(accumulated, start, gradients, steps=3, clip=0.0, tolerance=TOLERANCE)

        large, _ = build(1, reduce_scatter)
        merged = Merged(SHAPES, self.world_size, parts=gas)
        for step in range(3):
            contract.train_step(large, merged, step)
        whole = contract.master_weights(large, MUON)
        large.destroy()
        for name in MUON:
            assert torch.equal(accumulated[name], whole[name]), name


ATTENTION = {
    "layers.0.self_attn.q_proj.weight": (24, 16),
    "layers.0.self_attn.k_proj.weight": (12, 16),
    "layers.0.mlp.up_proj.weight": (30, 16),
}


def one_step(world_size, per_head, reduce_scatter):
    model = ProductModel(ATTENTION)
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=6, hidden_size=16)
    config = contract.ds_config("zero3",
                                "fp32",
                                2,
                                optimizer={"per_head_muon": per_head},
                                zero_optimization={"reduce_scatter": reduce_scatter})
    engine = contract.initialize(model, config)
    contract.train_step(engine, Gradients(ATTENTION, world_size, gas=2), 0)
    weights = contract.module_weights(engine)
    engine.destroy()
    return weights


class TestMuonZero3PerHead(DistributedTest):
    world_size = 2

    @reduce_scatter
    def test_one_step_moves_projections_head_by_head_but_not_the_mlp(self, reduce_scatter):
        whole = one_step(self.world_size, False, reduce_scatter)
        per_head = one_step(self.world_size, True, reduce_scatter)
        for name in ATTENTION:
            assert torch.equal(whole[name], per_head[name]) == ("mlp" in name), name
