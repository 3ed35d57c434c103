# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Mixtures of experts: DeepSpeed's MoE layers and AutoEP, whose experts are cut over ranks of their own, and stacks of
experts as transformers has them. Each expert is a matrix of its own, orthogonalized once."""

import pytest
import torch

from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from unit.common import DistributedTest
from unit.v1.ops.muon import contract, experts
from unit.v1.ops.muon.contract import Reference
from unit.v1.ops.muon.experts import MUON, ROUTER, SHAPES, ExpertModel, RoutedGradients

ROWS = {
    "stage0": "stage 0",
    "bf16_optimizer": "BF16_Optimizer",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero1_offload": "ZeRO-1",
    "zero2_offload": "ZeRO-2",
    "zero3_offload": "ZeRO-3",
}
GAS, STEPS = 2, 3


def row(feature, engine, *values):
    """A parameter that shows a row of the table of what is supported."""
    offload = ", CPU offload" if engine.endswith("offload") else ""
    mark = pytest.mark.support(feature=feature + offload, engine=ROWS[engine], state="exact")
    return pytest.param(engine, *values, marks=mark)


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


FUSED, WIDTH, HIDDEN, COUNT, CLIP = "mlp.experts.gate_up_proj", 12, 8, 4, 0.05


class Experts(torch.nn.Module):
    """Stacks as transformers 5 has them: gate and up projection of an expert in one tensor."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(COUNT, 2 * WIDTH, HIDDEN) / 3)
        self.down_proj = torch.nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH) / 3)

    def forward(self, tokens, weights):
        gate, up = torch.einsum("th,efh->tef", tokens, self.gate_up_proj).chunk(2, dim=-1)
        out = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, self.down_proj)
        return (out * weights.unsqueeze(-1)).sum(1)


class Mixture(torch.nn.Module):
    """Each token goes to two experts, with weights that sum to 1."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, COUNT, bias=False)
        self.experts = Experts()

    def forward(self, hidden):
        tokens = hidden.reshape(-1, HIDDEN)
        scores = torch.softmax(self.gate(tokens).float(), dim=-1)
        top, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(-1, keepdim=True))
        return self.experts(tokens, weights.to(tokens.dtype)).view_as(hidden)


class Network(torch.nn.Module):

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.mlp = Mixture()
        self.last = torch.nn.Linear(HIDDEN, 5, bias=False)

    def forward(self, batch):
        hidden = torch.tanh(self.first(batch))
        return (self.last(hidden + self.mlp(hidden)) - batch[..., :5]).square().mean()


def batch_of(step, rank):
    return torch.randn(2, 16, HIDDEN, generator=torch.Generator().manual_seed(16 * step + rank))


def expert_matrices(name, tensor):
    """Of a stack, each expert; of gate and up in one, both; else the parameter."""
    if tensor.dim() < 3:
        return [tensor]
    return [part for expert in tensor for part in (expert.chunk(2) if name == FUSED else [expert])]


def unsharded(world_size):
    """The reference after STEPS steps of all ranks' batches, and the norm of the last."""
    model = Network()
    muon = ["first.weight", FUSED, "mlp.experts.down_proj", "last.weight"]
    reference = Reference(dict(model.named_parameters()), muon, expert_matrices)
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world_size):
            (model(batch_of(step, rank)) / world_size).backward()
        gradients = {name: param.grad for name, param in model.named_parameters()}
        norm = contract.norm_of(gradients)
        assert norm > CLIP
        reference.step(gradients, CLIP)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(reference.weights[name])
    return reference, norm


def train_network(engine, **sections):
    trained = contract.initialize(Network(), contract.ds_config(engine, "fp32", 1, CLIP, **sections))
    for step in range(STEPS):
        trained.backward(trained(batch_of(step, trained.global_rank)))
        trained.step()
    return trained


def of_rank(reference_tensors, rank, ep_size):
    """As AutoEP names and cuts them: w1 the gate, w3 the up and w2 the down projections of a rank's experts."""
    own = dict(reference_tensors)
    count = COUNT // ep_size
    first = rank % ep_size * count
    fused, down = own.pop(FUSED)[first:first + count], own.pop("mlp.experts.down_proj")[first:first + count]
    own["mlp.experts.w1"], own["mlp.experts.w3"] = fused.chunk(2, dim=1)
    own["mlp.experts.w2"] = down
    own["mlp.router.gate.weight"] = own.pop("mlp.gate.weight")
    return own


def check_network(trained, expected, start, norm):
    """Measured: weights 7.5e-6 of their way, norm 2e-7; forward and backward are rounded in fp32 as well."""
    weights = contract.master_weights(trained)
    contract.equal("parameters", set(weights), set(expected))
    for name, weight in weights.items():
        shape = expected[name].shape
        contract.below(name, contract.distance(weight.view(shape), expected[name], start[name]), 5e-5)
    if trained.optimizer is not trained.basic_optimizer:
        contract.below("norm", abs(float(trained.get_global_grad_norm()) / norm - 1), 2e-6)


@pytest.mark.parametrize("engine", [
    row("AutoEP", name)
    for name in ("stage0", "zero1", "zero2", "zero1_offload", "zero2_offload", "zero3", "zero3_offload")
])
class TestAutoEP(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ep_size", [1, 2])
    def test(self, engine, ep_size):
        section = {
            "enabled": True,
            "autoep_size": ep_size,
            "moe_layer_pattern": "mlp",
            "router_pattern": "gate",
            "expert_pattern": "experts",
            "expert_w1": "gate_up_proj",
            "expert_w2": "down_proj",
            "expert_w3": None,
            "top_k": 2,
            "score_func": "softmax",
            "score_apply": "post",
            "route_norm": True,
            "use_grouped_mm": False
        }
        reference, norm = unsharded(self.world_size)
        trained = train_network(engine, expert_parallel=section)
        rank = trained.global_rank
        check_network(trained, of_rank(reference.weights, rank, ep_size), of_rank(reference.start, rank, ep_size),
                      norm)
        contract.check_counts(trained, reference, STEPS)
        trained.destroy()


@pytest.mark.parametrize("engine", [
    row("Expert stacks of transformers, gate and up apart", name)
    for name in ("stage0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
])
class TestStacks(DistributedTest):
    world_size = 2

    def test_experts_and_parts_are_matrices_without_a_mark(self, engine):
        reference, norm = unsharded(self.world_size)
        trained = train_network(engine)
        check_network(trained, reference.weights, reference.start, norm)
        contract.check_counts(trained, reference, STEPS)
        trained.destroy()
