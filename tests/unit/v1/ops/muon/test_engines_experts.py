# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""DeepSpeed's MoE layers, whose experts are cut over ranks of their own: each expert's weights are matrices of their
own, orthogonalized once."""

import pytest

from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from unit.common import DistributedTest
from unit.v1.ops.muon import contract, experts, saving
from unit.v1.ops.muon.contract import Reference
from unit.v1.ops.muon.experts import MUON, ROUTER, SHAPES, ExpertModel, RoutedGradients, row

GAS, STEPS = 2, 3


def moe(engine, dtype):
    return row("DeepSpeed MoE layers", engine, dtype)


def train(trained, reference, gradients, clip):
    for step in range(STEPS):
        contract.train_step(trained, gradients, step)
        reference.step(gradients.mean(step), clip)


@pytest.mark.parametrize("engine, dtype", [
    moe("stage0", "fp32"),
    moe("stage0", "bf16"),
    moe("zero1", "fp32"),
    moe("zero2", "bf16"),
    moe("bf16_optimizer", "bf16"),
    moe("zero1_offload", "fp32"),
    moe("zero2_offload", "fp32")
])
class TestMoE(DistributedTest):

    @pytest.mark.parametrize("world_size, ep_size", [(1, 1), (2, 1), (2, 2), (4, 2)])
    def test(self, engine, dtype, world_size, ep_size):
        gradients = RoutedGradients(SHAPES, world_size, GAS, ep_size=ep_size)
        reference = Reference(experts.start_weights(), MUON)
        clip = contract.clip_of("active", gradients, STEPS)
        trained = contract.initialize(ExpertModel(ep_size), contract.ds_config(engine, dtype, GAS, clip))
        train(trained, reference, gradients, clip)
        experts.check(trained, reference, ep_size, steps=STEPS, norm=gradients.norm(STEPS - 1))
        trained.destroy()


@pytest.mark.parametrize("engine, dtype", [("stage0", "bf16"), ("zero1", "fp32"), ("zero2_offload", "fp32"),
                                           ("bf16_optimizer", "bf16")])
class TestMoECheckpoint(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.support(feature="Checkpoints with DeepSpeed MoE layers", engine="all", state="exact")
    def test_resumes(self, engine, dtype, tmpdir):
        gradients = RoutedGradients(SHAPES, self.world_size, GAS, ep_size=2)
        config = contract.ds_config(engine, dtype, GAS, 0.5)
        trained = contract.initialize(ExpertModel(2), config)
        contract.train_step(trained, gradients, 0)
        trained.save_checkpoint(tmpdir, tag="here")
        contract.train_step(trained, gradients, 1)
        expected = saving.own_state(trained)
        trained.destroy()
        other = contract.initialize(ExpertModel(2), config)
        contract.train_step(other, gradients, 5)
        assert other.load_checkpoint(tmpdir, tag="here")[0] is not None
        contract.train_step(other, gradients, 1)
        saving.assert_same(saving.own_state(other), expected)
        other.destroy()


class TestRouter(DistributedTest):
    world_size = 1

    def test_goes_to_adam(self):
        trained = contract.initialize(ExpertModel(1), contract.ds_config("zero1"))
        assert {name for name, param in trained.module.named_parameters() if param.use_muon} == set(MUON)
        assert len(SHAPES[ROUTER]) == 2
        trained.destroy()


class TestZero3(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="DeepSpeed MoE layers", engine="ZeRO-3", state="refused")
    def test_refuses_moe_layers(self):
        with pytest.raises(AssertionError, match="Native DeepSpeed MoE is not supported with ZeRO Stage 3"):
            contract.initialize(ExpertModel(2), contract.ds_config("zero3"))


def halves_of(model, ep_size, **expert_options):
    """Two param groups, each with dense parameters and experts."""
    first = {"dense.weight", "norm.weight"}
    named = experts.by_global_name(dict(model.named_parameters()), ep_size)
    halves = [{name
               for name in SHAPES if (name in first or experts.expert_of(name) in (0, 2)) == wanted}
              for wanted in (True, False)]
    return halves, [[named[name] for name in SHAPES if name in half and name in named] for half in halves]


WAYS = ["None", "list", "generator", "one dict", "split by the user"]


class TestModelParameters(DistributedTest):
    """However a user says which parameters are trained."""
    world_size = 2

    @pytest.mark.parametrize("engine, dtype", [("stage0", "fp32"), ("zero2", "fp32"), ("bf16_optimizer", "bf16")])
    @pytest.mark.parametrize("way", WAYS)
    def test(self, engine, dtype, way):
        model = ExpertModel(2)
        everything = list(model.parameters())
        given = {
            "None":
            None,
            "list":
            everything,
            "generator":
            model.parameters(),
            "one dict": [{
                "params": everything
            }],
            "split by the user":
            split_params_into_different_moe_groups_for_optimizer({
                "params": list(everything),
                "name": "parameters"
            }),
        }[way]
        gradients = RoutedGradients(SHAPES, self.world_size, GAS, ep_size=2)
        reference = Reference(experts.start_weights(), MUON)
        trained = contract.initialize(model, contract.ds_config(engine, dtype, GAS, 0.5), model_parameters=given)
        train(trained, reference, gradients, 0.5)
        experts.check(trained, reference, 2, steps=STEPS, norm=gradients.norm(STEPS - 1))
        trained.destroy()

    @pytest.mark.parametrize("engine, dtype", [("zero1", "fp32"), ("bf16_optimizer", "bf16")])
    def test_groups_keep_their_options(self, engine, dtype):
        """Both groups have experts: DeepSpeed names the groups of experts alike."""
        model = ExpertModel(2)
        halves, params = halves_of(model, 2)
        rates = (0.05, 0.01)
        gradients = RoutedGradients(SHAPES, self.world_size, GAS, ep_size=2)
        start = experts.start_weights()
        references = [
            Reference({name: start[name]
                       for name in half}, [name for name in MUON if name in half],
                      lr=rate,
                      adam_lr=rate) for half, rate in zip(halves, rates)
        ]
        config = contract.ds_config(engine, dtype, GAS, 0.5)
        groups = [{"params": own, "lr": rate} for own, rate in zip(params, rates)]
        trained = contract.initialize(model, config, model_parameters=groups)
        for step in range(STEPS):
            contract.train_step(trained, gradients, step)
            mean = gradients.mean(step)
            for half, reference in zip(halves, references):
                reference.step({name: mean[name] for name in half}, 0.5, contract.norm_of(mean))
        weights = experts.by_global_name(contract.master_weights(trained), 2)
        expected = {name: weight for reference in references for name, weight in reference.weights.items()}
        away = contract.largest_distance(weights, {name: expected[name] for name in weights}, start)
        contract.below("weights", away, contract.ROUNDING.weights)
        trained.destroy()

    @pytest.mark.parametrize("engine, dtype", [("zero1", "fp32"), ("bf16_optimizer", "bf16")])
    def test_users_muon(self, engine, dtype):
        model = ExpertModel(2)
        named = experts.by_global_name(dict(model.named_parameters()), 2)
        groups = split_params_into_different_moe_groups_for_optimizer([
            dict(params=[param for name, param in named.items() if name in MUON],
                 name="muon",
                 use_muon=True,
                 lr=contract.MUON_LR,
                 weight_decay=contract.WEIGHT_DECAY,
                 ns_method="standard",
                 ns_dtype="float32"),
            dict(params=[param for name, param in named.items() if name not in MUON],
                 name="adam",
                 use_muon=False,
                 lr=contract.ADAM_LR,
                 weight_decay=contract.WEIGHT_DECAY)
        ])
        gradients = RoutedGradients(SHAPES, self.world_size, GAS, ep_size=2)
        reference = Reference(experts.start_weights(), MUON)
        trained = contract.initialize(model,
                                      contract.ds_config(engine, dtype, GAS, 0.5),
                                      optimizer=MuonWithAuxAdam(groups))
        train(trained, reference, gradients, 0.5)
        experts.check(trained, reference, 2, steps=STEPS, norm=gradients.norm(STEPS - 1))
        trained.destroy()
