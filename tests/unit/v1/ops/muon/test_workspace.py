# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a step holds beyond weights, gradients and momentum, counted by storage, against what the plan says."""

import pytest
import torch

from deepspeed.runtime.zero.muon.pack import Workspace
from deepspeed.runtime.zero.muon.plan import rank_plan
from deepspeed.runtime.zero.muon.step import MuonStep, Partition
from unit.v1.ops.muon.memory import PeakBytes
from unit.v1.ops.muon.simulate import KERNEL, on_all_ranks, plan_for, scatter
from unit.v1.ops.muon.test_layout import sharded_layout
from unit.v1.ops.muon.test_plan import BF16_WIRE, STANDARD

# Norms, divisors, indices: 8 bytes a matrix and the like.
SMALL_BYTES = 64 * 1024


@pytest.mark.parametrize("kernel", [KERNEL, STANDARD, BF16_WIRE], ids=["gram", "standard", "bf16 wire"])
@pytest.mark.parametrize("shape", [(256, 256), (128, 512), (512, 128), (250, 130)], ids=str)
def test_peak_is_bounded_by_the_plan(shape, kernel):
    matrices, world_size = 12, 2
    layout = sharded_layout([shape] * matrices, world_size)
    plan = plan_for([layout], kernel, round_numel=2 * shape[0] * shape[1])
    report = plan.report()
    assert report.exchanges == 2 * 3

    def rank_work(exchange):
        weight = scatter(layout, [torch.ones(shape)] * matrices, exchange.rank)
        grad = scatter(layout, [torch.randn(shape)] * matrices, exchange.rank)
        partition = Partition(weight, grad, torch.zeros_like(weight), 0.1, 0.1, 0.9, True, "original")
        step = MuonStep(rank_plan(plan, exchange.rank), kernel, exchange, Workspace(torch.device("cpu")))
        with PeakBytes() as memory:
            step.run([partition])
            step.run([partition])
        return memory.peak

    for rank, peak in enumerate(on_all_ranks(world_size, rank_work)):
        assert peak <= report.workspace_bytes[rank] + SMALL_BYTES, (peak, report.workspace_bytes[rank])


def test_bounded_whatever_the_model_holds():
    """Four times the matrices, the same peak: it is the round that counts, not the model."""
    peaks = []
    for matrices in (8, 32):
        layout = sharded_layout([(96, 160)] * matrices, 1)
        plan = plan_for([layout], KERNEL, round_numel=4 * 96 * 160)

        def rank_work(exchange):
            weight = torch.zeros(layout.partition_numel)
            partition = Partition(weight, torch.randn_like(weight), torch.zeros_like(weight), 0.1, 0.1, 0.9, True,
                                  "original")
            step = MuonStep(rank_plan(plan, 0), KERNEL, exchange, Workspace(torch.device("cpu")))
            with PeakBytes() as memory:
                step.run([partition])
            return memory.peak

        peaks.extend(on_all_ranks(1, rank_work))
    assert peaks[1] <= peaks[0] + SMALL_BYTES
