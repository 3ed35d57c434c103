# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The statistics of the Muon half: their values against whole float64 matrices, and that they reach the monitor."""

import csv
import math

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.muon.optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.stats import FamilyStats, MatrixStats
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import Gradients, ProductModel, Reference
from unit.v1.ops.muon.oracle import newton_schulz

# Two families of two, a row and a column, and for Adam an embedding. No rank's partition ends where a matrix does.
MODEL = {
    "layers.0.up.weight": (17, 13),
    "layers.1.up.weight": (17, 13),
    "layers.0.down.weight": (9, 17),
    "layers.1.down.weight": (31, 3),
    "row.weight": (1, 40),
    "column.weight": (40, 1),
    "embed_tokens.weight": (11, 5),
}
FAMILIES = {
    "layers.*.up.weight": ["layers.0.up.weight", "layers.1.up.weight"],
    "layers.*.down.weight": ["layers.0.down.weight", "layers.1.down.weight"],
    "row.weight": ["row.weight"],
    "column.weight": ["column.weight"],
}
NAMES = ("orthogonality_error", "update_rms", "momentum_norm", "update_to_weight")


def expected_of(name, reference, before, gradient, lr=contract.MUON_LR):
    """The four figures of one matrix, from the definitions, of a step that `reference` has done."""
    momentum = reference.momenta[name]
    update = newton_schulz((1 - contract.BETA) * gradient.double() + contract.BETA * momentum)
    rows, cols = update.shape
    scale = math.sqrt(max(1, rows / cols))
    squares = torch.linalg.svdvals(update)**2
    return (float((squares - 1).square().mean().sqrt()), float(scale * update.square().mean().sqrt()),
            float(momentum.norm()), float(lr * scale * update.norm() / before[name].norm()))


def means(entries):
    return [sum(values) / len(entries) for values in zip(*entries)]


class TestValues(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.support(feature="statistics of the updates (muon_stats_every)", engine="all", state="exact")
    @pytest.mark.parametrize("engine, dtype", [("stage0", "fp32"), ("bf16_optimizer", "bf16"), ("zero2", "fp32"),
                                               ("zero2_offload", "fp32"), ("zero3", "fp32")])
    def test_every_other_step_of_an_engine(self, engine, dtype):
        gradients = Gradients(MODEL, self.world_size)
        model = ProductModel(MODEL)
        reference = Reference(dict(model.named_parameters()), contract.muon_names(MODEL))
        options = {"ns_dtype": "float32", "muon_stats_every": 2}
        trained = contract.initialize(model, contract.ds_config(engine, dtype, optimizer=options))
        for step in range(3):
            before = reference.weights
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step))
            found = trained.basic_optimizer.muon_stats()
            if step == 0:
                assert not found
            if step == 1:
                expected = {
                    family: means([expected_of(name, reference, before,
                                               gradients.mean(1)[name]) for name in names])
                    for family, names in FAMILIES.items()
                }
            if step > 0:
                assert {family: (stats.step, stats.matrices) for family, stats in found.items()} == \
                    {family: (2, len(names)) for family, names in FAMILIES.items()}
                # Measured: at most 2.2e-6.
                for family, stats in found.items():
                    for name, value in zip(NAMES, expected[family]):
                        contract.below(f"{family} {name}", abs(getattr(stats.mean, name) / value - 1), 1e-5)
        trained.destroy()


class TestCost(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("engine", ["zero2", "zero3"])
    def test_steps_send_nothing_for_them(self, engine):
        gradients, found = Gradients(MODEL, self.world_size), []
        for every in (0, 1):
            options = {"ns_dtype": "float32", "muon_stats_every": every}
            trained = contract.initialize(ProductModel(MODEL), contract.ds_config(engine, optimizer=options))
            contract.train_step(trained, gradients, 0)
            with contract.counted_collectives() as counts:
                contract.train_step(trained, gradients, 1)
            found.append(dict(counts))
            with contract.counted_collectives() as counts:
                trained.basic_optimizer.muon_stats()
            # One sum of 6 matrices with 4 figures of 8 bytes.
            contract.equal("to collect them", dict(counts), {"all_reduce": (1, 6 * 4 * 8)} if every else {})
            trained.destroy()
        contract.equal("in a step", found[1], found[0])


class TestMonitor(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("every, steps", [(2, [4, 8]), (0, [])])
    def test_csv(self, tmpdir, every, steps):
        monitor = {"enabled": True, "output_path": str(tmpdir), "job_name": "run"}
        options = {"ns_dtype": "float32", "muon_stats_every": every}
        config = contract.ds_config("zero2", optimizer=options, csv_monitor=monitor)
        trained = contract.initialize(ProductModel(MODEL), config)
        gradients, expected = Gradients(MODEL, self.world_size), []
        for step in range(5):
            contract.train_step(trained, gradients, step)
            if every and step % every == 1:
                expected.append(trained.basic_optimizer.muon_stats()["layers.*.up.weight"].mean)
        if dist.get_rank() == 0:
            for name in NAMES:
                path = tmpdir.join("run", f"Train_Muon_layers.N.up.weight_{name}.csv")
                rows = list(csv.reader(path.open())) if path.check() else []
                assert rows[:1] == ([["step", name]] if every else [])
                assert [int(row[0]) for row in rows[1:]] == steps
                assert [float(row[1]) for row in rows[1:]] == [getattr(stats, name) for stats in expected]
        trained.destroy()


def test_the_parts_of_a_parameter_are_one_family_of_which_two_are_looked_at():
    stack = torch.nn.Parameter(torch.randn(4, 6, 6))
    stack.is_expert_group = True
    stack.grad = torch.randn_like(stack)
    optimizer = MuonWithAuxAdam([dict(params=[stack], use_muon=True, lr=0.0)])
    optimizer.configure({"muon_stats_every": 1})
    assert optimizer.muon_stats() == {}
    optimizer.step()
    found = optimizer.muon_stats()
    assert list(found) == ["parameter 0[*]"]
    assert found["parameter 0[*]"].matrices == 2 and found["parameter 0[*]"].step == 1
    assert found["parameter 0[*]"].mean.update_to_weight == 0
    assert optimizer.muon_stats(new_only=True) == {}
    optimizer.step()
    assert optimizer.muon_stats(new_only=True)["parameter 0[*]"].step == 2


def test_zero_weights_have_no_ratio():
    param = torch.nn.Parameter(torch.zeros(4, 4))
    param.grad = torch.eye(4)
    optimizer = MuonWithAuxAdam([dict(params=[param], use_muon=True, lr=0.1, momentum=0.0)])
    optimizer.configure({"muon_stats_every": 1})
    optimizer.step()
    stats = optimizer.muon_stats()["parameter 0"]
    assert isinstance(stats, FamilyStats) and isinstance(stats.mean, MatrixStats)
    assert stats.mean.update_to_weight == math.inf and stats.mean.momentum_norm == pytest.approx(2.0)
