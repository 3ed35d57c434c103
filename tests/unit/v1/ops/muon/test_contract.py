# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The contract, run by every engine: the same weights, momenta and norms, whatever holds the slices."""

from typing import Any, Iterator

import pytest
import torch

from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import BETA, MUON_LR, SHAPES, WEIGHT_DECAY, Gradients, ProductModel, Reference

STEPS = 3
MUON = contract.muon_names(SHAPES)

OFFLOAD = pytest.mark.support(feature="CPU offload of the optimizer", state="exact")

# Every engine and dtype sees all six, two for each number of ranks.
GAS_AND_CLIP = {
    1: [(1, "active"), (4, "off")],
    2: [(4, "active"), (1, "inactive")],
    3: [(1, "off"), (4, "inactive")],
}
# These see all six on two ranks as well.
IN_FULL = [("bf16_optimizer", "bf16"), ("zero1", "bf16"), ("zero2", "fp32"), ("zero3", "bf16")]


def cases() -> Iterator[Any]:
    for world_size, pairs in GAS_AND_CLIP.items():
        for engine in contract.ENGINES:
            for dtype in ["bf16"] if engine == "bf16_optimizer" else contract.DTYPES:
                every = [(gas, clip) for gas in (1, 4) for clip in ("off", "active", "inactive")]
                for gas, clip in every if world_size == 2 and (engine, dtype) in IN_FULL else pairs:
                    marks = [OFFLOAD] if engine.endswith("offload") else []
                    yield pytest.param(world_size, engine, dtype, gas, clip, marks=marks)


class Alone:
    """The optimizer itself on whole matrices, without ranks or engine."""

    def __init__(self, model: ProductModel) -> None:
        self.parameters = {
            name: torch.nn.Parameter(parameter.detach().clone())
            for name, parameter in model.named_parameters() if name in MUON
        }
        self.optimizer = MuonWithAuxAdam([
            dict(params=list(self.parameters.values()),
                 use_muon=True,
                 lr=MUON_LR,
                 momentum=BETA,
                 weight_decay=WEIGHT_DECAY,
                 ns_method="standard",
                 ns_dtype="float32")
        ])

    def step(self, gradients: contract.Tensors) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone()
        self.optimizer.step()

    def assert_same_bits(self, engine: object) -> None:
        weights, momenta = contract.master_weights(engine), contract.momenta(engine, MUON)
        for name, parameter in self.parameters.items():
            assert torch.equal(weights[name], parameter.detach()), name
            assert torch.equal(momenta[name], self.optimizer.state[parameter][contract.MOMENTUM]), name


@pytest.mark.parametrize("world_size, engine, dtype, gas, clip", list(cases()))
@pytest.mark.support(feature="weights in {dtype}, gradient accumulation, clipping", state="exact")
class TestContract(DistributedTest):

    def test(self, world_size, engine, dtype, gas, clip):
        gradients = Gradients(SHAPES, world_size, gas)
        clipping = contract.clip_of(clip, gradients, STEPS)
        model = ProductModel(SHAPES)
        reference, alone = Reference(dict(model.named_parameters()), MUON), Alone(model)
        with contract.fp16_accepted():
            trained = contract.initialize(model, contract.ds_config(engine, dtype, gas, clipping))
            for step in range(STEPS):
                contract.train_step(trained, gradients, step)
                reference.step(gradients.mean(step), clipping)
                alone.step(gradients.mean(step))
                # The precondition of what the case is about.
                assert (gradients.norm(step) > clipping) == (clip != "inactive")
            contract.check(trained, reference, steps=STEPS, norm=gradients.norm(STEPS - 1))
        if clip != "active":
            alone.assert_same_bits(trained)
        if trained.zero_optimization():
            assert contract.straddling(trained) == (world_size > 1)
        trained.destroy()
