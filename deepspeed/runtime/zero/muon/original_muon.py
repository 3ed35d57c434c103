# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The functions that DeepSpeed's users import by name, on one tensor each, over the package's kernels."""

from typing import Iterable, Optional

import torch
from torch import Tensor

from deepspeed.runtime.zero.muon.coefficients import METHODS, check_method, resolve
from deepspeed.runtime.zero.muon.newton_schulz import compute_dtype, orthogonalize
from deepspeed.runtime.zero.muon.optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.update import lr_scale

NS_METHODS = set(METHODS)


def ns_compute_dtype(ns_method: str = "gram") -> torch.dtype:
    """The dtype the Newton-Schulz iteration runs in on this accelerator. Raises ValueError for an unknown method."""
    return compute_dtype(ns_method)


@torch.no_grad()
def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Orthogonalize `G` [..., m, n] by the standard iteration with Jordan's coefficients.

    `G` is not changed. Returns its shape in ns_compute_dtype("standard"); raises ValueError for `steps` below 1.
    """
    return orthogonalize(G, method="standard", triples=resolve("jordan", steps))


@torch.no_grad()
def zeropower_via_gram_newtonschulz(G: Tensor, steps: int) -> Tensor:
    """Orthogonalize `G` [..., m, n] by the Gram iteration with Jordan's coefficients.

    `G` is not changed. Returns its shape in ns_compute_dtype("gram"); raises ValueError for `steps` below 1.
    """
    return orthogonalize(G, method="gram", triples=resolve("jordan", steps))


@torch.no_grad()
def muon_update(grad: Tensor,
                momentum: Tensor,
                beta: float = 0.95,
                ns_steps: int = 5,
                nesterov: bool = True,
                ns_method: str = "gram",
                is_expert_group: bool = False,
                num_heads: Optional[int] = None) -> Tensor:
    """Momentum, Nesterov blend, orthogonalization and scale sqrt(max(1, rows/cols)) of one whole parameter.

    `grad` is not changed. MUTATED: `momentum` (grad's shape, any floating dtype; the arithmetic is fp32), unless
    `grad` holds a NaN or an infinity: then the momentum stays as it is and `grad` is returned, so that the overflow is
    still seen and one discarded step does not poison the ones after it (decided on the device, without
    synchronization).

    Which matrices: a stack [..., m, n] with `is_expert_group`, the `num_heads` equal row blocks of a 2-D projection,
    else [out, rest], so that a convolution kernel of any dimension is one matrix. Returns a contiguous tensor of
    grad's shape and dtype. Raises ValueError for an unknown `ns_method`, fewer than two dimensions, rows that
    `num_heads` does not divide.
    """
    check_method(ns_method)
    finite = torch.isfinite(grad).all()
    grad32 = grad.to(torch.float32)
    new_momentum = momentum.to(torch.float32).lerp(grad32, 1 - beta)
    blended = grad32.lerp(new_momentum, beta) if nesterov else new_momentum
    matrices = _as_matrices(blended, is_expert_group, num_heads)
    update = orthogonalize(matrices, method=ns_method, triples=resolve("jordan", ns_steps))
    momentum.copy_(torch.where(finite, new_momentum, momentum))
    rows, cols = matrices.shape[-2:]
    update = update.to(torch.float32) * lr_scale(rows, cols, "original")
    return torch.where(finite, update.reshape(grad.shape).to(grad.dtype), grad)


def _as_matrices(update: Tensor, is_expert_group: bool, num_heads: Optional[int]) -> Tensor:
    if num_heads is not None:
        if update.ndim != 2:
            raise ValueError(f"Muon per head (num_heads={num_heads}) takes a 2-D projection, got shape "
                             f"{tuple(update.shape)}; leave num_heads unset for this parameter")
        if num_heads < 1 or update.shape[0] % num_heads:
            raise ValueError(f"Muon per head: {update.shape[0]} rows are not divisible by num_heads={num_heads}; "
                             "set num_heads to the number of heads of this projection")
        return update.view(num_heads, -1, update.shape[1])
    if is_expert_group or update.ndim <= 2:
        return update
    return update.reshape(update.shape[0], -1)


@torch.no_grad()
def adam_update(grad: Tensor, buf1: Tensor, buf2: Tensor, step: int, betas: tuple[float, float], eps: float) -> Tensor:
    """Adam's direction (D. P. Kingma, J. Ba, 2015) at `step` >= 1, without learning rate and weight decay.

    MUTATED: `buf1` (mean of the gradient) and `buf2` (mean of its square); `grad` is not changed. Returns grad's
    shape.
    """
    beta1, beta2 = betas
    buf1.mul_(beta1).add_(grad, alpha=1 - beta1)
    buf2.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root_mean_square = (buf2 / (1 - beta2**step)).sqrt()
    return buf1 / (1 - beta1**step) / (root_mean_square + eps)


class Muon(MuonWithAuxAdam):
    """Muon for whole matrices, without an auxiliary Adam: all of `params` are stepped by Newton-Schulz."""

    def __init__(self,
                 params: Iterable[Tensor],
                 lr: float = 0.02,
                 weight_decay: float = 0,
                 momentum: float = 0.95,
                 ns_method: str = "gram"):
        super().__init__([
            dict(params=list(params),
                 use_muon=True,
                 lr=lr,
                 weight_decay=weight_decay,
                 momentum=momentum,
                 ns_method=ns_method)
        ])


class SingleDeviceMuon(Muon):
    """The name for use without process groups; `Muon` itself needs none for parameters that no engine has cut."""


class SingleDeviceMuonWithAuxAdam(MuonWithAuxAdam):
    """The name for use without process groups; `MuonWithAuxAdam` needs none for parameters that no engine has cut."""
