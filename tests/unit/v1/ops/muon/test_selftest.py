# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The check of the first step: what it finds when the step is broken, and that it finds nothing when it is not."""

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from deepspeed.runtime.zero.muon import newton_schulz, step, update
from deepspeed.runtime.zero.muon.optimizer import MuonWithAuxAdam
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

SIZES = [(1, 40), (40, 1), (17, 13), (9, 17), (48, 48), (96, 33)]


def gradient(kind, shape, generator):
    m, n = shape
    noise = torch.randn(m, n, generator=generator)
    if kind == "rank one":
        return noise[:, :1] @ noise[:1]
    if kind == "nearly rank one":
        return noise[:, :1] @ noise[:1] + 1e-2 * noise
    if kind == "steep":
        u, _, v = torch.linalg.svd(noise, full_matrices=False)
        return u @ torch.diag(torch.logspace(0, -6, min(m, n))) @ v
    if kind == "one row":
        return torch.cat([noise[:1], torch.zeros(m - 1, n)])
    if kind == "one element":
        return torch.zeros(m, n).index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(3.0))
    return {"full rank": noise, "zero": 0 * noise, "underflow": 1e-40 * noise, "constant": torch.ones(m, n)}[kind]


KINDS = ("full rank", "rank one", "nearly rank one", "steep", "one row", "one element", "zero", "underflow",
         "constant")


def muon(*kinds, shapes=SIZES, lr=0.02, **options):
    """A MuonWithAuxAdam that has not stepped, with gradients of these kinds."""
    generator = torch.Generator().manual_seed(1)
    params = []
    for kind in kinds or ["full rank"]:
        for shape in shapes:
            param = torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator))
            param.grad = gradient(kind, shape, generator)
            params.append(param)
    return MuonWithAuxAdam([dict(params=params, use_muon=True, lr=lr, name="matrices", **options)])


def watchers(optimizer):
    return [watcher for found in optimizer._steps.values() for watcher in found.watchers]


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


class TestNothingIsFound:

    @pytest.mark.parametrize("method, dtype", [("standard", "float32"), ("standard", "bfloat16"), ("gram", "float32"),
                                               ("gram", "float16")])
    @pytest.mark.parametrize("coefficients, steps", [("jordan", 5), ("jordan", 1), ("you", 5), ("polar_express", 3),
                                                     ("cans", 8), ([(2, -1.5, 0.5)], 6)])
    def test_whatever_the_gradient_is(self, method, dtype, coefficients, steps):
        optimizer = muon(*KINDS, ns_method=method, ns_dtype=dtype, ns_coefficients=coefficients, ns_steps=steps)
        optimizer.step()
        assert watchers(optimizer)
        optimizer.step()
        assert not watchers(optimizer)

    def test_a_nan_is_not_for_this_check_to_find(self):
        optimizer = muon()
        params_of(optimizer)[2].grad[0, 0] = math.nan
        for _ in range(2):
            optimizer.step()
        assert not watchers(optimizer)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("lr", [1e-9, 1e-4, 1.0])
    def test_whatever_the_learning_rate_and_the_dtype_are(self, dtype, lr):
        optimizer = muon(lr=lr, weight_decay=0.1)
        optimizer = MuonWithAuxAdam([{
            **optimizer.param_groups[0], "params":
            [torch.nn.Parameter(param.detach().to(dtype)) for param in params_of(optimizer)]
        }])
        for param in params_of(optimizer):
            param.grad = torch.randn_like(param)
        for _ in range(2):
            optimizer.step()
        assert not watchers(optimizer)

    def test_other_weights_between_the_steps(self):
        for change in (lambda w: w.mul_(0.9), lambda w: w.normal_(), lambda w: w.div_(w.norm(dim=0)),
                       lambda w: w.clamp_(-0.01, 0.01)):
            for kind in KINDS:
                optimizer = muon(kind)
                optimizer.step()
                for param in params_of(optimizer):
                    change(param.data)
                optimizer.step()

    def test_a_checkpoint_between_the_steps(self):
        optimizer = muon()
        before = [param.detach().clone() for param in params_of(optimizer)]
        state = optimizer.state_dict()
        optimizer.step()
        for param, weight in zip(params_of(optimizer), before):
            param.data.copy_(weight)
        optimizer.load_state_dict(state)
        optimizer.step()

    def test_it_waits_for_a_learning_rate(self):
        optimizer = muon(lr=0.0)
        for _ in range(3):
            optimizer.step()
        assert watchers(optimizer)
        optimizer.param_groups[0]["lr"] = 0.01
        with mock.patch.object(update, "step_weights_"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="away from where their update puts them"):
            optimizer.step()

    def test_off(self):
        optimizer = muon()
        optimizer.configure({"muon_selftest": False})
        with mock.patch.object(newton_schulz, "iterate_together", of_each(torch.clone)):
            optimizer.step()
        optimizer.step()


def of_each(change):
    """`change` in the place of the iteration."""
    return lambda xs, *_, **__: [change(x) for x in xs]


def rescaled(x):
    return x * math.sqrt(min(x.shape[1:]))


class TestBroken:
    """A part of the step does something else in the first step, and the second one raises."""

    @pytest.mark.parametrize("kind", ["full rank", "rank one", "steep"])
    @pytest.mark.parametrize("where, name, fault, found", [
        (newton_schulz, "iterate_together", of_each(
            torch.clone), "has an RMS of .* expected .*: it is not orthogonalized"),
        (newton_schulz, "iterate_together", of_each(torch.zeros_like), "has an RMS of 0 an element"),
        (newton_schulz, "iterate_together", of_each(lambda x: x * math.nan), "has an RMS of nan an element"),
    ])
    def test_the_iteration(self, kind, where, name, fault, found):
        shapes = [(40, 1)] if kind == "rank one" else [(48, 48)]
        self.fails(muon(kind, shapes=shapes), where, name, fault, found)

    def test_an_update_that_is_only_rescaled(self):
        self.fails(muon("full rank", shapes=[(48, 48)]), newton_schulz, "iterate_together", of_each(rescaled),
                   "squared singular values of the update have a norm of .*: it is not orthogonalized")

    @pytest.mark.parametrize("factor", [0.0, 0.5, 0.9, 1.5, -1.0])
    def test_weights_that_move_by_something_else(self, factor):
        real = update.step_weights_

        def fault(weights, updates, factors, *, decay):
            real(weights, updates, [factor * own for own in factors], decay=decay)

        self.fails(muon(), update, "step_weights_", fault, "weights were .* away from where their update puts them")

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.8, 2.0])
    def test_weights_that_are_scaled_back_afterwards(self, share):
        optimizer = muon()
        before = [param.detach().clone() for param in params_of(optimizer)]
        optimizer.step()
        for param, weight in zip(params_of(optimizer), before):
            param.data.copy_(weight + share * (param.data - weight))
        with pytest.raises(RuntimeError,
                           match="matrices, .*at the next step weights have moved by .* of their update"):
            optimizer.step()

    def test_a_slice_that_does_not_arrive(self):
        real = step.MuonStep._normalize_into

        def fault(self, buffer, parts):
            real(self, buffer, parts)
            buffer[:len(buffer) // 2] = 0

        self.fails(muon(shapes=[(48, 48)]), step.MuonStep, "_normalize_into", fault, "had the norm .*, expected 1")

    def test_an_update_that_comes_back_to_the_wrong_place(self):
        optimizer = muon(shapes=[(48, 48), (33, 48)])
        real = step.MuonStep.apply_kept

        def fault(self, index):
            self._batch(index).copy_(self._batch(index).roll(48 * 7))
            real(self, index)

        self.fails(optimizer, step.MuonStep, "apply_kept", fault,
                   "rows with their update is .*: it is the update of something else")

    def test_a_matrix_that_is_left_out(self):
        optimizer = muon()
        real = step.MuonStep.orthogonalize

        def fault(self, index):
            real(self, index)
            self.orthogonalized -= 1

        self.fails(optimizer, step.MuonStep, "orthogonalize", fault, "5 matrices were orthogonalized here, expected 6")

    @staticmethod
    def fails(optimizer, where, name, fault, found):
        with mock.patch.object(where, name, fault):
            optimizer.step()
        with pytest.raises(RuntimeError, match=f"Muon self-test after the first step: matrices.*{found}"):
            optimizer.step()


class TestEngines(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="self-test of the first step", engine="all", state="exact")
    @pytest.mark.parametrize("engine", contract.ENGINES)
    def test_every_engine_passes_and_is_left(self, engine):
        dtype = "bf16" if engine == "bf16_optimizer" else "fp32"
        gradients = Gradients(SHAPES, self.world_size)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), contract.muon_names(SHAPES))
        trained = contract.initialize(model, contract.ds_config(engine, dtype))
        for number in range(2):
            assert number == 0 or watchers(trained.basic_optimizer)
            contract.train_step(trained, gradients, number)
            reference.step(gradients.mean(number))
        assert not watchers(trained.basic_optimizer)
        contract.check(trained, reference, steps=2, norm=gradients.norm(1))
        trained.destroy()

    @pytest.mark.parametrize("engine",
                             ["stage0", "bf16_optimizer", "zero2", "zero2_offload", "zero3", "zero3_offload"])
    @pytest.mark.parametrize("fault, found", [("iteration", "not orthogonalized"), ("exchange", "something else"),
                                              ("weights", "away from where")])
    def test_every_engine_finds_a_fault(self, engine, fault, found):
        shapes = {"layers.0.weight": (31, 30), "layers.1.weight": (24, 40), "layers.2.weight": (40, 24)}
        gradients = Gradients(shapes, self.world_size)
        dtype = "bf16" if engine == "bf16_optimizer" else "fp32"
        trained = contract.initialize(ProductModel(shapes), contract.ds_config(engine, dtype))
        broken = {
            "iteration":
            mock.patch.object(newton_schulz, "iterate_together", of_each(torch.clone)),
            "exchange":
            mock.patch.object(step, "copy_batch_to_received", lambda batch, received, _: batch.copy_(batch.roll(300))),
            "weights":
            mock.patch.object(update, "step_weights_"),
        }
        with broken[fault]:
            contract.train_step(trained, gradients, 0)
        with pytest.raises(RuntimeError, match=f"Muon self-test .*muon-params.*{found}"):
            contract.train_step(trained, gradients, 1)
        trained.destroy()

    @pytest.mark.parametrize("engine", ["stage0", "zero2", "zero3"])
    @pytest.mark.parametrize("told", [True, False])
    def test_a_checkpoint_undoes_a_step_and_may(self, engine, told, tmpdir):
        trained = contract.initialize(ProductModel(SHAPES), contract.ds_config(engine))
        gradients = Gradients(SHAPES, self.world_size)
        trained.save_checkpoint(str(tmpdir), tag="start")
        contract.train_step(trained, gradients, 0)
        kept = mock.patch.object(MuonWithAuxAdam, "weights_were_set") if not told else nullcontext()
        with kept:
            trained.load_checkpoint(str(tmpdir), tag="start", load_optimizer_states=False)
        # What would be found if nobody told the optimizer.
        with nullcontext() if told else pytest.raises(RuntimeError, match="moved by 0 of their update"):
            contract.train_step(trained, gradients, 1)
        trained.destroy()
