# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The functions that users import by name: stock's signatures, the contract's arithmetic."""

import inspect
import math

import pytest
import torch

from deepspeed.runtime.zero.muon.coefficients import resolve
from deepspeed.runtime.zero.muon.newton_schulz import orthogonalize
from deepspeed.runtime.zero.muon.original_muon import (NS_METHODS, adam_update, muon_update, ns_compute_dtype,
                                                       zeropower_via_gram_newtonschulz, zeropower_via_newtonschulz5)

TRIPLE = (3.4445, -4.7750, 2.0315)
# Of an element of an update; measured 1.4e-6 in fp32 and 1.1e-3 in fp16, where the accelerator or CPU is fast in it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}[ns_compute_dtype()]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected_update(g, m, beta=0.95, nesterov=True, steps=5):
    """Section by section from the definition, one matrix, float64: the update and the new momentum."""
    g, m = g.double(), m.double()
    m = beta * m + (1 - beta) * g
    u = (1 - beta) * g + beta * m if nesterov else m
    left, s, right = torch.linalg.svd(u / u.norm(), full_matrices=False)
    a, b, c = TRIPLE
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return math.sqrt(max(1, g.shape[0] / g.shape[1])) * ((left * s) @ right), m


def test_signatures_are_stocks():
    parameters = inspect.signature(muon_update).parameters
    assert {
        name: p.default
        for name, p in parameters.items() if p.default is not p.empty
    } == {
        "beta": 0.95,
        "ns_steps": 5,
        "nesterov": True,
        "ns_method": "gram",
        "is_expert_group": False,
        "num_heads": None
    }
    assert list(parameters)[:2] == ["grad", "momentum"]
    for function in (zeropower_via_newtonschulz5, zeropower_via_gram_newtonschulz):
        assert list(inspect.signature(function).parameters) == ["G", "steps"]
    assert list(inspect.signature(adam_update).parameters) == ["grad", "buf1", "buf2", "step", "betas", "eps"]
    assert inspect.signature(ns_compute_dtype).parameters["ns_method"].default == "gram"
    assert NS_METHODS == {"standard", "gram"}


def test_zeropower_functions_return_their_compute_dtype():
    x = gaussian(2, 8, 20)
    for function, method in ((zeropower_via_newtonschulz5, "standard"), (zeropower_via_gram_newtonschulz, "gram")):
        got = function(x, steps=4)
        assert got.dtype == ns_compute_dtype(method)
        assert torch.equal(got, orthogonalize(x, method=method, triples=resolve("jordan", 4)))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16), (1, 7)])
def test_muon_update_is_the_contract(shape, nesterov):
    g, m = gaussian(*shape, seed=1), gaussian(*shape, seed=2)
    grad, momentum = g.clone(), m.clone()
    got = muon_update(grad, momentum, nesterov=nesterov)
    update, new_momentum = expected_update(g, m, nesterov=nesterov)
    assert torch.equal(grad, g), "the gradient is not ours to change"
    torch.testing.assert_close(momentum.double(), new_momentum, atol=3e-7, rtol=0)
    torch.testing.assert_close(got.double(), update, atol=TOLERANCE, rtol=0)
    assert got.dtype == grad.dtype and got.is_contiguous()


@pytest.mark.parametrize("shape", [(6, 3, 5), (6, 4, 3, 3), (6, 2, 2, 3, 3)])
def test_a_convolution_kernel_of_any_dimension_is_one_matrix(shape):
    g, m = gaussian(*shape, seed=1), gaussian(*shape, seed=2)
    flat = muon_update(g.flatten(1), m.flatten(1).clone())
    got = muon_update(g, m)
    assert got.shape == g.shape and torch.equal(got, flat.view_as(g))
    torch.testing.assert_close(got.flatten(1).double(),
                               expected_update(g.flatten(1),
                                               gaussian(*shape, seed=2).flatten(1))[0],
                               atol=TOLERANCE,
                               rtol=0)


def test_an_expert_stack_is_orthogonalized_expert_by_expert():
    g, m = gaussian(3, 10, 4, seed=1), gaussian(3, 10, 4, seed=2)
    each = torch.stack([muon_update(g[e], m[e].clone()) for e in range(3)])
    assert torch.equal(muon_update(g, m, is_expert_group=True), each)


def test_heads_are_orthogonalized_head_by_head():
    g, m = gaussian(12, 8, seed=1), gaussian(12, 8, seed=2)
    each = torch.cat([muon_update(g[h:h + 4], m[h:h + 4].clone()) for h in range(0, 12, 4)])
    assert torch.equal(muon_update(g, m, num_heads=3), each)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_an_overflow_is_seen_and_leaves_the_momentum(poison, nesterov):
    g, m = gaussian(5, 9), gaussian(5, 9, seed=2)
    g[2, 3] = poison
    momentum = m.clone()
    got = muon_update(g, momentum, nesterov=nesterov)
    assert torch.equal(momentum, m)
    assert torch.equal(got, g) or (got.isnan() == g.isnan()).all()
    assert not got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_computed_in_fp32(dtype):
    g, m = (gaussian(8, 20, seed=1) * 300).to(dtype), (gaussian(8, 20, seed=2) * 300).to(dtype)
    momentum = m.clone()
    got = muon_update(g, momentum)
    wide_momentum = m.float()
    wide = muon_update(g.float(), wide_momentum)
    assert got.dtype == momentum.dtype == dtype
    assert torch.equal(got, wide.to(dtype)) and torch.equal(momentum, wide_momentum.to(dtype))


def test_what_a_caller_gets_wrong():
    g = gaussian(6, 4)
    with pytest.raises(ValueError, match="ns_method must be one of .* got 'qr'"):
        muon_update(g, g.clone(), ns_method="qr")
    with pytest.raises(ValueError, match="6 rows are not divisible by num_heads=4"):
        muon_update(g, g.clone(), num_heads=4)
    with pytest.raises(ValueError, match=r"num_heads=2\) takes a 2-D projection, got shape \(2, 3, 4\)"):
        muon_update(gaussian(2, 3, 4), gaussian(2, 3, 4), num_heads=2)
    with pytest.raises(ValueError, match="two or more dimensions"):
        muon_update(gaussian(6), gaussian(6))


def test_a_refused_call_leaves_the_momentum():
    g, m = gaussian(6, 4), gaussian(6, 4, seed=2)
    before = m.clone()
    for wrong in (dict(num_heads=4), dict(ns_steps=0), dict(ns_method="qr")):
        with pytest.raises(ValueError):
            muon_update(g, m, **wrong)
    assert torch.equal(m, before)


def test_adam_update_is_torchs_adam():
    p = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = torch.optim.Adam([p], lr=1.0, betas=(0.9, 0.99), eps=1e-8)
    mean, mean_square, expected = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 5):
        g = gaussian(50, seed=step).double()
        p.grad = g.clone()
        optimizer.step()
        expected -= adam_update(g, mean, mean_square, step, (0.9, 0.99), 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
