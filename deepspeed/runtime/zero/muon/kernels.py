# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which implementation of the symmetric products runs: a short trial on each rank, one choice for all of them.

Which rank orthogonalizes a matrix depends on the world's size, so that all ranks of a process group must run the same
kernel. Each tries the candidates once, on the same matrices, when a plan is built; what they found is gathered, and
`choose` reads the same from it everywhere. fp32 always takes the batched products, which are the library's own.
"""

import importlib
import importlib.util
import os
import time
from dataclasses import dataclass
from typing import Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon.exchange import Exchange
from deepspeed.runtime.zero.muon.products import BATCHED, Products
from deepspeed.utils import logger

KERNELS_ENV = "DS_MUON_KERNELS"
AUTO = "auto"

# A candidate replaces the batched products where it takes at most this share of their time: less is not worth kernels
# that another run, whose clock says otherwise, would not take.
WORTH_IT = 0.9

# (batch, m, n) of the trial: one with ragged tiles for the result, one as large as a layer for the time.
CHECKED_SHAPE = (2, 272, 528)
TIMED_SHAPE = (2, 2048, 4096)
TIMED_RUNS = 5

Candidates = Mapping[str, Callable[[], Products]]


@dataclass(frozen=True)
class Trial:
    """What a rank found about a candidate: seconds of its products, or None and why it was refused."""
    name: str
    seconds: Optional[float]
    refused: str = ""


def agree(exchange: Exchange, device: torch.device, dtype: torch.dtype) -> Products:
    """The products that all ranks of `exchange` run in `dtype` on `device`. Collective, except on a CPU and in fp32.

    The environment variable DS_MUON_KERNELS (auto, batched, triton, quack) names one instead; it must be installed.
    Raises ValueError for a name that is not known or not to be had, or not the same on all ranks.
    """
    if device.type == "cpu" or dtype == torch.float32:
        return BATCHED
    wanted = os.environ.get(KERNELS_ENV) or AUTO
    found = candidates(device)
    settings = exchange.gather_objects((wanted, sorted(found)))
    if len({setting for setting, _ in settings}) > 1:
        raise ValueError(f"environment variable {KERNELS_ENV} must be the same on all ranks, got by rank: "
                         f"{[setting for setting, _ in settings]}")
    everywhere = set(found).intersection(*(names for _, names in settings))
    if wanted != AUTO:
        if wanted not in everywhere:
            raise ValueError(
                f"environment variable {KERNELS_ENV} names {wanted!r}, which is not to be had on all ranks; "
                f"set it to one of {sorted([AUTO, *everywhere])}")
        return found[wanted]()
    if len(everywhere) == 1:
        return BATCHED
    trials = tried({name: found[name] for name in sorted(everywhere)}, device, dtype)
    return found[choose(exchange.gather_objects(trials))]()


def candidates(device: torch.device) -> Candidates:
    """The implementations whose packages are installed here and that are made for this device, by name."""
    found: dict[str, Callable[[], Products]] = {BATCHED.name: lambda: BATCHED}
    if get_accelerator().is_triton_supported() and importlib.util.find_spec("triton"):
        found["triton"] = _triton
    if importlib.util.find_spec("quack") and device.type == "cuda":
        # Its kernels are for Hopper (9) and Blackwell (10).
        if torch.get_device_module(device).get_device_capability(device)[0] in (9, 10):
            found["quack"] = _quack
    return found


def _triton() -> Products:
    return importlib.import_module("deepspeed.runtime.zero.muon.symmetric_triton").TRITON


def _quack() -> Products:
    """gemm_symmetric of quack-kernels (https://github.com/Dao-AILab/quack), in CuTe, as gram-newton-schulz runs it."""
    gemm_symmetric = importlib.import_module("quack.gemm_interface").gemm_symmetric

    def gram(x: Tensor) -> Tensor:
        return gemm_symmetric(x, x.mT)

    def symmetric(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
        return gemm_symmetric(a, b, C=c, alpha=float(alpha), beta=float(beta))

    # Its tiles are 256 wide.
    return Products("quack", gram, symmetric, min_side=256)


def tried(found: Candidates,
          device: torch.device,
          dtype: torch.dtype,
          *,
          checked: tuple[int, int, int] = CHECKED_SHAPE,
          timed: tuple[int, int, int] = TIMED_SHAPE,
          clock: Callable[[], float] = time.perf_counter) -> list[Trial]:
    """Try each candidate: an exception or a wrong result refuses it, with one warning, else it is timed.

    Wrong is what differs from fp32 products by more than the rounding of `dtype`: in the Frobenius norm by its eps,
    where rounding to nearest gives about a third of that.
    """
    return [_trial(name, make, device, dtype, checked, timed, clock) for name, make in found.items()]


def _trial(name: str, make: Callable[[], Products], device: torch.device, dtype: torch.dtype,
           checked: tuple[int, int, int], timed: tuple[int, int, int], clock: Callable[[], float]) -> Trial:
    try:
        products = make()
        error = _error(products, _matrices(checked, device, dtype))
        bound = torch.finfo(dtype).eps
        if not error <= bound:
            raise ArithmeticError(f"its products are off by {error:.1e} of their norm, more than {bound:.1e}")
        return Trial(name, _seconds(products, _matrices(timed, device, dtype), clock))
    except Exception as refusal:  # whatever a package of another version raises
        logger.warning(f"Muon: the {name!r} kernels for symmetric products are installed and not used, since "
                       f"{type(refusal).__name__}: {refusal}. The next best ones are; {KERNELS_ENV}={BATCHED.name} "
                       "does not try them.")
        return Trial(name, None, f"{type(refusal).__name__}: {refusal}")


def _matrices(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same on every rank and device: sines at ever new phases, of Frobenius norm 1."""
    batch, m, n = shape
    wave = torch.arange(batch * m * n, device=device, dtype=torch.float32).remainder_(9973).mul_(1.618).sin_()
    x = wave.view(shape)
    return (x / x.square().sum((-2, -1), keepdim=True).sqrt()).to(dtype)


def _error(products: Products, x: Tensor) -> float:
    """Largest relative error of the four kinds of results in an iteration, against fp32."""

    def against(got: Tensor, expected: Tensor) -> float:
        return ((got.float() - expected).norm() / expected.norm()).item()

    wide = x.float()
    errors = [against(products.gram(x), wide @ wide.mT)]
    gram = BATCHED.gram(x) * 8
    square = BATCHED.symmetric(gram, gram, gram, -4.775, 2.0315)
    for c, a, b, beta, alpha in ((gram, gram, gram, -4.775, 2.0315), (gram, square, gram, 3.4445, 1.0),
                                 (square, gram, square, 3.4445, 1.0)):
        expected = beta * c.float() + alpha * (a.float() @ b.float())
        errors.append(against(products.symmetric(c, a, b, beta, alpha), expected))
    return max(errors)


def _seconds(products: Products, x: Tensor, clock: Callable[[], float]) -> float:
    """The shortest of some runs of the symmetric products of an iteration's step; one before to compile."""
    synchronize = get_accelerator().synchronize
    found = []
    for _ in range(1 + TIMED_RUNS):
        synchronize()
        start = clock()
        gram = products.gram(x)
        products.symmetric(gram, gram, gram, -4.775, 2.0315)
        synchronize()
        found.append(clock() - start)
    return min(found[1:])


def choose(trials_by_rank: Sequence[Sequence[Trial]]) -> str:
    """The name to run, from what all ranks found; a function of its argument alone.

    Candidates that a rank refused are out. The others count with their slowest rank; the fastest wins if it takes at
    most WORTH_IT of the time of the batched products, which win otherwise.
    """
    slowest: dict[str, float] = {}
    for name in {trial.name for trials in trials_by_rank for trial in trials}:
        found = [trial.seconds for trials in trials_by_rank for trial in trials if trial.name == name]
        if len(found) == len(trials_by_rank) and all(seconds is not None for seconds in found):
            slowest[name] = max(filter(None, found), default=0.0)
    limit = WORTH_IT * slowest.get(BATCHED.name, float("inf"))
    faster = [(seconds, name) for name, seconds in slowest.items() if name != BATCHED.name and seconds <= limit]
    return min(faster)[1] if faster else BATCHED.name
