# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Exact resume: what was saved and loaded goes on bit by bit as if nothing had happened."""

from typing import Any

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.utils import (safe_get_full_optimizer_state, safe_get_local_optimizer_state,
                             safe_set_full_optimizer_state, safe_set_local_optimizer_state)
from deepspeed.runtime.zero.offload_states import offload_adam_states, reload_adam_states
from unit.common import DistributedTest
from unit.v1.ops.muon import contract, saving
from unit.v1.ops.muon.contract import ENGINES, MOMENTUM, SHAPES

SAVED_AFTER, STEPS = 2, 4
PARTITIONED = [name for name in ENGINES if name != "stage0"]
GRAM = {"optimizer": {"ns_method": "gram", "ns_dtype": "float32"}}
IN_MEMORY = {"zero_optimization": {"save_muon_momentum_buffer_in_memory": True}}
ELASTIC = {"zero_optimization": {"elastic_checkpoint": True}}
DYNAMIC = {"fp16": {"loss_scale": 0, "initial_scale_power": 6, "loss_scale_window": 1}}
BF16_MASTERS = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}

# (ranks, engine, dtype, sections): each engine and dtype once or more, each number of ranks, each flag.
CASES = [
    (1, "stage0", "fp32", {}),
    (2, "stage0", "bf16", GRAM),
    (3, "stage0", "fp16", DYNAMIC),
    (2, "bf16_optimizer", "bf16", {}),
    (3, "bf16_optimizer", "bf16", GRAM),
    (1, "zero1", "fp32", GRAM),
    (2, "zero1", "fp16", DYNAMIC),
    (4, "zero1", "bf16", {}),
    (2, "zero1", "fp32", ELASTIC),
    (3, "zero2", "bf16", {
        "gradient_accumulation_steps": 3
    }),
    (2, "zero2", "fp32", {
        "zero_optimization": {
            "round_robin_gradients": True
        }
    }),
    (3, "zero2", "fp16", {
        **DYNAMIC,
        **ELASTIC
    }),
    (4, "zero2", "fp16", {
        **DYNAMIC,
        **GRAM
    }),
    (2, "zero2_offload", "bf16", {}),
    (3, "zero1_offload", "fp32", {}),
    (1, "zero3", "bf16", {}),
    (2, "zero3", "fp16", DYNAMIC),
    (3, "zero3", "fp32", {
        **GRAM, "zero_optimization": {
            "sub_group_size": 100
        }
    }),
    (4, "zero3", "bf16", {
        "gradient_accumulation_steps": 3
    }),
    (2, "zero3", "fp32", IN_MEMORY),
    (2, "zero3_offload", "bf16", IN_MEMORY),
    (3, "zero3_offload", "fp32", {}),
    (2, "zero2", "bf16", BF16_MASTERS),
    (3, "zero3", "bf16", BF16_MASTERS),
]


def resume(folder: str, engine: str, dtype: str, sections: dict, break_step: Any = None) -> None:
    """Train, save, go on; load into a new engine and go on there. `break_step` may spoil a step before the save."""
    with contract.fp16_accepted():
        straight = saving.made(engine, dtype, **sections)
        saving.train(straight, range(SAVED_AFTER))
        if break_step is not None:
            break_step(straight)
        straight.save_checkpoint(folder)
        at_save = saving.own_state(straight)
        expected_losses = saving.train(straight, range(SAVED_AFTER, STEPS))
        expected = saving.own_state(straight)
        straight.destroy()
        resumed = saving.made(engine, dtype, **sections)
        resumed.load_checkpoint(folder)
        saving.assert_same(saving.own_state(resumed), at_save, "loaded")
        assert saving.train(resumed, range(SAVED_AFTER, STEPS)) == expected_losses
        saving.assert_same(saving.own_state(resumed), expected, "resumed")
        assert contract.over_ranks(sum(float(m.abs().sum()) for _, m in contract.momentum_shards(resumed))) > 0
        resumed.destroy()


def break_step(engine: Any) -> None:
    """A step with a gradient that is not finite, on one rank."""
    gradients = saving.SteadyGradients(SHAPES, dist.get_world_size())
    skipped = engine.skipped_steps

    def spoil(factors: contract.Tensors, micro: int) -> None:
        if dist.get_rank() == 0:
            factors["layers.0.weight"][0, 0] = float("inf")

    contract.train_step(engine, gradients, 7, spoil)
    assert engine.skipped_steps == skipped + 1


@pytest.mark.parametrize("world_size, engine, dtype, sections", CASES)
@pytest.mark.support(feature="checkpoints: resume", state="exact")
class TestResume(DistributedTest):

    def test(self, tmpdir, world_size, engine, dtype, sections):
        resume(str(tmpdir), engine, dtype, sections)


class TestAfterADiscardedStep(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("engine", ["stage0", "zero1", "zero2_offload", "zero3"])
    def test(self, tmpdir, engine):
        resume(str(tmpdir), engine, "fp16", DYNAMIC, break_step)


class TestWithoutStates(DistributedTest):
    """The weights are loaded and nothing else: the momentum begins anew, or stays as it is."""
    world_size = 2

    @pytest.mark.parametrize("given", [{"load_optimizer_states": False}, {"load_module_only": True}], ids=str)
    @pytest.mark.parametrize("engine", ["stage0", "bf16_optimizer", "zero1", "zero2_offload", "zero3"])
    def test(self, tmpdir, engine, given):
        dtype = "fp32" if engine == "stage0" else "bf16"
        saved = saving.made(engine, dtype)
        saving.train(saved, range(SAVED_AFTER))
        saved.save_checkpoint(str(tmpdir))
        weights = contract.module_weights(saved)
        saved.destroy()
        loaded = saving.made(engine, dtype)
        loaded.load_checkpoint(str(tmpdir), **given)
        saving.assert_same(contract.module_weights(loaded), weights, "weights")
        assert not contract.momentum_shards(loaded)
        fresh = {name: weight.float() for name, weight in weights.items()}
        masters = contract.master_weights(loaded)
        saving.assert_same({
            name: masters[name].view(weight.shape)
            for name, weight in fresh.items()
        }, fresh, "masters")
        saving.train(loaded, range(SAVED_AFTER, STEPS))
        loaded.destroy()


class TestOneState(DistributedTest):
    """safe_get and safe_set of the momentum, after steps and right after a load."""
    world_size = 2

    @pytest.mark.parametrize("engine", PARTITIONED)
    def test_full(self, tmpdir, engine):
        saved = saving.made(engine)
        saving.train(saved, range(SAVED_AFTER))
        saved.save_checkpoint(str(tmpdir))
        expected = saving.whole_state(saved)
        saved.destroy()
        loaded = saving.made(engine)
        loaded.load_checkpoint(str(tmpdir))
        saving.assert_same(saving.whole_state(loaded), expected, "after load")
        name = saving.MUON[0]
        parameter = dict(loaded.module.named_parameters())[name]
        value = torch.arange(float(torch.Size(SHAPES[name]).numel())).view(SHAPES[name])
        safe_set_full_optimizer_state(parameter, value, MOMENTUM)
        assert torch.equal(safe_get_full_optimizer_state(parameter, MOMENTUM).view_as(value), value)
        after = contract.momenta(loaded, saving.MUON)
        for other in saving.MUON[1:]:
            assert torch.equal(after[other], expected[f"{other}.momentum"]), other
        held = sum(float(momentum.double().sum()) for _, momentum in contract.momentum_shards(loaded))
        assert abs(contract.over_ranks(held) - sum(float(one.double().sum()) for one in after.values())) < 1e-3
        loaded.destroy()

    @pytest.mark.parametrize("engine", ["zero3", "zero3_offload"])
    def test_local(self, engine):
        trained = saving.made(engine)
        saving.train(trained, range(SAVED_AFTER))
        parameter = dict(trained.module.named_parameters())[saving.MUON[0]]
        value = safe_get_local_optimizer_state(parameter, MOMENTUM) * 2
        safe_set_local_optimizer_state(parameter, value, MOMENTUM)
        whole = contract.momenta(trained, saving.MUON[:1])[saving.MUON[0]].flatten()
        begin = dist.get_rank() * value.numel()
        own = whole[begin:begin + value.numel()]
        assert torch.equal(own, value[:own.numel()])
        trained.destroy()

    @pytest.mark.support(feature="offload_states and reload_states", state="exact")
    @pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
    def test_offload_and_reload(self, engine):
        trained = saving.made(engine)
        saving.train(trained, range(SAVED_AFTER))
        before = saving.own_state(trained)
        trained.offload_states()
        assert {momentum.device.type for _, momentum in contract.momentum_shards(trained)} == {"cpu"}
        trained.reload_states()
        assert {momentum.device for _, momentum in contract.momentum_shards(trained)} == {trained.device}
        saving.assert_same(saving.own_state(trained), before)
        saving.train(trained, range(SAVED_AFTER, STEPS))
        trained.destroy()


def test_offload_moves_the_momentum_and_nothing_stays_behind():
    # "meta" stands for the other device: on machines without an accelerator there is no third.
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter] = {MOMENTUM: torch.arange(4.0), "step": 3}
    offload_adam_states(optimizer, "meta")
    assert optimizer.state[parameter][MOMENTUM].device.type == "meta"
    assert set(optimizer.state[parameter]) == {MOMENTUM, "step"}
    optimizer.state[parameter][MOMENTUM] = torch.arange(4.0)
    reload_adam_states(optimizer, "meta")
    assert optimizer.state[parameter][MOMENTUM].device.type == "meta"
