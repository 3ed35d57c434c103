# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Newton-Schulz coefficients and costs: named tables with their source. Plain numbers, no torch.

One step applies the odd polynomial p(s) = a*s + b*s^3 + c*s^5 to every singular value s of a matrix whose Frobenius
norm is 1. A set is a sequence of (a, b, c), one triple a step.
"""

import math
from dataclasses import dataclass
from typing import Sequence, Union

Triple = tuple[float, float, float]

METHODS = ("standard", "gram")

# The Gram iteration rebuilds its Gram matrix from the matrix itself every so many steps. Why 3 and not 2 (which costs
# the same for five steps): measured, see restart_positions.
RESTART_EVERY = 3

# Rows and columns are padded with zeros to a multiple of this many elements: 64 bytes in fp32, 32 in half precision.
PAD_MULTIPLE = 16


@dataclass(frozen=True)
class CoefficientSet:
    """A named schedule.

    `triples` are the published figures, unmodified. `safety` divides the singular values before each polynomial but
    the last of the table, so that rounding above 1 is not amplified; `effective`, which is what runs, has it applied.
    `valid_range`: five effective steps map every singular value in it into `output_range`. Smaller ones grow, but fall
    short; larger ones may diverge.
    """
    name: str
    triples: tuple[Triple, ...]
    source: str
    valid_range: tuple[float, float]
    output_range: tuple[float, float]
    safety: float = 1.0

    @property
    def effective(self) -> tuple[Triple, ...]:
        if self.safety == 1.0:
            return self.triples
        scaled = tuple((a / self.safety, b / self.safety**3, c / self.safety**5) for a, b, c in self.triples[:-1])
        return scaled + self.triples[-1:]


JORDAN = CoefficientSet(
    name="jordan",
    triples=((3.4445, -4.7750, 2.0315), ),
    source="K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024, "
    "https://kellerjordan.github.io/posts/muon/ (a numerical search for the steepest slope at 0)",
    valid_range=(1e-2, 1.0),
    output_range=(0.68, 1.14),
)

YOU = CoefficientSet(
    name="you",
    triples=(
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    source="after Y. Jiacheng; F. L. Cesista, Squeezing 1-2% efficiency gains out of Muon by optimizing the "
    "Newton-Schulz coefficients, 2025, https://leloykun.github.io/ponder/muon-opt-coeffs/ (as in modded-nanogpt)",
    valid_range=(1e-2, 1.0),
    output_range=(0.97, 1.04),
)

POLAR_EXPRESS = CoefficientSet(
    name="polar_express",
    triples=(
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
    source="N. Amsel, D. Persson, C. Musco, R. M. Gower, The Polar Express, 2025, arXiv:2505.16932, Algorithm 1: "
    "minimax on [1e-3, 1] with a cushion of 0.0241, and its safety factor of 1.01",
    valid_range=(1e-3, 1.0),
    output_range=(0.84, 1.13),
    safety=1.01,
)

CANS = CoefficientSet(
    name="cans",
    triples=(
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    source="E. Grishina, M. Smirnov, M. Rakhuba, Accelerating Newton-Schulz iteration for orthogonalization via "
    "Chebyshev-type polynomials, 2025, arXiv:2506.10935: minimax on [1e-3, 1], each step on the image of the one "
    "before. The safety factor is ours: without it 1.0001 becomes 3e4, and a rank-one gradient in half precision inf",
    valid_range=(1e-3, 1.0),
    output_range=(0.85, 1.12),
    safety=1.01,
)

COEFFICIENT_SETS = {entry.name: entry for entry in (JORDAN, YOU, POLAR_EXPRESS, CANS)}


def resolve(coefficients: Union[str, Sequence[Sequence[float]]], steps: int) -> tuple[Triple, ...]:
    """The `steps` triples that a run uses.

    `coefficients` is a name of `COEFFICIENT_SETS` or a list of (a, b, c). Fewer steps than triples take the first
    ones, more repeat the last one. Raises ValueError for an unknown name, a list that is empty or holds anything but
    three finite numbers an entry, and for `steps` that is not a positive integer.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"ns_steps must be an integer of at least 1, got {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            raise ValueError(f"ns_coefficients: no set is named {coefficients!r}; use one of "
                             f"{sorted(COEFFICIENT_SETS)} or give a list of (a, b, c) triples")
        triples = COEFFICIENT_SETS[coefficients].effective
    else:
        triples = _checked_triples(coefficients)
    return triples[:steps] + triples[-1:] * (steps - len(triples))


def _checked_triples(coefficients: Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    try:
        triples = tuple(tuple(float(value) for value in entry) for entry in coefficients)
    except (TypeError, ValueError):
        triples = ()
    if not triples or any(len(entry) != 3 or not all(map(math.isfinite, entry)) for entry in triples):
        raise ValueError(f"ns_coefficients must be a name of {sorted(COEFFICIENT_SETS)} or a list of one or more "
                         f"(a, b, c) triples of finite numbers, got {coefficients!r}")
    return triples


def check_method(method: str) -> None:
    """Raises ValueError unless `method` is one of METHODS."""
    if method not in METHODS:
        raise ValueError(f"ns_method must be one of {list(METHODS)}, got {method!r}")


def padded(size: int) -> int:
    """`size` rounded up to a multiple of PAD_MULTIPLE."""
    return -(-size // PAD_MULTIPLE) * PAD_MULTIPLE


def restart_positions(steps: int) -> tuple[int, ...]:
    """After how many of `steps` Gram steps the matrix is rebuilt: after every third one, never after the last.

    Five steps restart once. With the default set the worst error in fp16 is then 0.016, against 0.028 after step 2 at
    the same cost (256 x 1024, four spectra; benchmarks/results/newton_schulz_accuracy.md). More steps need more
    restarts.
    """
    return tuple(range(RESTART_EVERY, steps, RESTART_EVERY))


def uses_gram(method: str, m: int, n: int) -> bool:
    """Whether `method` runs the Gram iteration on an m x n matrix (either orientation): only where it is cheaper.

    With s steps and g = 1 + restarts the costs meet where 4r(s - g) = 6(s - g), that is at r = long/short side = 1.5
    for every number of steps. Kernels for symmetric products would move that point to 1; which iteration runs must not
    depend on them, so that weights do not depend on a measurement.
    """
    check_method(method)
    return method == "gram" and 2 * max(m, n) >= 3 * min(m, n)


def flops(m: int, n: int, method: str, steps: int, symmetric: bool = False) -> int:
    """Floating-point operations of all matrix products on one m x n matrix (a multiply-add counts two), padding apart.

    With m the short side and r = n/m, in m^3: standard steps*(4r + 2), which is 20r + 10 for five steps; Gram with g =
    1 + restarts 4r*g + 8*steps - 6*g, which is 8r + 28. With `symmetric`, products that compute half of a symmetric
    result (less the diagonal): standard steps*(3r + 1), that is 15r + 5; Gram 3r*g + 4*steps - 3*g, that is 6r + 14. A
    matrix on which `uses_gram` is false costs the standard iteration.

    Owners are dealt by the figures without `symmetric` whatever kernel runs, so that a plan does not depend on what
    was measured on a machine. Relative to each other they differ by at most 4:3 in the terms with r.
    """
    short, long = min(m, n), max(m, n)
    segments = 1 + len(restart_positions(steps))
    gram = uses_gram(method, m, n)
    # Each counts two half products: m*m*n for X X^T and 2*m*m*n for a product with X, 2*m^3 for a square one.
    with_x, square = (segments, 4 * steps - 3 * segments) if gram else (steps, steps)
    if symmetric:
        return 3 * with_x * short * short * long + square * short**3
    return 4 * with_x * short * short * long + 2 * square * short**3


def launches(gram: bool, steps: int) -> int:
    """Matrix products of an iteration, whatever the batch: 3 a step (standard), 4 a step less one a restart segment
    (Gram)."""
    return 4 * steps - 1 - len(restart_positions(steps)) if gram else 3 * steps
