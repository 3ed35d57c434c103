# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checkpoints that do not fit: every rank says which file and which parameter, and nothing has changed."""

import os
import shutil
from typing import Any, Callable, Dict, Iterator, Sequence, Tuple

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.muon import checkpoint
from deepspeed.runtime.zero.muon.checkpoint import MOMENTUM_KEY
from unit.common import DistributedTest
from unit.v1.ops.muon import contract, saving
from unit.v1.ops.muon.contract import SHAPES
from unit.v1.ops.muon.test_checkpoint_universal import RESUMED, convert

ENGINES = ["stage0", "bf16_optimizer", "zero1", "zero2_offload", "zero3"]
OTHER_SHAPES = {**SHAPES, "layers.1.weight": (9, 18)}
OTHER_GROUPS = {"optimizer": {"ns_dtype": "float32", "adam_params": ["layers.2"]}}


def on_rank_0(change: Callable[..., None], *arguments: Any) -> None:
    if dist.get_rank() == 0:
        change(*arguments)
    dist.barrier()


def cut_short(path: str) -> None:
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)


def changed(path: str, change: Callable[[Dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def assert_refused(engine: Any, folder: str, tag: str, *parts: str) -> None:
    before = saving.own_state(engine)
    with pytest.raises(ValueError) as caught:
        engine.load_checkpoint(folder, tag=tag)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    saving.assert_same(saving.own_state(engine), before)


def saved_by(engine: Any, folder: str) -> None:
    saving.train(engine, range(1))
    engine.save_checkpoint(folder, tag="good")
    engine.destroy()


def files_of(engine: Any, folder: str, tag: str) -> Tuple[str, str]:
    """The file of rank 0's weights, and that of rank 1's states, which for stage 0 is the same."""
    weights = engine._get_ckpt_name(folder, tag).replace("pp_rank_1_", "pp_rank_0_")
    if engine.zero_optimization():
        states = os.path.join(folder, tag, os.path.basename(engine._get_zero_ckpt_name(folder, tag)))
        return weights, states.replace("pp_rank_0_", "pp_rank_1_")
    return weights, weights


def damages() -> Iterator[Tuple[str, Callable[[str], None], Sequence[str]]]:
    yield "short", cut_short, ("cannot be read", "bytes")
    yield "missing", os.remove, ("is missing", "beside it")


@pytest.mark.parametrize("engine", ENGINES)
class TestFiles(DistributedTest):
    world_size = 2

    def test(self, tmpdir, engine):
        folder = str(tmpdir)
        saved_by(saving.made(engine), folder)
        trained = saving.made(engine)
        saving.train(trained, range(2))
        for name, damage, parts in damages():
            for which in (0, 1):
                tag = f"{name}{which}"
                on_rank_0(shutil.copytree, os.path.join(folder, "good"), os.path.join(folder, tag))
                # Rank 0's files, then rank 1's states.
                path = files_of(trained, folder, tag)[which]
                on_rank_0(damage, path)
                assert_refused(trained, folder, tag, tag, *parts)
        assert_refused(trained, folder, "nothing", "nothing is not a folder")
        trained.destroy()


@pytest.mark.parametrize("engine", ENGINES)
class TestOthers(DistributedTest):
    world_size = 2

    def test_shapes(self, tmpdir, engine):
        saved_by(saving.made(engine), str(tmpdir))
        other = saving.made(engine, shapes=OTHER_SHAPES)
        assert_refused(other, str(tmpdir), "good", "layers.1.weight", "(9, 17)", "(9, 18)", "model_states.pt")
        other.destroy()

    def test_groups(self, tmpdir, engine):
        saved_by(saving.made(engine), str(tmpdir))
        other = saving.made(engine, **OTHER_GROUPS)
        named = ["layers.2.weight"] if engine != "stage0" else ["param group 0"]
        assert_refused(other, str(tmpdir), "good", *named, "_states.pt", "load_optimizer_states=False")
        other.destroy()

    def test_optimizer(self, tmpdir, engine):
        config = contract.ds_config(engine, "bf16" if engine == "bf16_optimizer" else "fp32")
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        saved_by(contract.initialize(contract.ProductModel(SHAPES), config), str(tmpdir))
        muon = saving.made(engine)
        assert_refused(muon, str(tmpdir), "good", "another optimizer than Muon", "exp_avg", "_states.pt")
        muon.destroy()


class TestSettings(DistributedTest):
    world_size = 2

    def test_another_stage(self, tmpdir):
        saved_by(saving.made("zero1"), str(tmpdir))
        other = saving.made("zero3")
        assert_refused(other, str(tmpdir), "good", "is missing", "mp_rank_00_model_states.pt")
        other.destroy()

    def test_another_number_of_ranks(self, tmpdir):
        saved_by(saving.made("zero2"), str(tmpdir))
        engine = saving.made("zero2")
        path = engine._get_ckpt_name(str(tmpdir), "good")
        on_rank_0(changed, path, lambda content: content.update(dp_world_size=4))
        assert_refused(engine, str(tmpdir), "good", "4 data-parallel ranks", "here are 2", "ds_to_universal.py")
        engine.destroy()

    def test_other_sub_groups(self, tmpdir):
        saved_by(saving.made("zero3"), str(tmpdir))
        other = saving.made("zero3", zero_optimization={"sub_group_size": 100})
        assert_refused(other, str(tmpdir), "good", "zero_optimization settings", "layers.")
        other.destroy()


class TestUniversal(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("engine", ["zero1", "zero3"])
    def test(self, tmpdir, engine):
        folder = str(tmpdir)
        saved_by(saving.made(engine), folder)
        on_rank_0(convert, os.path.join(folder, "good"))
        trained = saving.made(engine, **RESUMED)
        saving.train(trained, range(2))

        def damaged(tag: str, damage: Callable[[str], None], *path: str) -> str:
            on_rank_0(shutil.copytree, os.path.join(folder, "good_universal"), os.path.join(folder, tag))
            on_rank_0(damage, os.path.join(folder, tag, "zero", *path))
            return tag

        name = "layers.1.weight"
        for tag, damage, path, parts in [
            ("short", cut_short, (name, "momentum_buffer.pt"), ("momentum_buffer.pt", "cannot be read")),
            ("state", os.remove, (name, "momentum_buffer.pt"), (name, "a file is missing")),
            ("weights", os.remove, (name, "fp32.pt"), (name, "no weights")),
            ("parameter", shutil.rmtree, (name, ), (name, "which this model trains")),
            ("groups", os.remove, ("optimizer_state.pt", ), ("optimizer_state.pt", "is missing")),
        ]:
            assert_refused(trained, folder, damaged(tag, damage, *path), tag, *parts)
        trained.destroy()
        other = saving.made(engine, shapes=OTHER_SHAPES, **RESUMED)
        assert_refused(other, folder, "good_universal", name, "153", "162")
        other.destroy()
        other = saving.made(engine, **OTHER_GROUPS, **RESUMED)
        assert_refused(other, folder, "good_universal", "layers.2.weight", "momentum_buffer")
        other.destroy()


def as_stock_saved(path: str, whole: Callable[[int], torch.Tensor], scale: float, dtype: torch.dtype) -> None:
    """Rewrites a rank's file as stock DeepSpeed had it: whole matrices, times the loss scale, fewer options."""

    def change(content: Dict[str, Any]) -> None:
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        for index, group in enumerate(base["param_groups"]):
            if group["use_muon"]:
                for option in ("nesterov", "ns_steps", "ns_coefficients", "ns_dtype", "adjust_lr_fn"):
                    group.pop(option, None)
                base["state"][index][MOMENTUM_KEY] = (whole(index) * scale).to(dtype)

    changed(path, change)


class TestImport(DistributedTest):
    """Momenta of whole matrices, as stock DeepSpeed saved them, are cut to the partition."""
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("engine, dtype, scale", [("zero1", "fp32", 1.0), ("zero2", "fp16", 128.0)])
    @pytest.mark.parametrize("flags", [{}, {"round_robin_gradients": True}, {"parameter_alignment": True}], ids=str)
    def test(self, tmpdir, engine, dtype, scale, flags):
        folder = str(tmpdir)
        with contract.fp16_accepted():
            saved = saving.made(engine, dtype, zero_optimization=flags)
            saving.train(saved, range(2))
            expected = contract.momenta(saved, saving.MUON)
            names = {param: name for name, param in saved.module.named_parameters()}
            held = [names[param] for param in saved.optimizer.params_in_partition[0]]
            path = saved._get_zero_ckpt_name(folder, "good")
            saved.save_checkpoint(folder, tag="good")
            as_stock_saved(path, lambda index: torch.cat([expected[name].flatten() for name in held]), scale,
                           torch.float32)
            dist.barrier()
            saved.destroy()
            loaded = saving.made(engine, dtype, zero_optimization=flags)
            loaded.load_checkpoint(folder, tag="good")
            saving.assert_same(contract.momenta(loaded, saving.MUON), expected)
            assert loaded.basic_optimizer.param_groups[0]["ns_dtype"] == "float32"
            saving.train(loaded, range(2, 3))
            loaded.destroy()

    def test_conversion_asks_for_it(self, tmpdir):
        folder = str(tmpdir)
        saved = saving.made("zero1")
        saving.train(saved, range(1))
        path = saved._get_zero_ckpt_name(folder, "good")
        saved.save_checkpoint(folder, tag="good")
        as_stock_saved(path, lambda index: torch.ones(1000), 1.0, torch.bfloat16)
        dist.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="save it again, and convert that"):
                convert(os.path.join(folder, "good"))
        dist.barrier()
        fresh = saving.made("zero1")
        assert_refused(fresh, folder, "good", "momentum_buffer of 1000 elements", "load_optimizer_states=False")
        fresh.destroy()
        saved.destroy()


def test_states_that_are_not_cut_like_the_partition_stay_out():
    state = {
        "exp_avg": torch.ones(6),
        "step": 3,
        "worker_error": torch.ones(4),
        "exp_avg_offload_buffer": torch.ones(6)
    }
    saved = {
        "base_optimizer_state": {
            "state": {
                0: state
            },
            "param_groups": [{
                "params": [0]
            }]
        },
        "single_partition_of_fp32_groups": [torch.zeros(6), torch.zeros(2)],
    }
    assert set(checkpoint.partition_states(saved, 0)) == {"fp32", "exp_avg", "step"}
    assert set(checkpoint.partition_states(saved, 1)) == {"fp32"}


@pytest.mark.parametrize("numel, rank, expected", [(5, 0, [0, 1]), (5, 1, [2, 3]), (5, 2, [4, 0]), (5, 3, [0, 0])])
def test_shard_of_a_parameter_that_the_ranks_do_not_divide(numel, rank, expected):
    assert checkpoint.shard_of(torch.arange(numel), 2, rank).tolist() == expected
