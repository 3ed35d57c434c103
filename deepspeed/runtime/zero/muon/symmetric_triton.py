# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Symmetric products in Triton: the tiles on and below the diagonal are computed and written twice, once mirrored.

With T tiles on a side that is (T + 1) / 2T of the work of a full product. The result is symmetric bit for bit.
Imported only where Triton is installed; TRITON_INTERPRET=1 runs it on a CPU, which the tests do.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.runtime.zero.muon.products import Products

# Below two tiles a side there is nothing to save.
MIN_SIDE = 256


@triton.jit
def _symmetric_kernel(a, b, c, out, alpha, beta, M, K, HAS_C: tl.constexpr, TILE: tl.constexpr, TILE_K: tl.constexpr):
    # Tile number `pid` of the triangle is at row i, column j <= i, where i(i+1)/2 + j = pid. The root is rounded in
    # fp32, so i may be off by one.
    pid = tl.program_id(0)
    i = ((tl.sqrt((8 * pid + 1).to(tl.float32)) - 1) / 2).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pid, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pid, i + 1, i)
    j = pid - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    rows = i * TILE + tl.arange(0, TILE)
    cols = j * TILE + tl.arange(0, TILE)
    steps = tl.arange(0, TILE_K)
    # Both operands are read by rows: b is symmetric or it is a itself, whose transpose is meant.
    a_tile = a + matrix * M * K + rows[:, None] * K + steps[None, :]
    b_tile = b + matrix * M * K + cols[:, None] * K + steps[None, :]
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, K, TILE_K):
        inside = steps[None, :] < K - start
        left = tl.load(a_tile + start, mask=(rows[:, None] < M) & inside, other=0.0)
        right = tl.load(b_tile + start, mask=(cols[:, None] < M) & inside, other=0.0)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    sums = sums * alpha
    square = matrix * M * M
    mask = (rows[:, None] < M) & (cols[None, :] < M)
    below = square + rows[:, None] * M + cols[None, :]
    if HAS_C:
        sums += beta * tl.load(c + below, mask=mask, other=0.0).to(tl.float32)
    if i == j:
        # The product of two symmetric matrices is so up to rounding only.
        sums = tl.where(rows[:, None] >= cols[None, :], sums, tl.trans(sums))
    rounded = sums.to(out.dtype.element_ty)
    tl.store(out + below, rounded, mask=mask)
    if i != j:
        above = square + cols[:, None] * M + rows[None, :]
        tl.store(out + above, tl.trans(rounded), mask=tl.trans(mask))


def _tiles(m: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes by a rule and not by measuring, so that every rank and every run sums in the same order."""
    if dtype == torch.float32:
        return dict(TILE=64, TILE_K=32, num_warps=4, num_stages=3)
    if m < 1024:
        return dict(TILE=64, TILE_K=64, num_warps=4, num_stages=4)
    return dict(TILE=128, TILE_K=64, num_warps=8, num_stages=3)


def _launch(a: Tensor, b: Tensor, c: Optional[Tensor], beta: float, alpha: float) -> Tensor:
    batch, m, k = a.shape
    out = a.new_empty(batch, m, m)
    tiles = _tiles(m, a.dtype)
    a, b, c = a.contiguous(), b.contiguous(), out if c is None else c.contiguous()
    side = triton.cdiv(m, tiles["TILE"])
    _symmetric_kernel[(side * (side + 1) // 2, batch)](a, b, c, out, alpha, beta, m, k, c is not out, **tiles)
    return out


def _gram(x: Tensor) -> Tensor:
    return _launch(x, x, None, 0.0, 1.0)


def _symmetric(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return _launch(a, b, c, beta, alpha)


TRITON = Products("triton", _gram, _symmetric, min_side=MIN_SIDE)
