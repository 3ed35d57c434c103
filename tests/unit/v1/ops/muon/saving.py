# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What tests of checkpoints share: a training whose gradients do not depend on the number of ranks, and snapshots.

Runs on stock DeepSpeed as well: nothing of the package is imported here.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

import torch

import deepspeed.comm as dist
from deepspeed.utils import safe_get_full_optimizer_state
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Tensors

MUON = contract.muon_names(SHAPES)
OTHERS = [name for name in SHAPES if name not in MUON]
CLIP = 0.5


@dataclass(frozen=True)
class SteadyGradients(Gradients):
    """One rank has all of a micro-batch's gradient, times what it is divided by: the mean is exact and the same for
    every number of ranks."""

    def local(self, step: int, micro: int, rank: int) -> Tensors:
        whole = Gradients(self.shapes, 1, 1, self.unit).local(step, micro, 0)
        share = self.world_size if rank == (step + micro) % self.world_size else 0
        return {name: gradient * share for name, gradient in whole.items()}


def made(engine: str, dtype: str = "fp32", shapes: Dict[str, contract.Shape] = SHAPES, **sections: Any) -> Any:
    """An engine on the model of the contract, always with the same weights."""
    dtype = "bf16" if engine == "bf16_optimizer" else dtype
    return contract.initialize(ProductModel(shapes), contract.ds_config(engine, dtype, clip=CLIP, **sections))


def train(engine: Any, steps: range, shapes: Dict[str, contract.Shape] = SHAPES) -> List[float]:
    """Optimizer steps; returns the loss of each micro-batch, the mean over the ranks."""
    gas = engine.gradient_accumulation_steps()
    gradients = SteadyGradients(shapes, dist.get_world_size(), gas)
    losses = []
    for step in steps:
        for micro in range(gas):
            factors = gradients.local(step, micro, dist.get_rank())
            loss = engine({name: factor.to(engine.device) for name, factor in factors.items()})
            losses.append(contract.over_ranks(float(loss.detach())) / dist.get_world_size())
            engine.backward(loss)
            engine.step()
    return losses


def whole_state(engine: Any) -> Tensors:
    """Whole master weights, momenta and Adam's states, as DeepSpeed's own functions gather them. A collective."""
    found = {f"{name}.fp32": weight for name, weight in contract.master_weights(engine).items()}
    found.update({f"{name}.momentum": momentum for name, momentum in contract.momenta(engine, MUON).items()})
    parameters = dict(engine.module.named_parameters())
    for name in OTHERS if engine.zero_optimization() else []:
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameters[name], key).cpu().clone()
    return found


def own_state(engine: Any) -> Dict[str, Any]:
    """All that this rank's optimizer keeps: masters, states, values of the groups, loss scale, steps; bit by bit."""
    optimizer = engine.basic_optimizer
    found: Dict[str, Any] = {"steps": (engine.global_steps, engine.skipped_steps)}
    for index, (partition, state) in enumerate(optimizer.state.items()):
        found[f"{index}.weights"] = partition.detach().cpu().clone()
        for key, value in state.items():
            found[f"{index}.{key}"] = value.detach().cpu().clone() if torch.is_tensor(value) else value
    for index, group in enumerate(optimizer.param_groups):
        found[f"group {index}"] = {key: value for key, value in group.items() if key != "params"}
    scaler = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    found["scaler"] = {key: value for key, value in vars(scaler).items()} if scaler is not None else {}
    found["module"] = contract.module_weights(engine)
    return found


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Bit for bit, with the name of what differs."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), f"{where}: {sorted(found)} instead of {sorted(expected)}"
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif torch.is_tensor(expected):
        # As bits: ZeRO-3 leaves the padding of its weights uninitialized, so that it may hold what equals nothing.
        same = found.dtype == expected.dtype and found.shape == expected.shape
        assert same and torch.equal(_bits(found), _bits(expected)), f"{where} differs"
    else:
        assert found == expected, f"{where}: {found} instead of {expected}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)


def farthest(found: Tensors, expected: Tensors) -> Tuple[float, str]:
    """The largest relative distance of two sets of tensors of the same names, and whose it is."""
    assert set(found) == set(expected), f"{sorted(found)} instead of {sorted(expected)}"
    return max((contract.distance(found[name], tensor), name) for name, tensor in expected.items())
