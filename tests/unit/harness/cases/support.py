# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Marks of all kinds: on a class, twice on a function, on one parameter; a test that is skipped."""

import pytest


@pytest.mark.support(feature="heads", engine="all", state="exact")
class TestHeads:

    def test(self):
        pass


@pytest.mark.support(feature="NVMe", engine="ZeRO-3", state="exact")
@pytest.mark.support(feature="NVMe", engine="ZeRO-2", state="refused")
def test_twice():
    pass


@pytest.mark.parametrize("number", [
    1,
    pytest.param(2, marks=pytest.mark.support(feature="experts", engine="SuperOffload", state="refused")),
    pytest.param(3, marks=pytest.mark.support(feature="experts", engine="ZeRO-1", state="exact")),
])
def test_one(number):
    pass


@pytest.mark.support(feature="never", engine="all", state="exact")
def test_skipped():
    pytest.skip("so nothing is shown")


@pytest.mark.parametrize("engine, dtype", [("zero1", "bf16"), ("zero3_offload", "fp32")])
@pytest.mark.support(feature="weights in {dtype}", state="exact")
def test_parameters(engine, dtype):
    pass
