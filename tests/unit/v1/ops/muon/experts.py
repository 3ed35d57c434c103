# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A model with a DeepSpeed MoE layer whose gradients are chosen, as `contract.ProductModel` is one without.

Parameters have two names: that of the module on a rank, where experts are counted from 0 on each rank, and a global
one, in which they are counted through. Shapes, gradients and references go by the global one.
"""

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.moe.layer import MoE
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import Gradients, LinearProduct, Shape, Tensors

HIDDEN, EXPERTS = 5, 4
_EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts."
ROUTER = "moe.deepspeed_moe.gate.wg.weight"
OF_EXPERT: Dict[str, Shape] = {"up.weight": (9, 5), "down.weight": (5, 9), "scale.weight": (3, )}
DENSE: Dict[str, Shape] = {"dense.weight": (17, 13), "tall.weight": (23, 2), "norm.weight": (7, )}
SHAPES: Dict[str, Shape] = {
    **DENSE, ROUTER: (EXPERTS, HIDDEN),
    **{
        f"{_EXPERT}{expert}.{name}": shape
        for expert in range(EXPERTS)
        for name, shape in OF_EXPERT.items()
    }
}
MUON = [name for name, shape in SHAPES.items() if len(shape) > 1 and name != ROUTER]


class Expert(torch.nn.Module):

    def __init__(self) -> None:
        super().__init__()
        for name, shape in OF_EXPERT.items():
            self.add_module(name.partition(".")[0], LinearProduct(shape))


class ExpertModel(torch.nn.Module):
    """Matrices and a vector of all ranks, a router, and four experts, of which each rank has EXPERTS / ep_size."""

    def __init__(self, ep_size: int, **options: Any) -> None:
        super().__init__()
        for name, shape in DENSE.items():
            self.add_module(name.partition(".")[0], LinearProduct(shape))
        self.moe = MoE(HIDDEN, Expert(), num_experts=EXPERTS, ep_size=ep_size, **options)
        self.by_global_name = {global_name(name, ep_size): param for name, param in self.named_parameters()}
        start = start_weights()
        with torch.no_grad():
            for name, param in self.by_global_name.items():
                param.copy_(start[name])

    def forward(self, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The gradient of each parameter is its factor, whatever a router would have sent to the experts."""
        return torch.stack([(self.by_global_name[name] * factor.to(self.by_global_name[name].dtype)).sum()
                            for name, factor in factors.items()]).sum()


def start_weights() -> Tensors:
    return {name: contract._integers(shape, 8, (77, index)) / 16 for index, (name, shape) in enumerate(SHAPES.items())}


def global_name(name: str, ep_size: int) -> str:
    """Of a parameter of this rank. Ranks of an expert-parallel group follow one another."""
    first = dist.get_rank() % ep_size * (EXPERTS // ep_size)
    return re.sub(re.escape(_EXPERT) + r"(\d+)", lambda found: f"{_EXPERT}{int(found[1]) + first}", name)


def expert_of(name: str) -> int:
    """The number of the expert that has the parameter of this global name; -1 where all ranks have it."""
    found = re.match(re.escape(_EXPERT) + r"(\d+)", name)
    return int(found[1]) if found else -1


@dataclass(frozen=True)
class RoutedGradients(Gradients):
    """What tokens of all ranks of an expert-parallel group bring to the rank that has the expert."""
    ep_size: int = 1

    def local(self, step: int, micro: int, rank: int) -> Tensors:
        first = rank - rank % self.ep_size
        sent = [Gradients.local(self, step, micro, peer) for peer in range(first, first + self.ep_size)]
        per_rank = EXPERTS // self.ep_size
        own: Tensors = {}
        for name, gradient in sent[rank - first].items():
            expert = expert_of(name)
            if expert < 0:
                own[name] = gradient
            elif expert // per_rank == rank - first:
                own[name] = torch.stack([tensors[name] for tensors in sent]).sum(0)
        return own

    def mean(self, step: int) -> Tensors:
        return Gradients(self.shapes, self.world_size, self.gas, self.unit, self.unused).mean(step)


def by_global_name(found: Tensors, ep_size: int) -> Tensors:
    return {global_name(name, ep_size): tensor for name, tensor in found.items()}


def local_names(model: torch.nn.Module, ep_size: int) -> List[str]:
    """Names in the module of the parameters of this rank that are Muon's."""
    return [name for name, _ in model.named_parameters() if global_name(name, ep_size) in MUON]


def check(engine: Any, reference: contract.Reference, ep_size: int, *, steps: int, norm: float) -> None:
    """I1, I2, I4 and I5 of what is on this rank."""
    weights = by_global_name(contract.master_weights(engine), ep_size)
    expected = {name: reference.weights[name] for name in weights}
    away = contract.largest_distance(weights, expected, reference.start)
    contract.below("weights", away, contract.ROUNDING.weights)
    for name, weight in by_global_name(contract.module_weights(engine), ep_size).items():
        assert torch.equal(weight, weights[name].to(weight.dtype).view(weight.shape)), f"{name} is not its master"
    momenta = by_global_name(contract.momenta(engine, local_names(engine.module, ep_size)), ep_size)
    contract.below("momenta", contract.largest_distance(momenta, {name: reference.momenta[name]
                                                                  for name in momenta}), contract.ROUNDING.momenta)
    if engine.optimizer is not engine.basic_optimizer:
        contract.below("norm", abs(float(engine.get_global_grad_norm()) / norm - 1), contract.ROUNDING.norm)
    for partition, momentum in contract.momentum_shards(engine):
        assert momentum.dtype == torch.float32 and momentum.shape == partition.shape
    contract.check_counts(engine, reference, steps)


_ROWS = {
    "stage0": "stage 0",
    "bf16_optimizer": "BF16_Optimizer",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero1_offload": "ZeRO-1",
    "zero2_offload": "ZeRO-2",
    "zero3_offload": "ZeRO-3",
}


def row(feature: str, engine: str, *values: Any) -> Any:
    """A parameter that shows a row of the table of what is supported."""
    offload = ", CPU offload" if engine.endswith("offload") else ""
    mark = pytest.mark.support(feature=feature + offload, engine=_ROWS[engine], state="exact")
    return pytest.param(engine, *values, marks=mark)
