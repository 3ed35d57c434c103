# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The elementwise part of the step: its formulas in float64, and the same bits however the flat vector is cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.zero.muon.update import advance_momentum_, blend, lr_scale, squared_norms, step_weights_

NUMEL = 1037


def vectors(count, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator) * scale for _ in range(count)]


def cut(vector, cuts):
    bounds = [0, *cuts, NUMEL]
    return [vector[start:stop] for start, stop in zip(bounds, bounds[1:])]


every_cut = st.lists(st.integers(0, NUMEL), max_size=40).map(sorted)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95, 0.999])
def test_momentum_and_blend_are_the_contract(beta, nesterov):
    g, m = vectors(2)
    before = g.clone()
    momentum64 = beta * m.double() + (1 - beta) * g.double()
    expected = (1 - beta) * g.double() + beta * momentum64 if nesterov else momentum64
    advance_momentum_([m], [g], beta=beta)
    momentum = m.clone()
    [u] = blend([m], [g], beta=beta, nesterov=nesterov)
    # Measured: 1.5e-7 for m and 2.4e-7 for u, entries up to 4.
    torch.testing.assert_close(m.double(), momentum64, atol=3e-7, rtol=0)
    torch.testing.assert_close(u.double(), expected, atol=5e-7, rtol=0)
    assert torch.equal(g, before) and torch.equal(m, momentum)  # only the momentum is changed, and only once
    assert (u is m) == (not nesterov)


@settings(max_examples=60, deadline=None)
@given(cuts=every_cut, nesterov=st.booleans(), beta=st.sampled_from([0.3, 0.5, 0.9, 0.95]))
def test_momentum_has_the_same_bits_for_every_cut(cuts, nesterov, beta):
    g, m = vectors(2)
    whole = m.clone()
    advance_momentum_([whole], [g], beta=beta)
    [u] = blend([whole], [g], beta=beta, nesterov=nesterov)
    advance_momentum_(cut(m, cuts), cut(g, cuts), beta=beta)
    assert torch.equal(m, whole)
    # Other cuts for the blend than for the momentum: fragments of matrices are not the spans of a partition.
    assert torch.equal(torch.cat(blend(cut(m, cuts[::2]), cut(g, cuts[::2]), beta=beta, nesterov=nesterov)), u)


@settings(max_examples=60, deadline=None)
@given(cuts=every_cut, decay=st.sampled_from([1.0, 0.998]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_weights_have_the_same_bits_for_every_cut(cuts, decay, dtype):
    w, o = vectors(2, seed=1)
    o, whole = o.to(dtype), w.clone()
    step_weights_([whole], [o], [0.034], decay=decay)
    step_weights_(cut(w, cuts), cut(o, cuts), [0.034] * (len(cuts) + 1), decay=decay)
    assert torch.equal(w, whole)


@pytest.mark.parametrize("operation", ["momentum", "weights"])
def test_same_bits_at_every_offset_and_length(operation):
    """Every place in the vector loop, in its unrolled body and in its remainder."""
    a, b = vectors(2, seed=2)

    def run(x, y):
        x = x.clone()
        if operation == "weights":
            step_weights_([x], [y], [0.026], decay=0.998)
            return torch.cat([x, x])
        advance_momentum_([x], [y], beta=0.95)
        return torch.cat([x, *blend([x], [y], beta=0.95, nesterov=True)])

    whole = run(a, b).view(2, -1)
    for offset in range(18):
        for numel in (*range(1, 70), 127, 500):
            got = run(a[offset:offset + numel], b[offset:offset + numel]).view(2, -1)
            assert torch.equal(got, whole[:, offset:offset + numel]), (offset, numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_step_weights_is_the_contract(weight_decay, dtype):
    w, o = vectors(2, seed=3)
    o, decay, factors = o.to(dtype), 1 - 0.02 * weight_decay, (0.02 * 1.7, 0.02 * 0.4)
    expected = torch.cat([
        part * decay - factor * update for part, update, factor in zip(w.double().split(600),
                                                                       o.double().split(600), factors)
    ])
    widened = w.clone()
    step_weights_(widened.split(600), o.float().split(600), factors, decay=decay)
    step_weights_(w.split(600), o.split(600), factors, decay=decay)
    assert torch.equal(w, widened)  # a half-precision update is widened exactly
    torch.testing.assert_close(w.double(), expected, atol=5e-7, rtol=0)  # measured 2.7e-7


def test_without_weight_decay_a_zero_update_touches_nothing():
    w = torch.tensor([1e-40, float("inf"), -3.0])
    before = w.clone()
    step_weights_([w], [torch.zeros(3)], [0.1], decay=1.0)
    assert torch.equal(w, before)


@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1.0, 1e25])
def test_squared_norms_neither_underflow_nor_overflow(scale):
    a, b = vectors(2, seed=4, scale=scale)
    got = squared_norms([a, b[:10]])
    assert got.dtype == torch.float64 and got.shape == (2, )
    expected = torch.stack([a.double().square().sum(), b[:10].double().square().sum()])
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)  # measured 1.4e-15
    assert (got > 0).all() and got.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(cuts=every_cut)
def test_norm_of_the_slices_is_the_norm_of_the_matrix(cuts):
    [a] = vectors(1, seed=5)
    parts = [part for part in cut(a, cuts) if part.numel()]
    whole, summed = squared_norms([a])[0], squared_norms(parts).sum()
    assert abs(whole - summed) <= 1e-14 * whole
    assert whole.sqrt().float() == summed.sqrt().float()


def test_empty_lists_are_no_work():
    advance_momentum_([], [], beta=0.9)
    assert blend([], [], beta=0.9, nesterov=True) == []
    step_weights_([], [], [], decay=0.9)


def test_lr_scale():
    assert lr_scale(8, 2, "original") == 2.0
    assert lr_scale(2, 8, "original") == 1.0
    assert lr_scale(2, 8, "match_rms_adamw") == lr_scale(8, 2, "match_rms_adamw") == 0.2 * math.sqrt(8)
    with pytest.raises(ValueError, match=r"adjust_lr_fn must be one of \['original', 'match_rms_adamw'\], got 'rms'"):
        lr_scale(2, 8, "rms")
