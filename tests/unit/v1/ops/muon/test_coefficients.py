# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The coefficient tables against their published procedures, the cost model against counted products."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.runtime.zero.muon import coefficients
from deepspeed.runtime.zero.muon.coefficients import (CANS, COEFFICIENT_SETS, POLAR_EXPRESS, flops, resolve,
                                                      restart_positions, uses_gram)
from deepspeed.runtime.zero.muon.newton_schulz import gram_iteration, standard_iteration


def minimax_quintic(lower: float, upper: float) -> np.ndarray:
    """(a, b, c) of the odd quintic nearest to 1 on [lower, upper]: Remez exchange on four alternation points."""
    if lower / upper > 1 - 5e-6:  # there the alternation is below rounding, and the limit is Taylor's
        return np.array([15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5])
    inner, error = ((3 * lower + upper) / 4, (lower + 3 * upper) / 4), np.inf
    while True:
        points = np.array([lower, *inner, upper])
        system = np.stack([points, points**3, points**5, np.array([1, -1, 1, -1])], axis=1)
        *coefficients_, new_error = np.linalg.solve(system, np.ones(4))
        a, b, c = coefficients_
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b**2 - 20 * a * c)) / (10 * c))
        if abs(new_error - error) <= 1e-15:
            return np.array(coefficients_)
        error = new_error


def greedy_composition(lower: float, steps: int, cushion: float) -> np.ndarray:
    """Triples [steps, 3]: each the minimax quintic of the image of the one before, centred on 1 (arXiv:2505.16932)."""
    upper, triples = 1.0, []
    for _ in range(steps):
        triple = minimax_quintic(max(lower, cushion * upper), upper)
        image = [triple @ np.array([s, s**3, s**5]) for s in (lower, upper)]
        triple, lower = triple * 2 / sum(image), image[0] * 2 / sum(image)
        upper = 2 - lower
        triples.append(triple)
    return np.array(triples)


def test_polar_express_is_the_published_procedure():
    assert POLAR_EXPRESS.triples[0] == (8.28721201814563, -23.595886519098837, 17.300387312530933)
    computed = greedy_composition(1e-3, 8, cushion=0.02407327424182761)
    # Measured: 1e-14 over the first six, 8e-11 and 5e-9 for the last two, where the alternation drowns in rounding.
    np.testing.assert_allclose(computed[:6], POLAR_EXPRESS.triples[:6], rtol=1e-13)
    np.testing.assert_allclose(computed[6:], POLAR_EXPRESS.triples[6:], rtol=2e-8)


@pytest.mark.parametrize("entry", [POLAR_EXPRESS, CANS], ids=lambda entry: entry.name)
def test_minimax_sets_run_with_a_safety_factor(entry):
    """As Algorithm 1 of arXiv:2505.16932 has it: all but the table's last polynomial; `triples` are as published."""
    assert entry.safety == 1.01
    count = len(entry.triples)
    for (a, b, c), got in zip(entry.triples[:-1], resolve(entry.name, count + 1)):
        assert got == pytest.approx((a / 1.01, b / 1.01**3, c / 1.01**5), rel=1e-15)
    assert resolve(entry.name, count + 1)[count - 1:] == (entry.triples[-1], ) * 2


def test_cans_is_the_greedy_minimax_without_cushion():
    computed = greedy_composition(1e-3, 5, cushion=0.0)
    np.testing.assert_array_equal(np.round(computed, 4), np.array(CANS.triples))


@pytest.mark.parametrize("name", sorted(COEFFICIENT_SETS))
def test_five_steps_map_the_valid_range_into_the_output_range(name):
    entry = COEFFICIENT_SETS[name]
    s = np.geomspace(*entry.valid_range, 200_001)
    for a, b, c in resolve(name, 5):
        s = a * s + b * s**3 + c * s**5
    assert entry.output_range[0] <= s.min() and s.max() <= entry.output_range[1]
    # The stated range is not wider than needed.
    assert entry.output_range[0] > s.min() - 0.02 and entry.output_range[1] < s.max() + 0.02
    assert entry.source and entry.name == name


def test_resolve_takes_the_first_triples_and_repeats_the_last():
    assert resolve("jordan", 5) == ((3.4445, -4.7750, 2.0315), ) * 5
    assert resolve("you", 2) == COEFFICIENT_SETS["you"].triples[:2]
    assert resolve("you", 7) == COEFFICIENT_SETS["you"].triples + COEFFICIENT_SETS["you"].triples[-1:] * 2
    assert resolve([[2, -1.5, 0.5], (1.875, -1.25, 0.375)], 3) == ((2.0, -1.5, 0.5), ) + ((1.875, -1.25, 0.375), ) * 2


@pytest.mark.parametrize("bad", [
    "quintic", "", [], [[1, 2]], [[1, 2, 3, 4]], [1, 2, 3], [["a", 1, 2]], 5, None, [[float("nan"), 1, 1]],
    [[1, float("inf"), 1]]
])
def test_resolve_refuses_what_is_not_a_schedule(bad):
    with pytest.raises(ValueError, match="ns_coefficients.*jordan.*polar_express") as error:
        resolve(bad, 5)
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize("steps", [0, -1, 2.0, "5", True, None])
def test_resolve_refuses_what_is_not_a_number_of_steps(steps):
    with pytest.raises(ValueError, match="ns_steps"):
        resolve("jordan", steps)


def test_unknown_method_is_refused():
    for call in (lambda: uses_gram("svd", 4, 8), lambda: flops(4, 8, "svd", 5)):
        with pytest.raises(ValueError, match=r"ns_method must be one of \['standard', 'gram'\], got 'svd'"):
            call()


class CountProducts(TorchDispatchMode):
    """Adds up the floating-point operations of the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7, 10])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("m,n", [(16, 16), (16, 23), (16, 24), (8, 40), (1, 5)])
def test_flops_is_what_the_kernels_spend(m, n, method, steps):
    kernel = gram_iteration if uses_gram(method, m, n) else standard_iteration
    with CountProducts() as counted:
        kernel(torch.zeros(1, m, n), resolve("jordan", steps))
    assert counted.flops == flops(m, n, method, steps) == flops(n, m, method, steps)


def test_five_steps_cost_the_published_amounts():
    m = 12
    for r in (2, 3, 8):
        assert flops(m, r * m, "standard", 5) == (20 * r + 10) * m**3
        assert flops(m, r * m, "gram", 5) == (8 * r + 28) * m**3


@pytest.mark.parametrize("steps", range(2, 12))
def test_gram_is_used_exactly_where_it_is_cheaper(steps):
    m = 60
    for n in range(m, 3 * m):
        segments = 1 + len(restart_positions(steps))
        gram = 4 * segments * m * m * n + (8 * steps - 6 * segments) * m**3
        standard = flops(m, n, "standard", steps)
        assert uses_gram("gram", m, n) == uses_gram("gram", n, m) == (n >= 1.5 * m)
        assert (gram < standard) == (n > 1.5 * m)
    assert not uses_gram("standard", m, 10 * m)


def test_restarts_after_every_third_step_and_not_after_the_last():
    assert [restart_positions(steps) for steps in (1, 3, 4, 5, 6, 7, 10)] == [(), (), (3, ), (3, ), (3, ), (3, 6),
                                                                              (3, 6, 9)]


def test_the_module_needs_no_torch():
    """The planner runs where torch is not installed or too slow to import."""
    code = ("import sys, importlib.util as u; sys.modules['torch'] = None; "
            f"s = u.spec_from_file_location('c', {coefficients.__file__!r}); m = u.module_from_spec(s); "
            "sys.modules['c'] = m; s.loader.exec_module(m); print(m.flops(2, 4, 'gram', 5))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str((8 * 2 + 28) * 8), result.stderr
