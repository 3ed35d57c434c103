# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Orthogonalization of matrices by Newton-Schulz: pure functions on tensors, no collectives, no state.

A matrix X = U S V^T with Frobenius norm 1 goes to U p(...p(S)) V^T, near U V^T; the polynomials are in
coefficients.py. Matrices of one shape are one batch [batch, m, n]. Each of a batch gets the same bits as alone: see
`_to_work_layout`. The products are in products.py.
"""

import functools
import os
import types
from typing import Callable, Optional, Sequence

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.compiler import is_compile_supported
from deepspeed.runtime.zero.muon.coefficients import Triple, check_method, padded, restart_positions, uses_gram
from deepspeed.runtime.zero.muon.products import BATCHED, Products

COMPILE_ENV = "DS_MUON_COMPILE"
# A mode of torch.compile, and here a value of the variable: each graph is replayed as a CUDA graph.
CUDA_GRAPHS = "reduce-overhead"

# What a CPU has of a batch at a time, a thread: about a core's L2 cache. Measured on one thread, against the whole
# batch: 0.86 to 0.97 of the time in fp32 and 0.91 to 0.97 in bf16, of 256 x 256 to 512 x 2048; on two 0.91 to 1.0.
# Smaller matrices stay together: a call is not much shorter than they take.
CPU_PIECE_BYTES = 2**21
CPU_MATRIX_BYTES = 2**18

Kernel = Callable[..., Tensor]

# Any of these instructions makes a CPU's products in that dtype faster than its fp32 ones.
CPU_INSTRUCTIONS = {torch.float16: ("amx_fp16", ), torch.bfloat16: ("amx_bf16", "avx512_bf16")}


def compute_dtype(method: str) -> torch.dtype:
    """The dtype the iteration runs in on this accelerator: gram in fp16, standard in bf16, else fp32.

    Gram never runs in bf16: R = X X^T squares the condition number and 8 bits lose the small singular values. Whether
    half precision is supported is the accelerator's own answer. CPUs say yes where it is slower than fp32, so they are
    asked for the instructions as well (`cpu_multiplies_fast`). Ranks whose machines differ in this differ in the dtype
    of the wire, which is compared when a plan is built. Raises ValueError for an unknown method.
    """
    check_method(method)
    accelerator = get_accelerator()
    gram = method == "gram"
    half = torch.float16 if gram else torch.bfloat16
    supported = accelerator.is_fp16_supported() if gram else accelerator.is_bf16_supported()
    fast = supported and (accelerator.device_name() != "cpu" or cpu_multiplies_fast(half))
    return half if fast else torch.float32


def cpu_multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions that make products in `dtype`, fp16 or bf16, faster than in fp32, as torch
    reports them; no where an older torch has no report.

    Measured, 512 x 512 by 512 x 2048 on one core, against fp32: bf16 2.7 to 4 times as fast with AMX or AVX512-BF16
    and 60 times slower without; fp16 0.8 times as fast with AVX512-FP16, which is therefore not in the list, and 30-50
    times slower without.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(instruction) for instruction in CPU_INSTRUCTIONS[dtype])


def frobenius_norm(x: Tensor) -> Tensor:
    """Frobenius norm of each matrix of `x` [..., m, n], float64 [..., 1, 1].

    In float64, since squares underflow in fp32 below 1e-19 and overflow above 1.8e19.
    """
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)


def normalize(x: Tensor, norm: Optional[Tensor] = None) -> Tensor:
    """`x` divided by its Frobenius norm, in fp32 and before any cast: fp16 alone loses entries below 6e-8.

    `x` is [..., m, n] of any floating dtype and is not changed. `norm` (float64 or fp32, broadcastable to `x`)
    replaces the norm of the last two dimensions where `x` is only a slice of a matrix. Returns fp32 of x's shape.

    The divisor is max(norm, smallest normal fp32 number), never norm + eps, which would shrink the update of small
    gradients without a word: the result does not depend on the scale of x down to 1.2e-38, and zero stays zero. A NaN
    or an infinity makes its own matrix NaN.
    """
    return x.to(torch.float32) / divisor(frobenius_norm(x) if norm is None else norm)


def divisor(norm: Tensor) -> Tensor:
    """The fp32 number that a matrix of Frobenius norm `norm` is divided by: max(norm, smallest normal number)."""
    return norm.to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)


def standard_iteration(x: Tensor, triples: tuple[Triple, ...], products: Products = BATCHED) -> Tensor:
    """X <- aX + (bA + cA^2)X with A = X X^T, a triple a step. `x` [batch, m, n], m <= n, is not changed."""
    # Names are dropped as soon as they are done with: what a step holds at most is part of the plan's workspace.
    for a, b, c in triples:
        gram = products.gram(x)
        polynomial = products.symmetric(gram, gram, gram, b, c)
        del gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
        del polynomial
    return x


def gram_iteration(x: Tensor,
                   triples: tuple[Triple, ...],
                   restarts: Optional[tuple[int, ...]] = None,
                   products: Products = BATCHED) -> Tensor:
    """The same polynomials applied to R = X X^T (m x m) instead of X: X <- QX at a restart and at the end only.

    With P = aI + bR + cR^2 a step is Q <- QP and R <- PRP. `x` [batch, m, n], m <= n, is not changed; never bf16.
    `restarts` are the numbers of steps after which X and R are rebuilt (default: `restart_positions`), without which Q
    grows like the inverse of the smallest singular value and rounding in R with it.
    Source: N. Amsel et al., arXiv:2505.16932, appendix F; https://tridao.me/blog/2026/gram-newton-schulz/.
    """
    steps = len(triples)
    restarts = restart_positions(steps) if restarts is None else restarts
    # As above, what is done with is dropped before the next product is made.
    r, q = products.gram(x), None
    for step, (a, b, c) in enumerate(triples):
        if step in restarts:
            del r
            x = torch.bmm(q, x)
            q = None
            r = products.gram(x)
        z = products.symmetric(r, r, r, b, c)
        # P = aI + Z is formed only where it is Q itself; a product with P is a fused a*() + Z(), rounded once.
        q = _plus_diagonal(z, a) if q is None else products.symmetric(q, z, q, a, 1.0)
        if step + 1 < steps and step + 1 not in restarts:
            pr = products.symmetric(r, z, r, a, 1.0)
            del r
            r = products.symmetric(pr, pr, z, a, 1.0)
            del pr
        del z
    del r
    return torch.bmm(q, x)


def _plus_diagonal(square: Tensor, value: float) -> Tensor:
    result = square.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(value)
    return result


def iterate(x: Tensor,
            *,
            method: str,
            triples: tuple[Triple, ...],
            compile: Optional[bool] = None,
            products: Products = BATCHED) -> Tensor:
    """Run the iteration on `x` [batch, m, n], normalized and in the compute dtype; returns a new tensor like it.

    `x` is not changed, the result is contiguous. Gram runs where it is cheaper (`uses_gram`), else the standard
    iteration in the same dtype. A tall matrix costs what the wide one does. `compile` forces torch.compile on or off;
    by default it is used on accelerators and not on the CPU, one graph a shape, at the first call, and the environment
    variable DS_MUON_COMPILE overrides that: 0, 1, or reduce-overhead for 1 with CUDA graphs. These keep their memory,
    which no plan's workspace counts.
    Raises ValueError for an unknown method, a shape that is not [batch, m, n], gram in bf16.
    """
    if x.ndim != 3:
        raise ValueError(f"Newton-Schulz takes [batch, m, n], got {tuple(x.shape)}; add or merge leading dimensions")
    gram = uses_gram(method, *x.shape[-2:])
    if method == "gram" and x.dtype == torch.bfloat16:
        raise ValueError("ns_method 'gram' does not run in bfloat16 (it loses the small singular values); "
                         "use ns_dtype float16 or float32, or ns_method 'standard'")
    if x.numel() == 0:
        return x.clone()
    m, n = sorted(padded(size) for size in x.shape[-2:])
    [result] = iterate_together([x], m, n, gram=gram, triples=triples, compile=compile, products=products)
    return result.contiguous()


def iterate_together(xs: Sequence[Tensor],
                     m: int,
                     n: int,
                     *,
                     gram: bool,
                     triples: tuple[Triple, ...],
                     compile: Optional[bool] = None,
                     products: Products = BATCHED) -> list[Tensor]:
    """`iterate` for several batches [batch, rows, cols] of either orientation, as one batch of `m` x `n` matrices.

    m <= n are multiples of PAD_MULTIPLE and at least as large as the short and the long side of each. `gram` chooses
    the iteration. Returns a tensor like each of `xs`, not contiguous; `xs` are not changed.
    """
    count = sum(map(len, xs))
    dtype, device = xs[0].dtype, xs[0].device
    chosen = products if m >= products.min_side else BATCHED
    kernel = gram_iteration if gram else standard_iteration
    pieces = _cpu_pieces(count, m * n * xs[0].element_size()) if device.type == "cpu" else 1
    if chosen.compiles and (_wants_compile(device.type) if compile is None else compile):
        # One graph, for the whole batch.
        kernel, pieces = _compiled(kernel, (count, m, n), dtype, device, triples, _compile_mode()), 1
    elif chosen is not BATCHED:
        kernel = functools.partial(kernel, products=chosen)
    if pieces == 1:
        # Not named, so that the kernel can drop its input after the first step.
        result = kernel(_to_work_layout(xs, m, n), triples)
    else:
        result = _in_pieces(kernel, _to_work_layout(xs, m, n), triples, pieces)
    results = []
    for x, own in zip(xs, result.split([len(x) for x in xs])):
        rows, cols = x.shape[-2:]
        results.append(own[:, :cols, :rows].mT if rows > cols else own[:, :rows, :cols])
    return results


def orthogonalize(x: Tensor,
                  *,
                  method: str,
                  triples: tuple[Triple, ...],
                  dtype: Optional[torch.dtype] = None) -> Tensor:
    """Normalize `x` [..., m, n], cast it once and iterate. `x` is not changed.

    Returns x's shape in `dtype` (default: `compute_dtype(method)`); leading dimensions are a batch. A NaN or an
    infinity makes its own matrix NaN and no other. Raises ValueError like `iterate`, and for fewer than two
    dimensions.
    """
    if x.ndim < 2:
        raise ValueError(f"Muon orthogonalizes matrices of two or more dimensions, got shape {tuple(x.shape)}; "
                         "give this parameter to Adam")
    work = normalize(x).to(compute_dtype(method) if dtype is None else dtype)
    batch = work.reshape(-1, *x.shape[-2:]) if work.numel() else work.new_empty(0, *x.shape[-2:])
    return iterate(batch, method=method, triples=triples).reshape(x.shape)


def _to_work_layout(xs: Sequence[Tensor], m: int, n: int) -> Tensor:
    """All matrices of `xs` [batch, rows, cols] as one contiguous [sum of batches, m, n], tall ones transposed.

    BLAS picks its kernel and its order of summation by alignment and by odd remainders, so that matrix i of a batch of
    9 x 13 matrices and the same matrix alone differ in their last bit (measured with MKL). With all dimensions
    multiples of 16 they do not in fp32 on one thread, which the tests check. On several threads some CPUs cut the
    products of a lone matrix, and in half precision oneDNN has other kernels for it: then they are equal to rounding.
    The zeros are exact: they stay zero rows and columns.
    """
    wide = [x.mT if x.shape[-2] > x.shape[-1] else x for x in xs]
    if len(wide) == 1 and wide[0].shape[-2:] == (m, n):
        return wide[0].contiguous()
    fits = all(x.shape[-2:] == (m, n) for x in wide)
    work = (xs[0].new_empty if fits else xs[0].new_zeros)(sum(map(len, xs)), m, n)
    for x, own in zip(wide, work.split([len(x) for x in xs])):
        own[:, :x.shape[-2], :x.shape[-1]].copy_(x)
    return work


def _cpu_pieces(count: int, matrix_bytes: int) -> int:
    """How often a batch is cut: so that a piece fits the caches, but has a matrix for each thread."""
    if matrix_bytes < CPU_MATRIX_BYTES:
        return 1
    threads = torch.get_num_threads()
    at_a_time = max(threads, threads * CPU_PIECE_BYTES // matrix_bytes)
    return -(-count // at_a_time)


def _in_pieces(kernel: Kernel, x: Tensor, triples: tuple[Triple, ...], pieces: int) -> Tensor:
    result = torch.empty_like(x)
    for own, part in zip(result.tensor_split(pieces), x.tensor_split(pieces)):
        own.copy_(kernel(part, triples))
    return result


def _wants_compile(device_type: str) -> bool:
    setting = os.environ.get(COMPILE_ENV, "")
    if setting not in ("", "0", "1", CUDA_GRAPHS):
        raise ValueError(
            f"environment variable {COMPILE_ENV} must be 0, 1 or {CUDA_GRAPHS}, got {setting!r}; unset it "
            "for the default")
    # On the CPU the products are all of the time, and compiling takes longer than many a test.
    return (setting != "0" if setting else device_type != "cpu") and is_compile_supported()


def _compile_mode() -> Optional[str]:
    return CUDA_GRAPHS if os.environ.get(COMPILE_ENV) == CUDA_GRAPHS else None


@functools.lru_cache(maxsize=None)
def _compiled(kernel: Kernel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
              triples: tuple[Triple, ...], mode: Optional[str]) -> Kernel:
    """The compiled kernel of one shape in a mode of torch.compile; all arguments are the cache's key.

    Each gets a code object of its own: torch.compile counts recompilations by code object, and runs whatever comes
    after the eighth shape uncompiled.
    """
    own = types.FunctionType(kernel.__code__.replace(), kernel.__globals__, kernel.__name__, kernel.__defaults__)
    backend = get_accelerator().get_compile_backend()
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, mode=mode)
