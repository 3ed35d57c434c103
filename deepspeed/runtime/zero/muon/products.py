# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The matrix products of a Newton-Schulz iteration whose results are symmetric, in exchangeable implementations.

All but the products with X itself are symmetric: X X^T, and products of two polynomials of it, which commute. Half of
such a result is enough, which a kernel for it makes use of; the batched products here compute all of it.
"""

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Products:
    """One implementation. Tensors are contiguous [batch, m, n] and of one dtype; none is changed, results are new.

    `gram(x)` is x x^T, [batch, m, m]. `symmetric(c, a, b, beta, alpha)` is beta*c + alpha*a b for symmetric
    [batch, m, m], of which a and b commute; accumulated and added in fp32, rounded once. `min_side`: the smallest m it
    is meant for. `compiles`: whether torch.compile has something to gain around it.
    """
    name: str
    gram: Callable[[Tensor], Tensor]
    symmetric: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
    min_side: int = 1
    compiles: bool = False


def _gram(x: Tensor) -> Tensor:
    return torch.bmm(x, x.mT)


def _symmetric(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


BATCHED = Products("batched", _gram, _symmetric, compiles=True)
