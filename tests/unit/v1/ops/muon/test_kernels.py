# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Implementations of the symmetric products: which one is chosen, and that Triton's computes what it should."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from deepspeed.runtime.zero.muon import kernels
from deepspeed.runtime.zero.muon.coefficients import flops, launches
from deepspeed.runtime.zero.muon.kernels import Trial, choose, tried
from deepspeed.runtime.zero.muon.merge import LAUNCH_FLOPS, MAX_PADDING_NUMEL, merge
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.newton_schulz import iterate, iterate_together, normalize
from deepspeed.runtime.zero.muon.plan import Batch
from deepspeed.runtime.zero.muon.products import BATCHED, Products
from unit.v1.ops.muon.simulate import on_all_ranks
from unit.v1.ops.muon.test_newton_schulz import JORDAN5, gaussian, reference, relative_error

CPU = torch.device("cpu")
SMALL = dict(checked=(1, 32, 48), timed=(1, 32, 48))


def half_computed(name="half", **options):
    """Products that compute the lower triangle and mirror it, as a kernel does, from the batched ones."""

    def mirrored(full):
        return full.tril() + full.tril(-1).mT

    return Products(name, lambda x: mirrored(BATCHED.gram(x)), lambda *args: mirrored(BATCHED.symmetric(*args)),
                    **options)


def broken(what):
    """Products that are wrong in one way each."""
    wrong = {
        "gram": Products("broken", lambda x: BATCHED.gram(x) * 1.02, BATCHED.symmetric),
        "beta": Products("broken", BATCHED.gram, lambda c, a, b, beta, alpha: BATCHED.symmetric(c, a, b, 1.0, alpha)),
        "alpha": Products("broken", BATCHED.gram, lambda c, a, b, beta, alpha: BATCHED.symmetric(c, a, b, beta, 1.0)),
        "c": Products("broken", BATCHED.gram, lambda c, a, b, beta, alpha: BATCHED.symmetric(a, a, b, beta, alpha)),
        "upper half": Products("broken", lambda x: BATCHED.gram(x).tril(), BATCHED.symmetric),
        "nan": Products("broken", lambda x: BATCHED.gram(x).fill_(float("nan")), BATCHED.symmetric),
    }
    return wrong[what]


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(kernels.logger, "warning", said.append)
    return said


class TestTrial:

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_right_products_are_timed_by_their_fastest_run(self, dtype, warnings):
        ticks = iter([0.0, 9.0] + [value for run in range(5) for value in (10.0 * run, 10.0 * run + 5 - run)])
        [trial] = tried({"half": half_computed}, CPU, dtype, clock=lambda: next(ticks), **SMALL)
        assert trial == Trial("half", 1.0) and not warnings

    @pytest.mark.parametrize("what", ["gram", "beta", "alpha", "c", "upper half", "nan"])
    def test_wrong_products_are_refused_with_one_warning(self, what, warnings):
        batched, wrong = tried({
            "batched": lambda: BATCHED,
            "wrong": lambda: broken(what)
        }, CPU, torch.bfloat16, **SMALL)
        assert batched.seconds is not None and wrong.seconds is None and "ArithmeticError" in wrong.refused
        [said] = warnings
        assert "'wrong' kernels" in said and "off by" in said and "DS_MUON_KERNELS" in said

    def test_an_exception_is_refused_with_one_warning(self, warnings):

        def missing():
            raise ImportError("libcuda.so is too old")

        trials = tried({"new": missing}, CPU, torch.bfloat16, **SMALL)
        assert trials == [Trial("new", None, "ImportError: libcuda.so is too old")]
        assert len(warnings) == 1 and "ImportError: libcuda.so is too old" in warnings[0]


class TestChoice:

    @pytest.mark.parametrize("trials, expected", [
        ([[("batched", 10.0)]], "batched"),
        ([[("batched", 10.0), ("triton", 6.0)]], "triton"),
        ([[("batched", 10.0), ("triton", 6.0), ("quack", 5.0)]], "quack"),
        ([[("batched", 10.0), ("triton", 9.5)]], "batched"),
        ([[("batched", 10.0), ("triton", None)]], "batched"),
        ([[("batched", 10.0), ("triton", 6.0)], [("batched", 10.0), ("triton", None)]], "batched"),
        ([[("batched", 10.0), ("triton", 6.0)], [("batched", 10.0), ("triton", 9.9)]], "batched"),
        ([[("batched", 10.0), ("triton", 6.0), ("quack", 3.0)], [("batched", 9.0), ("triton", 7.0)]], "triton"),
    ])
    def test_the_fastest_that_all_ranks_accept(self, trials, expected):
        by_rank = [[Trial(name, seconds) for name, seconds in found] for found in trials]
        assert choose(by_rank) == expected
        assert choose([list(reversed(found)) for found in reversed(by_rank)]) == expected

    def agreed(self, monkeypatch, by_rank, setting=None):
        """What each rank runs, where `by_rank` are its candidates with their seconds."""
        monkeypatch.delenv(kernels.KERNELS_ENV, raising=False)
        if setting:
            monkeypatch.setenv(kernels.KERNELS_ENV, setting)
        monkeypatch.setattr(
            kernels, "candidates", lambda rank: {
                "batched": lambda: BATCHED,
                **{
                    name: lambda name=name: half_computed(name)
                    for name in by_rank[rank.index]
                }
            })
        monkeypatch.setattr(
            kernels, "tried",
            lambda found, rank, dtype: [Trial(name, {
                "batched": 10.0,
                **by_rank[rank.index]
            }[name]) for name in found])
        # The rank stands in the device's index, so that one process can play several.
        return [
            found.name for found in on_all_ranks(
                len(by_rank),
                lambda exchange: kernels.agree(exchange, torch.device("cuda", exchange.rank), torch.bfloat16))
        ]

    def test_all_ranks_run_the_same(self, monkeypatch):
        assert self.agreed(monkeypatch, [{"a": 5.0, "b": 6.0}, {"a": 9.9, "b": 6.0}]) == ["b", "b"]
        assert self.agreed(monkeypatch, [{"a": 5.0, "b": 6.0}, {"b": 7.0}]) == ["b", "b"]
        assert self.agreed(monkeypatch, [{"a": 5.0}, {}]) == ["batched", "batched"]
        assert self.agreed(monkeypatch, [{"a": None}, {"a": 1.0}]) == ["batched", "batched"]

    def test_one_that_is_named(self, monkeypatch):
        found = [{"a": 5.0, "b": 6.0}, {"b": 7.0, "a": 5.0}]
        assert self.agreed(monkeypatch, found, "b") == ["b", "b"]
        assert self.agreed(monkeypatch, found, "batched") == ["batched", "batched"]
        with pytest.raises(ValueError, match=r"DS_MUON_KERNELS names 'c'.*set it to one of \['a', 'auto', 'b', 'bat"):
            self.agreed(monkeypatch, found, "c")
        with pytest.raises(ValueError, match="DS_MUON_KERNELS names 'a'"):
            self.agreed(monkeypatch, [{"a": 1.0}, {}], "a")

    def test_fp32_and_the_cpu_have_no_choice_and_exchange_nothing(self, monkeypatch):
        monkeypatch.setattr(kernels, "candidates", lambda device: pytest.fail("looked for kernels"))
        assert kernels.agree(None, CPU, torch.bfloat16) is BATCHED
        assert kernels.agree(None, torch.device("cuda"), torch.float32) is BATCHED

    def test_on_a_cpu_there_is_nothing_else(self):
        assert list(kernels.candidates(CPU)) == ["batched"]


class TestOptimizer:

    def optimizer(self, monkeypatch, agree):
        monkeypatch.setattr("deepspeed.runtime.zero.muon.optimizer.agree", agree)
        params = [torch.nn.Parameter(torch.ones(16, size)) for size in (16, 32, 48)]
        for param in params:
            param.grad = torch.ones_like(param)
        groups = [dict(params=params[:2], use_muon=True), dict(params=params[2:], use_muon=True, ns_method="standard")]
        return MuonWithAuxAdam([dict(group, ns_dtype="float32") for group in groups])

    def test_runs_what_was_agreed_on_and_asks_once(self, monkeypatch):
        asked, used = [], []
        counted = Products("counted", lambda x: (used.append(x.shape), BATCHED.gram(x))[1], BATCHED.symmetric)

        def agree(exchange, device, dtype):
            asked.append((exchange.world_size, device, dtype))
            return counted

        optimizer = self.optimizer(monkeypatch, agree)
        optimizer.step()
        optimizer.step()
        assert asked == [(1, CPU, torch.float32)]
        assert {shape[-1] for shape in used} == {16, 32, 48}

    def test_a_refusal_is_not_stepped_over(self, monkeypatch):

        def agree(exchange, device, dtype):
            raise ValueError("names 'c'")

        optimizer = self.optimizer(monkeypatch, agree)
        for _ in range(2):
            with pytest.raises(ValueError, match="names 'c'"):
                optimizer.step()
        assert all((param == 1).all() for group in optimizer.param_groups for param in group["params"])


class TestIteration:

    @pytest.mark.parametrize("method", ["standard", "gram"])
    @pytest.mark.parametrize("m, n", [(24, 24), (20, 70), (70, 20)])
    def test_symmetric_products_give_the_polynomials(self, method, m, n):
        x = normalize(gaussian(2, m, n))
        got = iterate(x, method=method, triples=JORDAN5, products=half_computed())
        assert relative_error(got, reference(x, JORDAN5)) < 5e-6  # measured 1e-6 at most

    def test_every_symmetric_product_goes_through_them(self):
        """And in each step's order: m^2 r for X X^T and m^3 for the others, which is what `flops` says."""
        for method, squares, grams in (("standard", 5, 5), ("gram", 14, 2)):
            calls = []
            counted = Products("counted", lambda x: (calls.append("gram"), BATCHED.gram(x))[1], lambda *args:
                               (calls.append("symmetric"), BATCHED.symmetric(*args))[1])
            iterate(normalize(gaussian(1, 16, 64)), method=method, triples=JORDAN5, products=counted)
            assert (calls.count("symmetric"), calls.count("gram")) == (squares, grams)

    def test_short_matrices_take_the_batched_products(self):
        forbidden = Products("forbidden",
                             lambda x: pytest.fail("used"),
                             lambda *args: pytest.fail("used"),
                             min_side=64)
        x = normalize(gaussian(1, 48, 100))
        assert torch.equal(iterate(x, method="gram", triples=JORDAN5, products=forbidden),
                           iterate(x, method="gram", triples=JORDAN5))

    def test_costs(self):
        m, r = 64, 4
        assert flops(m, r * m, "gram", 5, symmetric=True) == (6 * r + 14) * m**3
        assert flops(m, r * m, "standard", 5, symmetric=True) == (15 * r + 5) * m**3
        assert flops(m, m, "gram", 5, symmetric=True) == 20 * m**3
        assert (launches(True, 5), launches(False, 5)) == (18, 15)


def batches_of(*shapes):
    found, offset = [], 0
    for number, rows, cols in shapes:
        found.append(Batch(offset, number, rows, cols, 1))
        offset += number * rows * cols
    return found


class TestMerge:

    def merged(self, *shapes, method="gram", on_cpu=False):
        return [(group.rows, group.cols, group.count, group.gram)
                for group in merge(batches_of(*shapes), method=method, steps=5, on_cpu=on_cpu)]

    def test_transposed_and_equally_padded_shapes_go_together(self):
        for on_cpu in (True, False):
            assert self.merged((3, 32, 64), (2, 64, 32), (1, 30, 60), (4, 48, 48), on_cpu=on_cpu) == [
                (32, 64, 6, True),
                (48, 48, 4, False),
            ]

    def test_large_ones_stay_apart_on_a_cpu(self):
        shapes = [(16, 32, 64), (17, 64, 32), (1, 64, 32)]
        assert self.merged(*shapes, on_cpu=True) == [(32, 64, 17, True), (32, 64, 17, True)]
        assert self.merged(*shapes) == [(32, 64, 34, True)]

    def test_not_where_another_iteration_runs(self):
        """32 x 47 is padded to 32 x 48, of which only the latter is 1.5 times as long as wide."""
        assert sorted(self.merged((1, 32, 48), (1, 32, 47))) == [(32, 48, 1, False), (32, 48, 1, True)]
        assert self.merged((1, 32, 48), (1, 32, 47), method="standard") == [(32, 48, 2, False)]

    def test_other_widths_only_where_padding_costs_less_than_launches(self):
        assert len(self.merged((1, 64, 128), (1, 64, 256), on_cpu=True)) == 2
        assert self.merged((1, 64, 128), (1, 64, 256)) == [(64, 256, 2, True)]
        # 18 launches are worth 18e9; what is added here is 8 * 2 * 768^3 = 7.2e9 a matrix.
        wide, narrow = (1, 768, 3 * 768), (2, 768, 2 * 768)
        assert flops(768, 3 * 768, "gram", 5) - flops(768, 2 * 768, "gram", 5) == 8 * 768**3
        assert 2 * 8 * 768**3 < 18 * LAUNCH_FLOPS < 8 * 8 * 768**3
        assert len(self.merged(wide, narrow)) == 2  # the padding is too much memory
        assert 2 * 768 * 768 > MAX_PADDING_NUMEL > 768 * 768
        assert len(self.merged(wide, (1, 768, 2 * 768))) == 1
        assert len(self.merged((1, 256, 1024), (99, 256, 512))) == 2

    @pytest.mark.parametrize("method", ["standard", "gram"])
    def test_every_batch_is_in_one_group(self, method):
        shapes = [(1, 16, 500), (2, 500, 16), (3, 16, 100), (1, 17, 31), (2, 64, 64), (5, 64, 90), (1, 64, 96)]
        batches = batches_of(*shapes)
        for on_cpu in (True, False):
            groups = merge(batches, method=method, steps=5, on_cpu=on_cpu)
            found = [batch for group in groups for batch in group.batches]
            assert sorted(found, key=lambda batch: batch.offset_in_batch) == batches
            for group in groups:
                for batch in group.batches:
                    assert min(batch.rows, batch.cols) <= group.rows and max(batch.rows, batch.cols) <= group.cols

    @pytest.mark.parametrize("method", ["standard", "gram"])
    def test_a_merged_matrix_has_the_bits_it_has_alone(self, method):
        shapes = [(2, 20, 60), (3, 60, 20), (1, 32, 64), (1, 64, 31)]
        xs = [normalize(gaussian(*shape, seed=index)) for index, shape in enumerate(shapes)]
        gram = method == "gram"
        together = iterate_together(xs, 32, 64, gram=gram, triples=JORDAN5)
        for x, got in zip(xs, together):
            assert torch.equal(got, iterate(x, method=method, triples=JORDAN5))

    def test_a_matrix_that_is_padded_wider_is_the_same_to_rounding(self):
        xs = [normalize(gaussian(2, 24, 200)), normalize(gaussian(3, 60, 24))]
        for x, got in zip(xs, iterate_together(xs, 32, 208, gram=True, triples=JORDAN5)):
            assert got.shape == x.shape
            assert relative_error(got, reference(x, JORDAN5)) < 5e-6  # measured 1e-6 at most


INTERPRETED = """
import torch
from deepspeed.runtime.zero.muon.coefficients import resolve
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.newton_schulz import iterate, normalize
from deepspeed.runtime.zero.muon.symmetric_triton import TRITON

generator = torch.Generator().manual_seed(0)
for dtype, bound in ((torch.float32, 5e-7), (torch.float16, 4e-4)):
    for batch, m, k in ((2, 80, 208), (1, 144, 48), (1, 16, 16)):
        x = torch.randn(batch, m, k, generator=generator).to(dtype)
        gram = TRITON.gram(x)
        expected = x.double() @ x.double().mT
        assert torch.equal(gram, gram.mT)
        assert (gram - expected).norm() <= bound * expected.norm(), (dtype, m, k)
        a = (gram.float() / k).to(dtype)
        b = (a.float() @ a.float()).to(dtype)
        b = b.tril() + b.tril(-1).mT
        got = TRITON.symmetric(a, a, b, 0.7, -0.3)
        expected = 0.7 * a.double() - 0.3 * a.double() @ b.double()
        assert torch.equal(got, got.mT)
        assert (got - expected).norm() <= bound * expected.norm(), (dtype, m, k)

triples = resolve("jordan", 5)
x = normalize(torch.randn(1, 256, 272, generator=generator))
assert TRITON.min_side == 256
difference = iterate(x, method="standard", triples=triples[:2], products=TRITON) - \\
    iterate(x, method="standard", triples=triples[:2])
assert 0 < difference.norm() <= 2e-6 * 16, difference.norm()
print("interpreted")
"""

# Without a GPU: Triton brings its own assembler.
COMPILED = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deepspeed.runtime.zero.muon import symmetric_triton

tiles = symmetric_triton._tiles(4096, torch.bfloat16)
options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
constants = dict(HAS_C=True, **tiles)
signature = dict.fromkeys(("a", "b", "c", "out"), "*bf16") | dict(alpha="fp32", beta="fp32", M="i32", K="i32")
signature |= dict.fromkeys(constants, "constexpr")
divisible = {(index,): [["tt.divisibility", 16]] for index in (0, 1, 2, 3, 6, 7)}
source = ASTSource(symmetric_triton._symmetric_kernel, signature, constexprs=constants, attrs=divisible)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert "wgmma" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]
assert kernel.metadata.shared <= 99 * 1024, kernel.metadata.shared  # what a block may have on every chip since 8.6
assert "spill" not in kernel.asm["ptx"]
print("compiled")
"""


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"),
                    reason="Triton has packages for Linux on x86-64, where requirements-test.txt names one")
class TestTriton:

    def run(self, script, said, tmp_path, **extra):
        environment = {**os.environ, **extra, "TRITON_CACHE_DIR": str(tmp_path)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        result = subprocess.run([sys.executable, "-c", script],
                                capture_output=True,
                                text=True,
                                env=environment,
                                timeout=240)
        assert result.returncode == 0, result.stdout + result.stderr
        assert said in result.stdout

    def test_products_in_the_interpreter(self, tmp_path):
        """fp32 and fp16; the interpreter multiplies bf16 as if it were integers. Measured: 2e-7 and 2.4e-4 at most."""
        self.run(INTERPRETED, "interpreted", tmp_path, TRITON_INTERPRET="1")

    def test_it_compiles_to_tensor_core_instructions(self, tmp_path):
        self.run(COMPILED, "compiled", tmp_path)
