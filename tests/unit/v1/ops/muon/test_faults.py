# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Faults that a training has to survive, or to end by with an error on all ranks; with nothing changed in between."""

import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

import deepspeed.comm as dist
from unit.common import DistributedTest, get_master_port
from unit.v1.ops.muon import contract, dies_in_exchange, experts, saving
from unit.v1.ops.muon.contract import SHAPES, Gradients, LinearProduct, ProductModel, Reference
from unit.v1.ops.muon.experts import ExpertModel, RoutedGradients

MUON = contract.muon_names(SHAPES)
EVERY_ENGINE = [(engine, "bf16" if engine == "bf16_optimizer" else "fp32") for engine in contract.ENGINES]
every_engine = pytest.mark.parametrize("engine, dtype", EVERY_ENGINE)
ONE_EXPERT = [name for name in experts.MUON if experts.expert_of(name) == experts.EXPERTS - 1][0]


def discards(feature):
    return pytest.mark.support(feature=feature, engine="all", state="the step is discarded on all ranks")


@discards("An infinite gradient of an expert on one rank")
@pytest.mark.parametrize("engine, dtype", [("stage0", "bf16"), ("stage0", "fp16"), ("zero1", "bf16"),
                                           ("zero2", "fp16"), ("zero2_offload", "fp16"), ("bf16_optimizer", "bf16")])
class TestExpertOverflows(DistributedTest):
    """The other rank has none of the expert, and learns it only from the one that has."""
    world_size = 2

    def test(self, engine, dtype):
        gradients = RoutedGradients(experts.SHAPES, 2, 2, ep_size=2)
        reference = Reference(experts.start_weights(), experts.MUON)
        fp16 = {"fp16": {"loss_scale": 0, "initial_scale_power": 4, "hysteresis": 1}} if dtype == "fp16" else {}

        def infinite(factors, micro):
            if ONE_EXPERT in factors and micro == 1:
                factors[ONE_EXPERT].view(-1)[-1] = math.inf

        with contract.fp16_accepted():
            trained = contract.initialize(ExpertModel(2), contract.ds_config(engine, dtype, 2, 0.5, **fp16))
            contract.train_step(trained, gradients, 0)
            reference.step(gradients.mean(0), 0.5)
            before = saving.own_state(trained)
            contract.train_step(trained, gradients, 1, infinite)
            assert trained.optimizer.overflow
            contract.equal("skipped steps", trained.skipped_steps, 1)
            after = saving.own_state(trained)
            for state in (before, after):
                del state["steps"], state["scaler"]
            saving.assert_same(after, before)
            contract.train_step(trained, gradients, 2)
            reference.step(gradients.mean(2), 0.5)
            experts.check(trained, reference, 2, steps=2, norm=gradients.norm(2))
        trained.destroy()


@discards("A gradient that is not finite, in fp32")
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("engine", [name for name, dtype in EVERY_ENGINE if dtype == "fp32" and name != "stage0"])
class TestNotFinite(DistributedTest):
    """Without a scaler it is the norm that tells."""
    world_size = 2

    def test_discards_the_step(self, engine, value):
        gradients = Gradients(SHAPES, 2, gas=2)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)

        def broken(factors, micro):
            if dist.get_rank() == 1 and micro == 1:
                factors["layers.1.weight"].view(-1)[0] = value

        trained = contract.initialize(model, contract.ds_config(engine, "fp32", 2))
        contract.train_step(trained, gradients, 0, broken)
        contract.equal("orthogonalizations", trained.basic_optimizer.orthogonalizations, 0)
        contract.train_step(trained, gradients, 1)
        reference.step(gradients.mean(1))
        contract.check(trained, reference, steps=1, norm=gradients.norm(1))
        trained.destroy()


class TestNotFiniteInStage0(DistributedTest):
    """Plain fp32 has no step of the engine's that could discard, with any optimizer: the matrix is lost, and no
    other."""
    world_size = [1, 2]

    @pytest.mark.support(feature="A gradient that is not finite, in fp32",
                         engine="stage 0",
                         state="spoils its own matrix and no other")
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_spoils_no_other_matrix(self, value):
        gradients = Gradients(SHAPES, self.world_size)
        lost = "layers.1.weight"

        def broken(factors, micro):
            factors[lost].view(-1)[0] = value

        found = []
        for change in (None, broken):
            trained = contract.initialize(ProductModel(SHAPES), contract.ds_config("stage0"))
            contract.train_step(trained, gradients, 0, change)
            contract.train_step(trained, gradients, 1)
            found.append(contract.module_weights(trained))
            trained.destroy()
        for name, weight in found[0].items():
            assert torch.equal(found[1][name], weight) == (name != lost), name


@pytest.mark.support(feature="A gradient that is not finite, without compute_grad_norm",
                     engine="all",
                     state="spoils its own matrix and no other")
@pytest.mark.parametrize("engine, dtype", [("zero1", "fp32"), ("zero2", "fp32")])
class TestNotFiniteWithoutNorm(DistributedTest):
    """In fp32 `compute_grad_norm: false` leaves nothing to tell by; exchanges carry slices of several matrices."""
    world_size = 2

    def test_spoils_no_other_matrix(self, engine, dtype):
        gradients, lost = Gradients(SHAPES, self.world_size), "layers.1.weight"

        def broken(factors, micro):
            factors[lost].view(-1)[0] = math.nan

        found = []
        for change in (None, broken):
            config = contract.ds_config(engine, dtype, zero_optimization={"compute_grad_norm": False})
            trained = contract.initialize(ProductModel(SHAPES), config)
            contract.train_step(trained, gradients, 0, change)
            contract.train_step(trained, gradients, 1)
            found.append(contract.master_weights(trained))
            trained.destroy()
        for name, weight in found[0].items():
            assert torch.equal(found[1][name], weight) == (name != lost), name


@dataclass(frozen=True)
class Pausing(Gradients):
    """All gradients of one step are zero."""
    pause: int = 1

    def local(self, step, micro, rank):
        found = Gradients.local(self, step, micro, rank)
        return {name: gradient * (step != self.pause) for name, gradient in found.items()}


@pytest.mark.support(feature="A step in which all gradients are zero", engine="all", state="exact")
@every_engine
class TestZeroGradients(DistributedTest):
    world_size = 2

    def test_momentum_decays_and_steps_the_weights(self, engine, dtype):
        gradients = Pausing(SHAPES, self.world_size)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        clip = gradients.norm(0) / 3
        trained = contract.initialize(model, contract.ds_config(engine, dtype, 1, clip))
        for step in range(3):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step), clip)
        contract.check(trained, reference, steps=3, norm=gradients.norm(2))
        trained.destroy()


# Not ZeRO-1, 2 and 3: there such a rank reduces other buckets than the rest, with any optimizer.
@pytest.mark.parametrize("engine, dtype", [
    pytest.param(engine,
                 dtype,
                 marks=pytest.mark.support(
                     feature="A parameter without a gradient on some ranks", engine=label, state="exact"))
    for engine, dtype, label in [("stage0", "fp32",
                                  "stage 0"), ("stage0", "bf16",
                                               "stage 0"), ("bf16_optimizer", "bf16", "BF16_Optimizer")]
])
class TestUnusedOnOneRank(DistributedTest):
    """Norm and clip are the same on all ranks, which a rank-local list of what has a gradient would not give."""
    world_size = 2

    def test(self, engine, dtype):

        def unused(name, step, micro, rank):
            return name in ("layers.1.weight", "norm.weight") and rank == step % 2

        gradients = Gradients(SHAPES, self.world_size, gas=2, unused=unused)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        trained = contract.initialize(model, contract.ds_config(engine, dtype, 2, 0.5))
        for step in range(3):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step), 0.5)
        contract.check(trained, reference, steps=3, norm=gradients.norm(2))
        trained.destroy()


class TiedModel(ProductModel):
    """One matrix is that of two modules."""

    def __init__(self, shapes):
        super().__init__(shapes)
        self.twin = LinearProduct(shapes["layers.0.weight"])
        self.twin.weight = self.products["layers.0.weight"].weight

    def forward(self, factors):
        return super().forward(factors) + self.twin(factors["layers.0.weight"])


@pytest.mark.support(feature="Tied parameters", engine="all", state="exact")
@every_engine
class TestTied(DistributedTest):
    world_size = 2

    def test_is_one_matrix(self, engine, dtype):
        gradients = Gradients(SHAPES, self.world_size, gas=2)
        model = TiedModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        trained = contract.initialize(model, contract.ds_config(engine, dtype, 2))
        for step in range(2):
            contract.train_step(trained, gradients, step)
            mean = gradients.mean(step)
            mean["layers.0.weight"] *= 2
            reference.step(mean)
        contract.check(trained, reference, steps=2, norm=contract.norm_of(mean))
        trained.destroy()


@pytest.mark.support(feature="A parameter listed twice", state="refused")
@pytest.mark.parametrize("engine, dtype", [("stage0", "fp32"), ("bf16_optimizer", "bf16"), ("zero1", "fp32"),
                                           ("zero2", "fp32"), ("zero3", "fp32")])
class TestListedTwice(DistributedTest):
    world_size = 1

    def test_in_one_group(self, engine, dtype):
        model = ProductModel(SHAPES)
        twice = [*model.parameters(), model.products["layers.0.weight"].weight]
        with pytest.raises(AssertionError, match=r"layers\.0\.weight occurs multiple times"):
            contract.initialize(model, contract.ds_config(engine, dtype), model_parameters=twice)

    def test_in_two_groups(self, engine, dtype):
        model = ProductModel(SHAPES)
        groups = [{"params": list(model.parameters())}, {"params": [model.products["layers.0.weight"].weight]}]
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            contract.initialize(model, contract.ds_config(engine, dtype), model_parameters=groups)


class Killed(BaseException):
    """Ends a save as a kill does: nothing after it is written."""


def latest(folder):
    return Path(folder, "latest").read_text()


@pytest.mark.support(feature="A save that is interrupted", engine="all", state="the checkpoint before it loads")
class TestInterruptedSave(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("engine", ["stage0", "bf16_optimizer", "zero3"])
    @pytest.mark.parametrize("files", [0, 1])
    def test_leaves_the_checkpoint_before_it(self, engine, files, tmpdir):
        """Each rank is stopped before its first, or before its second file, or with all files before `latest`."""
        trained = saving.made(engine)
        saving.train(trained, range(2))
        trained.save_checkpoint(tmpdir, tag="first")
        expected = saving.own_state(trained)
        saving.train(trained, range(2, 3))
        written = []
        save = trained.checkpoint_engine.save

        def stops(*what, **named):
            if len(written) == files:
                raise Killed
            written.append(None)
            return save(*what, **named)

        with mock.patch.object(trained.checkpoint_engine, "save", stops), \
                mock.patch.object(trained.checkpoint_engine, "commit", side_effect=Killed), pytest.raises(Killed):
            trained.save_checkpoint(tmpdir, tag="second")
        dist.barrier()
        contract.equal("latest", latest(tmpdir), "first")
        trained.destroy()
        other = saving.made(engine)
        other.load_checkpoint(tmpdir)
        saving.assert_same(saving.own_state(other), expected)
        other.destroy()

    @pytest.mark.parametrize("engine", ["bf16_optimizer", "zero3"])
    def test_latest_waits_for_the_slowest_rank(self, engine, tmpdir):
        trained = saving.made(engine)
        saving.train(trained, range(1))
        trained.save_checkpoint(tmpdir, tag="first")
        seen = []
        save = trained.checkpoint_engine.save

        def slow(*what, **named):
            if dist.get_rank() == 1:
                time.sleep(0.5)
                seen.append(latest(tmpdir))
            return save(*what, **named)

        with mock.patch.object(trained.checkpoint_engine, "save", slow):
            trained.save_checkpoint(tmpdir, tag="second")
        contract.equal("latest, seen by the slow rank", set(seen), {"first"} if dist.get_rank() == 1 else set())
        contract.equal("latest", latest(tmpdir), "second")
        trained.destroy()


@pytest.mark.support(feature="A rank that dies in the middle of a step", engine="all", state="an error on the others")
@pytest.mark.parametrize("engine", ["zero3"])
def test_a_rank_dies_in_an_exchange(engine):
    port = get_master_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [
        subprocess.Popen([sys.executable, dies_in_exchange.__file__, engine],
                         env={
                             **environment, "RANK": rank,
                             "LOCAL_RANK": rank
                         },
                         stderr=subprocess.PIPE,
                         text=True) for rank in "01"
    ]
    try:
        # Most of the time two processes import torch and DeepSpeed; how soon the error comes they check themselves.
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, dies_in_exchange.EXIT_CODE], errors
    assert dies_in_exchange.SEEN in errors[0]
