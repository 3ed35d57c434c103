# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Universal checkpoints: a training goes on with another number of ranks, stage or device of the states."""

import argparse
import os
from typing import Any, List, Tuple

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.common import DistributedFixture, DistributedTest
from unit.v1.ops.muon import contract, saving
from unit.v1.ops.muon.contract import SHAPES

SAVED_AFTER, STEPS = 2, 4
# Measured: bit for bit, but 1.0e-7 between ZeRO-3 with and without offload, which sum the norm in another order.
FP32_ROUNDING = 1e-6
RESUMED = {"checkpoint": {"load_universal": True}}
SOURCES = ["zero1", "zero2", "zero3", "bf16_optimizer", "zero2_offload", "zero3_offload"]


def convert(source: str, **given: Any) -> None:
    """What `ds_to_universal.py --input_folder <source> --output_folder <source>_universal` does, in this process."""
    options = dict(input_folder=source,
                   output_folder=source + "_universal",
                   num_extract_workers=1,
                   num_merge_workers=1,
                   keep_temp_folder=False,
                   strict=True,
                   inject_missing_state=True)
    ds_to_universal.main(argparse.Namespace(**{**options, **given}))


class Saved(DistributedFixture):
    """A checkpoint of an engine and its conversion, in `<class_tmpdir>/<engine>-<ranks>`."""
    world_size = 1

    def run(self, class_tmpdir, source):
        folder = os.path.join(class_tmpdir, f"{source}-{self.world_size}")
        if os.path.exists(os.path.join(folder, "latest_universal")):
            return
        engine = saving.made(source)
        saving.train(engine, range(SAVED_AFTER))
        engine.save_checkpoint(folder, tag="step")
        engine.destroy()
        if dist.get_rank() == 0:
            convert(os.path.join(folder, "step"))
        dist.barrier()


class saved_on_1(Saved):
    world_size = 1


class saved_on_2(Saved):
    world_size = 2


class saved_on_3(Saved):
    world_size = 3


class saved_on_4(Saved):
    world_size = 4


def uninterrupted(target: str, **sections: Any) -> Tuple[List[float], contract.Tensors]:
    """Losses and final state of the training that nothing interrupts."""
    engine = saving.made(target, **sections)
    losses = saving.train(engine, range(STEPS))
    state = saving.whole_state(engine)
    engine.destroy()
    return losses, state


def assert_continues(folder: str, target: str, expected: Tuple[List[float], contract.Tensors],
                     **sections: Any) -> None:
    """A training from the universal checkpoint is the uninterrupted one."""
    engine = saving.made(target, **RESUMED, **sections)
    engine.load_checkpoint(folder)
    losses = saving.train(engine, range(SAVED_AFTER, STEPS))
    found, name = saving.farthest(saving.whole_state(engine), expected[1])
    steps = {float(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
    engine.destroy()
    contract.below(f"{name} of {folder} as {target}", found, FP32_ROUNDING)
    for loss, straight_loss in zip(losses, expected[0][SAVED_AFTER:]):
        contract.below("loss", abs(loss - straight_loss) / abs(straight_loss), FP32_ROUNDING)
    assert steps == {STEPS}, f"Adam has made {steps} steps"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.support(feature="universal checkpoints: another number of ranks", state="exact")
class TestReshape(DistributedTest):
    world_size = [1, 2, 3, 4]

    def test(self, saved_on_1, saved_on_2, saved_on_3, saved_on_4, class_tmpdir, source):
        here = dist.get_world_size()
        expected = uninterrupted(source)
        for ranks in {1: [2, 4], 2: [1, 3], 3: [2, 4], 4: [1, 3]}[here]:
            assert_continues(os.path.join(class_tmpdir, f"{source}-{ranks}"), source, expected)


ANOTHER_ENGINE = [
    ("zero1", "zero2", {}),
    ("zero2", "zero1", {}),
    ("zero1", "zero2_offload", {}),
    ("zero2_offload", "zero1", {}),
    ("zero2", "zero2", {
        "round_robin_gradients": True
    }),
    ("zero2", "zero1", {
        "parameter_alignment": True
    }),
    ("zero3", "zero3_offload", {}),
    ("zero3_offload", "zero3", {}),
    ("zero3", "zero3", {
        "sub_group_size": 20
    }),
    ("zero2", "bf16_optimizer", {}),
    ("bf16_optimizer", "zero1", {}),
]


@pytest.mark.parametrize("source, target, flags", ANOTHER_ENGINE)
class TestAnotherEngine(DistributedTest):
    world_size = 3

    def test(self, saved_on_2, class_tmpdir, source, target, flags):
        folder = os.path.join(class_tmpdir, f"{source}-2")
        assert_continues(folder, target, uninterrupted(target, zero_optimization=flags), zero_optimization=flags)


class TestSmallGroup(DistributedTest):
    """Adam's group has nothing for the last two of four ranks but padding."""
    world_size = 4
    shapes = {"layers.0.weight": (17, 13), "norm.weight": (3, )}

    @pytest.mark.parametrize("engine", ["zero1", "zero3", "bf16_optimizer"])
    def test(self, tmpdir, engine):
        folder = str(tmpdir)
        straight = saving.made(engine, shapes=self.shapes)
        saving.train(straight, range(SAVED_AFTER), self.shapes)
        straight.save_checkpoint(folder, tag="step")
        expected = saving.train(straight, range(SAVED_AFTER, STEPS), self.shapes)
        straight.destroy()
        if dist.get_rank() == 0:
            convert(os.path.join(folder, "step"))
        dist.barrier()
        resumed = saving.made(engine, shapes=self.shapes, **RESUMED)
        resumed.load_checkpoint(folder)
        assert saving.train(resumed, range(SAVED_AFTER, STEPS), self.shapes) == expected
        resumed.destroy()


class TestMasterWeightsInBf16(DistributedTest):
    """The momentum is fp32 all the same, and is not rounded on its way."""
    world_size = 2

    @pytest.mark.parametrize("engine", ["zero2", "zero3"])
    def test(self, tmpdir, engine):
        folder, sections = str(tmpdir), {
            "bf16": {
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True
            }
        }
        straight = saving.made(engine, "bf16", **sections)
        saving.train(straight, range(SAVED_AFTER))
        straight.save_checkpoint(folder, tag="step")
        expected = contract.momenta(straight, saving.MUON)
        straight.destroy()
        if dist.get_rank() == 0:
            convert(os.path.join(folder, "step"))
        dist.barrier()
        resumed = saving.made(engine, "bf16", **sections, **RESUMED)
        resumed.load_checkpoint(folder)
        saving.assert_same(contract.momenta(resumed, saving.MUON), expected)
        assert all(momentum.dtype == torch.float32 for _, momentum in contract.momentum_shards(resumed))
        resumed.destroy()


class TestBeforeTheFirstStep(DistributedTest):
    """There are no states yet: the weights are converted, and training begins from them."""
    world_size = 2

    @pytest.mark.parametrize("engine", ["zero1", "zero3"])
    def test(self, tmpdir, engine):
        folder = str(tmpdir)
        straight = saving.made(engine)
        straight.save_checkpoint(folder, tag="step")
        expected = saving.train(straight, range(STEPS))
        straight.destroy()
        if dist.get_rank() == 0:
            convert(os.path.join(folder, "step"))
        dist.barrier()
        resumed = saving.made(engine, **RESUMED)
        resumed.load_checkpoint(folder)
        assert saving.train(resumed, range(STEPS)) == expected
        resumed.destroy()


class TestMissingInfo(DistributedTest):
    """--inject_missing_state makes up for the info that a client may keep, and is needed where it does not."""
    world_size = 1

    def test(self, tmpdir):
        engine = saving.made("zero1")
        saving.train(engine, range(1))
        engine.save_checkpoint(str(tmpdir), tag="step")
        engine.destroy()
        with pytest.raises(AssertionError, match="universal_checkpoint_info"):
            convert(os.path.join(tmpdir, "step"), inject_missing_state=False)
        convert(os.path.join(tmpdir, "step"), inject_missing_state=True)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3", "bf16_optimizer"])
class TestWholeWeights(DistributedTest):
    """zero_to_fp32.py puts the master weights together."""
    world_size = 3

    def test(self, tmpdir, engine):
        trained = saving.made(engine)
        saving.train(trained, range(SAVED_AFTER))
        trained.save_checkpoint(str(tmpdir))
        expected = contract.master_weights(trained)
        trained.destroy()
        found = get_fp32_state_dict_from_zero_checkpoint(str(tmpdir))
        saving.assert_same(dict(found), {name: weight.view(SHAPES[name]) for name, weight in expected.items()})
