# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""NVMe offload: masters, states and gradients lie in files between steps, of a temporary directory here."""

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor import direct_io
from deepspeed.runtime.zero.muon import engines
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import safe_set_full_optimizer_state
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import MOMENTUM, Gradients, ProductModel, Reference

SWAP = "deepspeed.runtime.swap_tensor"
# Sub-groups: {3}, {1}, {2, 0}, {norm, embed_tokens}, which have LIMIT bytes on each of 1 and 2 ranks and are swapped,
# and {4}, which stays in memory. In two of them a large gradient begins at an odd place.
SHAPES = {
    "layers.0.weight": (48, 96),
    "layers.1.weight": (64, 80),
    "layers.2.weight": (63, 1),
    "layers.3.weight": (100, 37),
    "layers.4.weight": (5, 9),
    "norm.weight": (7, ),
    "embed_tokens.weight": (40, 60),
}
SUB_GROUP_SIZE, LIMIT = 64, 4096
SWAPPED, SWAPPED_OF_MUON = 4, 3
MUON = contract.muon_names(SHAPES)
STEPS = 3
BUFFERS = {"buffer_count": 14, "pin_memory": True}


def as_in_a_new_process():
    """Files are named by the numbers of parameters, which are counted from 0 there."""
    Init.param_id = 0


@contextmanager
def nvme(limit=LIMIT):
    """DeepSpeed leaves what is below 1 MiB in memory; here, what is below `limit` bytes."""
    missing = "NVMe offload needs the package libaio-dev (apt-get install libaio-dev) to compile"
    if not AsyncIOBuilder().is_compatible():
        assert os.environ.get("CI", "").lower() not in ("1", "true"), missing
        pytest.skip(missing)
    with mock.patch(f"{SWAP}.optimizer_utils.MIN_AIO_BYTES", limit), \
            mock.patch(f"{SWAP}.partitioned_param_swapper.MIN_AIO_BYTES", limit):
        yield


def ds_config(folder,
              dtype="bf16",
              clip=0.0,
              parameters=False,
              optimizer_options=(),
              sub_group_size=SUB_GROUP_SIZE,
              **zero):
    """`folder` None: the same on the CPU. `zero`: further options of zero_optimization."""
    offload = {"device": "cpu"}
    if folder is not None:
        offload = {"device": "nvme", "nvme_path": str(folder), **BUFFERS, **dict(optimizer_options)}
        if parameters:
            zero["offload_param"] = {
                "device": "nvme",
                "nvme_path": str(folder),
                "buffer_count": 8,
                "buffer_size": 20000,
                "max_in_cpu": 0,
                "pin_memory": True
            }
    zero = {"sub_group_size": sub_group_size, "offload_optimizer": offload, **zero}
    return contract.ds_config("zero3", dtype, 2, clip, zero_optimization=zero, aio={"block_size": 4096})


def files(folder, part):
    return [path for path in Path(str(folder)).rglob("*.swp") if part in path.name]


def swapped_indices(engine):
    optimizer = engine.optimizer
    return [i for i in range(len(optimizer.fp16_groups)) if optimizer._swappable_optimizer_subgroup(i)]


def train(engine, gradients, steps=STEPS):
    for step in range(steps):
        contract.train_step(engine, gradients, step)


def bits(engine, names=MUON):
    momenta = contract.momenta(engine, names) if names else {}
    return {**contract.master_weights(engine), **{f"{name} m": m for name, m in momenta.items()}}


def assert_same_bits(found, expected):
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def trained_on_the_cpu(config, gradients, shapes=SHAPES, names=MUON):
    engine = contract.initialize(ProductModel(shapes), config)
    train(engine, gradients)
    found = bits(engine, names)
    engine.destroy()
    return found


def check_reference(engine, reference):
    contract.below("weights",
                   contract.largest_distance(contract.master_weights(engine), reference.weights, reference.start),
                   contract.ROUNDING.weights)
    contract.below("momenta", contract.largest_distance(contract.momenta(engine, reference.muon), reference.momenta),
                   contract.ROUNDING.momenta)


OPTIMIZER = pytest.mark.support(feature="NVMe offload of the optimizer", engine="ZeRO-3", state="exact")
PARAMETERS = pytest.mark.support(feature="NVMe offload of optimizer and parameters", engine="ZeRO-3", state="exact")
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": contract.ADAM_LR, "torch_adam": True}}}
PIPELINE = {"pipeline_read": True, "pipeline_write": True}


class TestNVMe(DistributedTest):
    world_size = [1, 2]

    @pytest.mark.parametrize("options", [
        pytest.param({}, marks=OPTIMIZER, id="optimizer"),
        pytest.param({"save_muon_momentum_buffer_in_memory": True}, marks=OPTIMIZER, id="momentum_in_memory"),
        pytest.param({"optimizer_options": {
            "pipeline_read": True
        }}, marks=OPTIMIZER, id="pipeline_read"),
        pytest.param({"optimizer_options": PIPELINE}, marks=OPTIMIZER, id="pipeline"),
        pytest.param({"parameters": True}, marks=PARAMETERS, id="parameters"),
    ])
    def test_against_the_reference(self, tmpdir, options):
        """And bit for bit what the same run keeps in memory."""
        gradients = Gradients(SHAPES, self.world_size, 2)
        clip = contract.clip_of("active", gradients, STEPS)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        for step in range(STEPS):
            reference.step(gradients.mean(step), clip)
        with nvme():
            engine = contract.initialize(model, ds_config(tmpdir, clip=clip, **options))
            contract.equal("swapped sub-groups", len(swapped_indices(engine)), SWAPPED)
            train(engine, gradients)
            check_reference(engine, reference)
            contract.check_counts(engine, reference, STEPS)
            found = bits(engine)
            self.check_places(engine, tmpdir, options.get("save_muon_momentum_buffer_in_memory", False))
            engine.destroy()
        assert_same_bits(found, trained_on_the_cpu(ds_config(None, clip=clip), gradients))

    def check_places(self, engine, tmpdir, in_memory):
        """Between steps the momentum is in its file alone, or with the flag in memory alone."""
        optimizer = engine.optimizer
        for index in swapped_indices(engine):
            partition = optimizer.fp32_partitioned_groups_flat[index]
            contract.equal("master in memory", partition.numel(), 0)
            if engine.basic_optimizer.param_groups[optimizer.sub_group_to_group_id[index]]["use_muon"]:
                expected = optimizer.fp16_partitioned_groups_flat_numel[index] if in_memory else 0
                contract.equal("momentum in memory", optimizer.optimizer.state[partition][MOMENTUM].numel(), expected)
        dist.barrier()
        written = len(files(tmpdir, MOMENTUM))
        contract.equal("files of momenta", written, 0 if in_memory else SWAPPED_OF_MUON * self.world_size)

    @pytest.mark.parametrize("optimizer_options", [{}, PIPELINE], ids=["", "pipeline"])
    def test_unused_parameters(self, tmpdir, optimizer_options):
        """What a step does not use must not be stepped with what another tensor has left in the swap buffer."""

        def unused(name, step, micro, rank):
            return name in ("layers.0.weight", "layers.3.weight", "embed_tokens.weight") and (step != 1 or micro == 1)

        gradients = Gradients(SHAPES, self.world_size, 2, unused=unused)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), MUON)
        for step in range(STEPS):
            reference.step(gradients.mean(step))
        with nvme():
            engine = contract.initialize(model, ds_config(tmpdir, optimizer_options=optimizer_options))
            train(engine, gradients)
            contract.below(
                "weights",
                contract.largest_distance(contract.master_weights(engine), reference.weights, reference.start),
                contract.ROUNDING.weights)
            engine.destroy()

    @pytest.mark.parametrize("in_memory", [False, True])
    def test_setting_a_momentum(self, tmpdir, in_memory):
        gradients = Gradients(SHAPES, self.world_size, 2)
        with nvme():
            engine = contract.initialize(ProductModel(SHAPES),
                                         ds_config(tmpdir, save_muon_momentum_buffer_in_memory=in_memory))
            train(engine, gradients, steps=1)
            parameters = dict(engine.module.named_parameters())
            values = {name: momentum * 2 + 1 for name, momentum in contract.momenta(engine, MUON).items()}
            for name, value in values.items():
                safe_set_full_optimizer_state(parameters[name], value, MOMENTUM)
            assert_same_bits(contract.momenta(engine, MUON), values)
            engine.destroy()

    @pytest.mark.support(feature="NVMe offload: fast_init with parameters on NVMe", engine="ZeRO-3", state="refused")
    def test_fast_init(self, tmpdir):
        """Measured, for any optimizer: weights that are not numbers."""
        with nvme(), pytest.raises(ValueError, match="fast_init is on"):
            contract.initialize(ProductModel(SHAPES),
                                ds_config(tmpdir, parameters=True, optimizer_options={"fast_init": True}))


class TestCheckpoint(DistributedTest):
    world_size = [1, 2]

    @pytest.mark.support(feature="NVMe offload: resume", engine="ZeRO-3", state="exact")
    @pytest.mark.parametrize("options", [
        {},
        {
            "save_muon_momentum_buffer_in_memory": True
        },
        {
            "optimizer_options": PIPELINE
        },
        {
            "parameters": True
        },
    ],
                             ids=["", "momentum_in_memory", "pipeline", "parameters"])
    def test_resume(self, tmpdir, options):
        """In a new engine with another swap folder: the next steps are those of the run that went on."""
        self.resume(tmpdir, MUON, lambda folder: ds_config(folder, **options))

    def test_resume_adamw(self, tmpdir):
        self.resume(tmpdir, (), lambda folder: {**ds_config(folder), **ADAMW})

    def resume(self, tmpdir, names, config_of):
        gradients = Gradients(SHAPES, self.world_size, 2)
        saved, at_save, ends = str(tmpdir / "saved"), {}, []
        with nvme():
            for resumed in (False, True):
                as_in_a_new_process()
                engine = contract.initialize(ProductModel(SHAPES, seed=int(resumed)),
                                             config_of(tmpdir / f"swap{resumed}"))
                if resumed:
                    engine.load_checkpoint(saved)
                    assert_same_bits(bits(engine, names), at_save)
                for step in range(2 if resumed else 0, 4):
                    contract.train_step(engine, gradients, step)
                    if step == 1:
                        engine.save_checkpoint(saved)
                        at_save.update(bits(engine, names))
                ends.append(bits(engine, names))
                engine.destroy()
        assert_same_bits(ends[1], ends[0])

    @pytest.mark.parametrize("options, load, message", [
        ({}, {
            "load_optimizer_states": False
        }, "With NVMe offload"),
        ({
            "save_muon_momentum_buffer_in_memory": True
        }, {}, "save_muon_momentum_buffer_in_memory"),
        ({
            "sub_group_size": 10000
        }, {}, "group"),
    ],
                             ids=["without_states", "momentum_elsewhere", "sub_groups"])
    def test_refused(self, tmpdir, options, load, message):
        with nvme():
            as_in_a_new_process()
            engine = contract.initialize(ProductModel(SHAPES), ds_config(tmpdir / "swap0"))
            train(engine, Gradients(SHAPES, self.world_size, 2), steps=1)
            engine.save_checkpoint(str(tmpdir / "saved"))
            engine.destroy()
            as_in_a_new_process()
            engine = contract.initialize(ProductModel(SHAPES, seed=1), ds_config(tmpdir / "swap1", **options))
            before = bits(engine, ())
            with pytest.raises(ValueError, match=message):
                engine.load_checkpoint(str(tmpdir / "saved"), **load)
            assert_same_bits(bits(engine, ()), before)
            engine.destroy()


class TestAtFullSize(DistributedTest):
    """With DeepSpeed's own limit of 1 MiB for what is swapped."""
    world_size = 2
    SHAPES = {"layers.0.weight": (33, 16001), "norm.weight": (7, ), "embed_tokens.weight": (301, 1777)}

    def test(self, tmpdir):
        muon = contract.muon_names(self.SHAPES)
        gradients = Gradients(self.SHAPES, self.world_size, 2)
        with nvme(limit=1024**2):
            engine = contract.initialize(ProductModel(self.SHAPES), ds_config(tmpdir))
            contract.equal("swapped sub-groups", len(swapped_indices(engine)), 2)
            train(engine, gradients)
            found = bits(engine, muon)
            engine.destroy()
        assert_same_bits(found, trained_on_the_cpu(ds_config(None), gradients, self.SHAPES, muon))


class TestDirectIO(DistributedTest):
    """Repairs for all optimizers."""
    world_size = [1, 2]

    @pytest.mark.parametrize("optimizer_options", [{}, PIPELINE], ids=["", "pipeline"])
    def test_adamw(self, tmpdir, optimizer_options):
        gradients = Gradients(SHAPES, self.world_size, 2)
        with nvme():
            engine = contract.initialize(ProductModel(SHAPES), {
                **ds_config(tmpdir, optimizer_options=optimizer_options),
                **ADAMW
            })
            assert len(swapped_indices(engine)) > 2
            train(engine, gradients)
            found = bits(engine, ())
            engine.destroy()
        assert_same_bits(found, trained_on_the_cpu({**ds_config(None), **ADAMW}, gradients, names=()))

    def test_blocks_that_the_device_does_not_take(self, tmpdir):
        """Stands for a device with blocks of 4 KiB, whose errors async_io does not report."""
        with nvme(), mock.patch(f"{SWAP}.optimizer_utils.AIO_ALIGNED_BYTES", 100):
            with pytest.raises(ValueError, match="nvme_path.*in units of 100 bytes"):
                contract.initialize(ProductModel(SHAPES), ds_config(tmpdir))
        assert not files(tmpdir, "check")


def test_pieces_begin_at_blocks():
    tensors = [torch.arange(numel, dtype=torch.float32) for numel in (3, 20, 8, 1, 16)]
    offsets = [0, 3, 23, 31, 32]
    pieces, starts = direct_io.cut_at_alignment(tensors, offsets, 8)
    buffer = torch.full((48, ), -1.0)
    for piece, start in zip(pieces, starts):
        assert start % 8 == 0 or piece.numel() <= -start % 8
        buffer[start:start + piece.numel()] = piece
    assert torch.equal(buffer, torch.cat(tensors))


def test_masters_of_16_bits():
    engine = SimpleNamespace(params_in_nvme_and_cpu=False,
                             offload_optimizer_fast_init=False,
                             master_weights_and_grads_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="device is nvme, but master weights are torch.bfloat16"):
        engines._refuse_swapping(engine)
