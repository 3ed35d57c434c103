# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""DeepSpeed engines can be built again and again on ranks that stay."""

from pathlib import Path
from typing import List

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from unit.common import DistributedTest


def _losses(stage: int, steps: int = 3) -> List[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 1e-2,
                "torch_adam": True
            }
        },
        "zero_optimization": {
            "stage": stage
        },
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    batch = torch.randn(2, 8).to(engine.device)
    for _ in range(steps):
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert dist.get_world_size() == engine.dp_world_size
    return losses


@pytest.mark.parametrize("time", ["first", "second"])
@pytest.mark.parametrize("stage", [2, 3])
class TestEngine(DistributedTest):
    world_size = [1, 2]

    def test_trains_the_same_each_time(self, stage, time, class_tmpdir):
        losses = _losses(stage)
        assert losses[-1] < losses[0]
        left = Path(class_tmpdir, f"{stage}-{self.world_size}-{dist.get_rank()}")
        if time == "first":
            left.write_text(str(losses))
        else:
            assert left.read_text() == str(losses)


@pytest.mark.parametrize("time", ["first", "second"])
class TestCounts(DistributedTest):
    """ZeRO-3 compares the numbers of its modules between ranks, which have served different tests before."""
    world_size = [1, 2]

    def test_begin_anew(self, time):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        config["optimizer"] = {"type": "Adam", "params": {"torch_adam": True}}
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        assert [module.ds_id for module in engine.module.modules()] == [0, 1, 2]
