# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameters out of the ordinary: kernels, experts, groups, frozen, empty, tiny, huge ones."""

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

EVERY_ENGINE = [(engine, "bf16" if engine == "bf16_optimizer" else "fp32") for engine in contract.ENGINES]
PARTITIONING = [pair for pair in EVERY_ENGINE if pair[0] != "stage0" and not pair[0].endswith("offload")]
every_engine = pytest.mark.parametrize("engine, dtype", EVERY_ENGINE)
partitioning = pytest.mark.parametrize("engine, dtype", PARTITIONING)


def matrices_of(name, tensor):
    """[out, rest], and each expert of a stack on its own."""
    return list(tensor) if "experts" in name else contract.rows_by_columns(name, tensor)


def train_and_check(engine, dtype, shapes, *, gas=1, unused=lambda *where: False, **sections):
    """Three steps with an active clip, against the reference on whole parameters. Returns the engine."""
    gradients = Gradients(shapes, dist.get_world_size(), gas, unused=unused)
    clip = contract.clip_of("active", gradients, 3)
    model = ProductModel(shapes)
    for name, parameter in model.named_parameters():
        parameter.is_expert_group = "experts" in name
    reference = Reference(dict(model.named_parameters()), contract.muon_names(shapes), matrices_of)
    trained = contract.initialize(model, contract.ds_config(engine, dtype, gas, clip, **sections))
    for step in range(3):
        contract.train_step(trained, gradients, step)
        reference.step(gradients.mean(step), clip)
    contract.check(trained, reference, steps=3, norm=gradients.norm(2))
    return trained


class TestShapes(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="convolutions", state="exact")
    @every_engine
    def test_convolutions(self, engine, dtype):
        """[out, in, height, width] and one dimension more are [out, rest]."""
        shapes = {"conv2d.weight": (9, 5, 3, 3), "conv3d.weight": (5, 3, 1, 3, 3), "linear.weight": (7, 5)}
        train_and_check(engine, dtype, shapes).destroy()

    @pytest.mark.support(feature="expert stacks", state="exact")
    @every_engine
    def test_each_expert_of_a_stack(self, engine, dtype):
        shapes = {"experts.up.weight": (3, 8, 5), "experts.down.weight": (3, 5, 9), "linear.weight": (7, 5)}
        trained = train_and_check(engine, dtype, shapes)
        contract.equal("orthogonalizations", contract.over_ranks(trained.basic_optimizer.orthogonalizations), 3 * 7)
        trained.destroy()

    @pytest.mark.support(feature="empty parameters", state="exact")
    @every_engine
    def test_empty(self, engine, dtype):
        shapes = {**SHAPES, "no_rows.weight": (0, 5), "no_columns.weight": (5, 0), "nothing.weight": (0, )}
        model = ProductModel(shapes)
        gradients = Gradients(SHAPES, 2)
        muon = contract.muon_names(SHAPES)
        reference = Reference({name: weight for name, weight in model.named_parameters() if name in SHAPES}, muon)
        trained = contract.initialize(model, contract.ds_config(engine, dtype))
        for step in range(3):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step))
        found = {name: tuple(weight.shape) for name, weight in contract.module_weights(trained).items()}
        contract.equal("shapes", found, shapes)
        masters = contract.master_weights(trained, list(SHAPES))
        contract.below("weights", contract.largest_distance(masters, reference.weights, reference.start),
                       contract.ROUNDING.weights)
        contract.equal("orthogonalizations", contract.over_ranks(trained.basic_optimizer.orthogonalizations),
                       3 * len(muon))
        trained.destroy()


class TestFewerElementsThanRanks(DistributedTest):
    world_size = 4

    @every_engine
    def test(self, engine, dtype):
        """ZeRO-3 cuts [1, 5] into 2, 2, 1 and 0 elements."""
        train_and_check(engine, dtype, {"up.weight": (1, 5), "down.weight": (1, 1), "norm.weight": (3, )}).destroy()


class TestUse(DistributedTest):
    world_size = [1, 2]

    @pytest.mark.support(feature="frozen parameters", state="exact")
    @every_engine
    def test_frozen(self, engine, dtype):
        frozen = ("layers.1.weight", "norm.weight")
        model = ProductModel(SHAPES)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name in frozen:
            model.products[name].weight.requires_grad_(False)
        trained_names = [name for name in SHAPES if name not in frozen]
        gradients = Gradients(SHAPES, self.world_size, unused=lambda name, *where: name in frozen)
        muon = [name for name in contract.muon_names(SHAPES) if name not in frozen]
        reference = Reference({name: start[name] for name in trained_names}, muon)
        trained = contract.initialize(model, contract.ds_config(engine, dtype))
        for step in range(3):
            contract.train_step(trained, gradients, step)
            reference.step({name: gradient for name, gradient in gradients.mean(step).items() if name not in frozen})
        weights, masters = contract.module_weights(trained), contract.master_weights(trained)
        for name in frozen:
            assert torch.equal(weights[name].float(), start[name]), name
        masters = {name: masters[name] for name in trained_names}
        contract.below("weights", contract.largest_distance(masters, reference.weights, reference.start),
                       contract.ROUNDING.weights)
        contract.equal("orthogonalizations", contract.over_ranks(trained.basic_optimizer.orthogonalizations),
                       3 * len(muon))
        trained.destroy()

    @every_engine
    def test_all_gradients_zero(self, engine, dtype):
        gradients = Gradients(SHAPES, self.world_size, unit=0.0)
        model = ProductModel(SHAPES)
        reference = Reference(dict(model.named_parameters()), contract.muon_names(SHAPES))
        trained = contract.initialize(model, contract.ds_config(engine, dtype, clip=1.0))
        for step in range(2):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step))
        for name, weight in contract.master_weights(trained).items():
            contract.below(name, contract.distance(weight, reference.weights[name]), 1e-6)
        trained.destroy()


class TestLarge(DistributedTest):
    """Larger than reduce_bucket_size, which is also the bound on a round."""
    world_size = [2, 3]

    @partitioning
    @pytest.mark.parametrize("bucket", [1, 100, 221])
    def test(self, engine, dtype, bucket):
        trained = train_and_check(engine, dtype, SHAPES, gas=2, zero_optimization={"reduce_bucket_size": bucket})
        assert max(torch.Size(shape).numel() for shape in SHAPES.values()) >= bucket
        trained.destroy()


class TestGroups(DistributedTest):
    """Each param group keeps its own options, in every engine."""
    world_size = 2

    @pytest.mark.support(feature="param groups with options of their own", state="exact")
    @every_engine
    def test_momentum_method_and_rate(self, engine, dtype):
        first = ["layers.0.weight", "layers.1.weight", "norm.weight"]
        halves = [first, [name for name in SHAPES if name not in first]]
        options = [{"momentum": 0.8, "ns_method": "gram", "lr": 0.05}, {"momentum": 0.95, "ns_method": "standard"}]
        model = ProductModel(SHAPES)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        groups = [
            dict(params=[model.products[name].weight for name in names], name=str(index), **given)
            for index, (names, given) in enumerate(zip(halves, options))
        ]
        references = [
            Reference({name: start[name]
                       for name in names}, [name for name in names if name in contract.muon_names(SHAPES)],
                      lr=given.get("lr", contract.MUON_LR),
                      beta=given["momentum"],
                      adam_lr=given.get("lr", contract.ADAM_LR)) for names, given in zip(halves, options)
        ]
        gradients = Gradients(SHAPES, self.world_size)
        clip = contract.clip_of("active", gradients, 3)
        config = contract.ds_config(engine, dtype, 1, clip, optimizer={"ns_dtype": "float32"})
        trained = contract.initialize(model, config, model_parameters=groups)
        for step in range(3):
            contract.train_step(trained, gradients, step)
            for names, reference in zip(halves, references):
                mean = gradients.mean(step)
                reference.step({name: mean[name] for name in names}, clip, gradients.norm(step))
        weights = contract.master_weights(trained)
        for reference in references:
            contract.below("weights", contract.largest_distance(weights, reference.weights, reference.start),
                           contract.ROUNDING.weights)
            momenta = contract.momenta(trained, reference.muon)
            contract.below("momenta", contract.largest_distance(momenta, reference.momenta), contract.ROUNDING.momenta)
        trained.destroy()


@pytest.mark.support(feature="zero.Init", state="exact")
class TestZeroInit(DistributedTest):
    """Parameters that are cut before the engine sees them, whose own shapes say nothing."""
    world_size = [2, 3]

    @pytest.mark.parametrize("engine, dtype", [("zero3", "fp32"), ("zero3", "bf16"), ("zero3_offload", "bf16")])
    def test(self, engine, dtype):
        gradients = Gradients(SHAPES, self.world_size, gas=2)
        muon = contract.muon_names(SHAPES)
        clip = contract.clip_of("active", gradients, 3)
        config = contract.ds_config(engine, dtype, 2, clip)
        reference = Reference(dict(ProductModel(SHAPES).named_parameters()), muon)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = ProductModel(SHAPES)
        assert all(parameter.numel() == 0 for parameter in model.parameters())
        trained = contract.initialize(model, config)
        for step in range(3):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step), clip)
        contract.check(trained, reference, steps=3, norm=gradients.norm(2))
        assert contract.straddling(trained)
        trained.destroy()
