# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The reference: Muon on whole matrices in one process, written from its formulas alone, no code shared.

    m <- beta*m + (1-beta)*c*g,   c = min(1, clip / (norm + 1e-6)) over the gradients of all parameters
    u  = (1-beta)*c*g + beta*m  if nesterov else m
    O  = five steps X <- aX + bAX + cA^2X, A = XX^T, from u / |u|_F
    W <- W*(1 - lr*wd) - lr*sqrt(max(1, fan_out/fan_in))*O
"""

from typing import Optional, Sequence

import torch

JORDAN = (3.4445, -4.7750, 2.0315)


def newton_schulz(matrix: torch.Tensor, steps: int = 5, triple: Sequence[float] = JORDAN) -> torch.Tensor:
    """float64 iteration on one 2-D matrix."""
    a, b, c = triple
    x = matrix.double()
    norm = x.norm()
    if norm == 0:
        return x
    x = x / norm
    if x.shape[0] > x.shape[1]:
        return newton_schulz(matrix.T, steps, triple).T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class MuonOracle:
    """Whole matrices (2-D float64 copies), one momentum each."""

    def __init__(self,
                 matrices: Sequence[torch.Tensor],
                 lr: float,
                 beta: float = 0.95,
                 weight_decay: float = 0.0,
                 nesterov: bool = True):
        self.weights = [matrix.detach().double().clone() for matrix in matrices]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]
        self.lr, self.beta, self.weight_decay, self.nesterov = lr, beta, weight_decay, nesterov

    def step(self, grads: Sequence[torch.Tensor], clip: float = 0.0, norm: Optional[float] = None) -> None:
        """`norm` is that of all gradients of the model; default: that of these."""
        if norm is None:
            norm = float(torch.cat([grad.double().flatten() for grad in grads]).norm())
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        for weight, momentum, grad in zip(self.weights, self.momenta, grads):
            clipped = factor * grad.double()
            momentum.mul_(self.beta).add_(clipped, alpha=1 - self.beta)
            direction = (1 - self.beta) * clipped + self.beta * momentum if self.nesterov else momentum
            scale = max(1.0, weight.shape[0] / weight.shape[1])**0.5
            weight.mul_(1 - self.lr * self.weight_decay).sub_(newton_schulz(direction), alpha=self.lr * scale)
