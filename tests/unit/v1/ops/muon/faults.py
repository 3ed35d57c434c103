# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed releases have computed instead of Muon, so that a test that fails says by which fault.

Each function gives the weights after the steps of `gradients`, on whole matrices in one process, as `reference` does.
"""

from typing import Callable, Dict, List

import torch

from unit.v1.ops.muon.contract import (BETA, MUON_LR, WEIGHT_DECAY, Gradients, Reference, Tensors, below,
                                       largest_distance, norm_of)
from unit.v1.ops.muon.oracle import newton_schulz

Rule = Callable[[Tensors, Gradients, List[str], int, float], Tensors]


def reference(start: Tensors, gradients: Gradients, muon: List[str], steps: int, clip: float) -> Tensors:
    """Muon: the weights of the matrices."""
    wanted = Reference(start, muon)
    for step in range(steps):
        wanted.step(gradients.mean(step), clip)
    return {name: wanted.weights[name] for name in muon}


def _orthogonalized(gradient: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
    momentum.lerp_(gradient, 1 - BETA)
    scale = max(1.0, gradient.shape[0] / gradient.shape[1])**0.5
    return newton_schulz((1 - BETA) * gradient + BETA * momentum) * scale


def _stepped(weights: Tensors, updates: Tensors) -> Tensors:
    return {
        name: weight.double() * (1 - MUON_LR * WEIGHT_DECAY) - MUON_LR * updates[name]
        for name, weight in weights.items()
    }


def no_newton_schulz(start: Tensors, gradients: Gradients, muon: List[str], steps: int, clip: float) -> Tensors:
    """The clipped gradient itself is the update."""
    weights = {name: start[name] for name in muon}
    for step in range(steps):
        mean = gradients.mean(step)
        factor = min(1.0, clip / (norm_of(mean) + 1e-6)) if clip else 1.0
        weights = _stepped(weights, {name: mean[name].double() * factor for name in muon})
    return weights


def every_micro_batch(start: Tensors, gradients: Gradients, muon: List[str], steps: int, clip: float) -> Tensors:
    """The momentum advances, and the update is orthogonalized, at each micro-batch; the updates add up."""
    assert clip == 0
    weights = {name: start[name] for name in muon}
    momenta = {name: torch.zeros(start[name].shape, dtype=torch.float64) for name in muon}
    for step in range(steps):
        updates = {name: torch.zeros_like(momentum) for name, momentum in momenta.items()}
        for micro in range(gradients.gas):
            for name in muon:
                ranks = [gradients.local(step, micro, rank)[name] for rank in range(gradients.world_size)]
                mean = sum(ranks).double() / gradients.world_size / gradients.gas
                updates[name] += _orthogonalized(mean, momenta[name])
        weights = _stepped(weights, updates)
    return weights


def clipped_update(start: Tensors, gradients: Gradients, muon: List[str], steps: int, clip: float) -> Tensors:
    """The norm is taken of the orthogonalized update and the update is clipped, not the gradient."""
    weights = {name: start[name] for name in muon}
    momenta = {name: torch.zeros(start[name].shape, dtype=torch.float64) for name in muon}
    for step in range(steps):
        mean = gradients.mean(step)
        updates = {name: _orthogonalized(mean[name].double(), momenta[name]) for name in muon}
        factor = min(1.0, clip / (norm_of({**mean, **updates}) + 1e-6)) if clip else 1.0
        weights = _stepped(weights, {name: update * factor for name, update in updates.items()})
    return weights


FAULTS: Dict[str, Rule] = {
    "no Newton-Schulz, the gradient is the update": no_newton_schulz,
    "momentum and Newton-Schulz at every micro-batch": every_micro_batch,
    "the clip is that of the update": clipped_update,
}
# How near the weights have to be to a fault's to be said to follow it. Stock iterates in bf16: 0.07 in the first step.
NEAR = 0.25
# For stock, whose ZeRO-3 exchanges shapes that are alike only. The third lies across the boundary of two partitions.
ALIKE = {**{f"layers.{index}.weight": (13, 9) for index in range(5)}, "norm.weight": (7, )}


def assert_muon(found: Tensors, start: Tensors, gradients: Gradients, *, steps: int, clip: float,
                tolerance: float) -> None:
    """Asserts that the matrices `found` after `steps` steps are Muon's to `tolerance` of their way; if not, says what
    they follow."""
    muon = list(found)
    expected = reference(start, gradients, muon, steps, clip)
    away = largest_distance(found, expected, start)
    if away >= tolerance:
        for fault, rule in FAULTS.items():
            if rule is every_micro_batch and clip:
                continue
            wrong = rule(start, gradients, muon, steps, clip)
            if largest_distance(found, wrong, start) < NEAR:
                raise AssertionError(f"weights are {away:.2g} of the way from Muon's: {fault}")
    below("weights", away, tolerance)
