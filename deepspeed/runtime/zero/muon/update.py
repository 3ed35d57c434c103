# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The elementwise part of a Muon step, on lists of flat fp32 slices.

    m <- beta*m + (1-beta)*g,   u = (1-beta)*g + beta*m  if nesterov else m,   W <- W*(1 - lr*wd) - lr*s*O

Every function gives each element the same bits however the flat vector is cut into slices. That holds for the
operations used here (lerp, multiply, subtract) in torch's vector loops and in their remainders, which the tests check
at every offset; an operation that is new here has to pass the same test.
"""

import math
from typing import Sequence

import torch
from torch import Tensor

from deepspeed.runtime.zero.muon.options import ADJUST_LR_FNS


def advance_momentum_(momenta: Sequence[Tensor], grads: Sequence[Tensor], *, beta: float) -> None:
    """m <- beta*m + (1-beta)*g. MUTATED: `momenta`. Both are fp32 slices of equal shapes."""
    if momenta:
        torch._foreach_lerp_(list(momenta), list(grads), 1 - beta)


def blend(momenta: Sequence[Tensor], grads: Sequence[Tensor], *, beta: float, nesterov: bool) -> list[Tensor]:
    """u from the advanced momenta: new fp32 tensors with nesterov, else `momenta` themselves, not to be written to."""
    if not nesterov or not momenta:
        return list(momenta)
    return list(torch._foreach_lerp(list(grads), list(momenta), beta))


def step_weights_(weights: Sequence[Tensor], updates: Sequence[Tensor], factors: Sequence[float], *,
                  decay: float) -> None:
    """W <- W*decay - factor*O. MUTATED: `weights` (fp32). `updates`: equal shapes, any floating dtype and device;
    `factors[i]` is lr*s of slice i, `decay` is 1 - lr*wd."""
    if not weights:
        return
    weights = list(weights)
    if decay != 1:
        torch._foreach_mul_(weights, decay)
    if (updates[0].dtype, updates[0].device) == (weights[0].dtype, weights[0].device):
        scaled = torch._foreach_mul(list(updates), list(factors))
    else:
        # A copy of the list is one launch on an accelerator, a conversion of each is one for each.
        scaled = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(scaled, list(updates))
        torch._foreach_mul_(scaled, list(factors))
    torch._foreach_sub_(weights, scaled)


def squared_norms(slices: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each slice, float64 [len(slices)] on their device (`slices` must not be empty).

    The squares of fp32 numbers are exact in float64. The sum over the slices of one matrix depends on the cut in its
    last bits (1e-15); the norm's rounding to fp32 hides that but for about one matrix in 10^8.
    """
    return torch.stack(torch._foreach_norm(list(slices), 2, dtype=torch.float64)).square()


def lr_scale(fan_out: int, fan_in: int, adjust_lr_fn: str) -> float:
    """The factor s on the learning rate of a matrix that maps `fan_in` inputs to `fan_out` outputs.

    `original`: sqrt(max(1, fan_out/fan_in)) (K. Jordan et al., 2024); `match_rms_adamw`: 0.2*sqrt(max(fan_out,
    fan_in)), the RMS of an AdamW update (J. Liu et al., Muon is scalable for LLM training, 2025, arXiv:2502.16982).
    Raises ValueError for any other name.
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, fan_out / fan_in))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    raise ValueError(f"adjust_lr_fn must be one of {list(ADJUST_LR_FNS)}, got {adjust_lr_fn!r}")
