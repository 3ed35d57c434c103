# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fused projections: which parts they have, where those lie, and that each is orthogonalized as if it stood alone."""

from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.muon import engines
from deepspeed.runtime.zero.muon.layout import GroupLayout, _Span, _check_disjoint
from deepspeed.runtime.zero.muon.matrices import Matrix, matrices_of, matrices_of_parameter
from deepspeed.runtime.zero.muon.options import check_optimizer_params
from deepspeed.runtime.zero.muon.selection import choose, tag_parameters
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import Gradients, ProductModel, Reference
from unit.v1.ops.muon.simulate import simulate_steps
from unit.v1.ops.muon.test_selection import gpt2, gpt_neox, llama, mixtral, transformers

SMALL = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)

# shape, arguments of matrices_of: consecutive parts as rows and as columns, head after head, both; experts.
FUSED = {
    "rows": ((12, 5), dict(parts=[6, 4, 2])),
    "head by head": ((24, 5), dict(parts=[4, 3, 1])),
    "columns": ((5, 12), dict(parts=[4, 4, 4], transposed=True)),
    "columns, head by head": ((5, 18), dict(parts=[2, 1], transposed=True)),
    "experts, gate beside up": ((3, 4, 6), dict(parts=[1, 1], transposed=True, expert_stack=True)),
    "experts, head by head": ((2, 8, 3), dict(parts=[1, 3], expert_stack=True)),
}


def taken_apart(whole: torch.Tensor, parts: List[int], transposed: bool = False) -> List[torch.Tensor]:
    """By torch's own views, not by offsets: outputs to the front, as [repeat, part, inputs]."""
    outputs_first = whole.T if transposed else whole
    repeats = outputs_first.reshape(-1, sum(parts), outputs_first.shape[1])
    found = [part.reshape(-1, outputs_first.shape[1]) for part in repeats.split(parts, dim=1)]
    return [part.T.contiguous() if transposed else part.contiguous() for part in found]


def each(whole: torch.Tensor, expert_stack: bool = False, **arguments: Any) -> List[torch.Tensor]:
    stack = whole.unbind() if expert_stack else [whole]
    return [part for expert in stack for part in taken_apart(expert, **arguments)]


@pytest.mark.parametrize("case", FUSED)
class TestWhereThePartsLie:

    def test_elements(self, case):
        shape, arguments = FUSED[case]
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for matrix, expected in zip(matrices_of("w", shape, **arguments), each(whole, **arguments)):
            strips = whole.flatten().as_strided((matrix.strips, matrix.numel // matrix.strips), (matrix.stride, 1),
                                                matrix.offset_in_parameter)
            assert torch.equal(strips.reshape(matrix.rows, matrix.cols), expected)
            outputs, inputs = expected.T.shape if arguments.get("transposed") else expected.shape
            assert (matrix.fan_out, matrix.fan_in) == (outputs, inputs)

    @pytest.mark.parametrize("kind", ["flat", "sharded", "replicated"])
    @pytest.mark.parametrize("world_size", [1, 2, 3, 7])
    def test_steps_as_if_each_stood_alone(self, case, world_size, kind):
        """Bit for bit, between two plain matrices, whatever the cut."""
        shape, arguments = FUSED[case]
        parameters = [
            matrices_of("before", (3, 7)),
            matrices_of("w", shape, **arguments),
            matrices_of("after", (4, 4))
        ]
        numels = [21, torch.Size(shape).numel(), 16]
        matrices = [matrix for own in parameters for matrix in own]
        starts = [0, numels[0], numels[0] + numels[1]]
        offsets = [start + m.offset_in_parameter for start, own in zip(starts, parameters) for m in own]
        if kind == "sharded":
            layout = GroupLayout.sharded(parameters=parameters, parameter_numels=numels, world_size=world_size)
        elif kind == "flat":
            layout = GroupLayout.flat(matrices=matrices,
                                      flat_offsets=offsets,
                                      world_size=world_size,
                                      partition_numel=-(-sum(numels) // world_size))
        else:
            layout = GroupLayout.replicate(matrices=matrices,
                                           offsets_in_partition=offsets,
                                           world_size=world_size,
                                           partition_numel=sum(numels))
        torch.manual_seed(0)
        weights, *grads = [[torch.randn(m.rows, m.cols) for m in matrices] for _ in range(3)]
        found, _ = simulate_steps(layout, weights, grads)
        for index, matrix in enumerate(matrices):
            alone = Matrix(matrix.name, matrix.rows, matrix.cols, 0, matrix.fan_out, matrix.fan_in)
            single = GroupLayout.flat(matrices=[alone], flat_offsets=[0], world_size=1, partition_numel=alone.numel)
            expected, _ = simulate_steps(single, [weights[index]], [[grad[index]] for grad in grads])
            assert torch.equal(found[index], expected[0]), matrix


@pytest.mark.parametrize("first, second, disjoint", [
    (_Span(0, 6, 3, 5, "a"), _Span(2, 9, 3, 5, "b"), True),
    (_Span(0, 6, 3, 5, "a"), _Span(2, 12, 3, 5, "b"), False),
    (_Span(0, 6, 3, 5, "a"), _Span(1, 3, 3, 5, "b"), False),
    (_Span(0, 6, 3, 5, "a"), _Span(2, 9, 3, 4, "b"), False),
    (_Span(0, 6, 3, 5, "a"), _Span(12, 4, 1, 0, "b"), True),
    (_Span(0, 6, 3, 5, "a"), _Span(11, 4, 1, 0, "b"), False),
])
def test_strips_that_share_elements_are_found(first, second, disjoint):
    elements = [{
        span.start + strip * span.stride + k
        for strip in range(span.strips)
        for k in range(span.strip_numel)
    } for span in (first, second)]
    assert elements[0].isdisjoint(elements[1]) == disjoint
    if disjoint:
        _check_disjoint([second, first])
    else:
        with pytest.raises(ValueError, match="b occupies .* which overlaps a"):
            _check_disjoint([second, first])


def bloom():
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64)
    return transformers.BloomForCausalLM(config)


def phi3():
    config = transformers.Phi3Config(**SMALL, num_key_value_heads=2, intermediate_size=48, pad_token_id=0)
    return transformers.Phi3ForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(**SMALL,
                                       num_key_value_heads=2,
                                       head_dim=8,
                                       intermediate_size=24,
                                       num_local_experts=4,
                                       num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


def llama4():
    config = transformers.Llama4TextConfig(**SMALL,
                                           num_key_value_heads=2,
                                           head_dim=8,
                                           intermediate_size=24,
                                           intermediate_size_mlp=48,
                                           num_local_experts=4)
    return transformers.Llama4ForCausalLM(config)


KNOWN = {
    gpt2: {
        "transformer.h.0.attn.c_attn.weight": (32, 32, 32)
    },
    gpt_neox: {
        "gpt_neox.layers.0.attention.query_key_value.weight": (8, 8, 8)
    },
    bloom: {
        "transformer.h.0.self_attention.query_key_value.weight": (8, 8, 8)
    },
    phi3: {
        "model.layers.0.self_attn.qkv_proj.weight": (32, 16, 16),
        "model.layers.0.mlp.gate_up_proj.weight": (48, 48)
    },
    mixtral: {
        "model.layers.0.mlp.experts.gate_up_proj": (64, 64)
    },
    gpt_oss: {
        "model.layers.0.mlp.experts.gate_up_proj": (1, 1)
    },
    llama4: {
        "model.layers.0.feed_forward.experts.gate_up_proj": (24, 24)
    },
    llama: {},
}


class TestSelection:

    @pytest.mark.parametrize("make", KNOWN, ids=lambda make: make.__name__)
    def test_known(self, make):
        choices = choose(make(), {"fused_params": "known"})
        assert {name: choice.parts for name, choice in choices.items() if choice.parts} == KNOWN[make]

    @pytest.mark.parametrize("make, attention, fused, dense", [
        (gpt2, "transformer.h.0.attn", "c_attn", "c_proj"),
        (gpt_neox, "gpt_neox.layers.0.attention", "query_key_value", "dense"),
        (bloom, "transformer.h.0.self_attention", "query_key_value", "dense"),
        (phi3, "model.layers.0.self_attn", "qkv_proj", "o_proj"),
    ])
    def test_the_last_part_is_the_value(self, make, attention, fused, dense):
        """Without the value nothing passes the attention; without what is taken for key, something does."""
        model = make().eval()
        tag_parameters(model, {"fused_params": "known"})
        block = model.get_submodule(attention)
        weight, bias = getattr(block, fused).weight, getattr(block, fused).bias
        nn.init.normal_(weight)
        if bias is not None:
            nn.init.zeros_(bias)
        seen = []
        getattr(block, dense).register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
        matrices = matrices_of("w", weight.shape, parts=weight.muon_parts, transposed=weight.muon_transposed)
        for matrix in (matrices[-1], matrices[1]):
            saved = weight.detach().clone()
            strips = weight.detach().view(-1).as_strided((matrix.strips, matrix.numel // matrix.strips),
                                                         (matrix.stride, 1), matrix.offset_in_parameter)
            strips.zero_()
            model(torch.arange(6)[None])
            weight.data.copy_(saved)
        without_value, without_key = (int(tensor.count_nonzero()) for tensor in seen)
        assert without_value == 0 and without_key > 0

    def test_multihead_attention(self):
        model = nn.ModuleDict(dict(attention=nn.MultiheadAttention(8, 2)))
        assert choose(model, {"fused_params": "known"})["attention.in_proj_weight"].parts == (8, 8, 8)

    def test_kept_whole_unless_asked(self):
        choice = choose(gpt2(), {})["transformer.h.0.attn.c_attn.weight"]
        assert choice.parts == (96, )
        assert choice.rule == "weight of a product, fused of 3 and kept whole, see fused_params"

    @pytest.mark.parametrize("spec, parts, said", [
        (3, (32, 32, 32), "3 parts by fused_params"),
        ([64, 16, 16], (64, 16, 16), "3 parts by fused_params"),
        ([8, 8, 8], (8, 8, 8), "3 parts by fused_params"),
        (1, (96, ), "whole by fused_params"),
    ])
    def test_patterns(self, spec, parts, said):
        choice = choose(gpt2(), {"fused_params": {"c_attn": spec, "attn": 2}})["transformer.h.0.attn.c_attn.weight"]
        assert choice.parts == parts and choice.rule == f"weight of a product, {said}"

    def test_an_expert_stack_can_be_kept_whole(self):
        choices = choose(mixtral(), {"fused_params": {"gate_up_proj": 1}})
        assert choices["model.layers.0.mlp.experts.gate_up_proj"].parts == (128, )

    def test_transposed_experts(self):
        experts = choose(gpt_oss(), {})
        assert all(experts[f"model.layers.0.mlp.experts.{name}"].transposed for name in ("gate_up_proj", "down_proj"))
        experts = choose(llama4(), {})
        assert experts["model.layers.0.feed_forward.experts.gate_up_proj"].transposed

    @pytest.mark.parametrize("value, found", [
        ("yes", "fused_params must be \"known\" or an object"),
        ({
            "c_attn": 0
        }, "fused_params says 0 for 'c_attn'"),
        ({
            "c_attn": []
        }, r"fused_params says \[\] for 'c_attn'"),
        ({
            "c_attn": [1, True]
        }, r"fused_params says \[1, True\]"),
        ({
            "c_attn": 5
        }, "asks for 5 equal parts of transformer.h.0.attn.c_attn.weight, which has 96 outputs"),
        ({
            "c_attn": [64, 64]
        }, r"asks for parts of \[64, 64\] outputs in .*c_attn.weight, which has 96"),
        ({
            "wte": 3
        }, "fused_params holds 'wte', which matches no parameter that goes to Muon"),
        ({
            "(": 3
        }, "which is no regular expression"),
    ])
    def test_refused(self, value, found):
        with pytest.raises(ValueError, match=found):
            choose(gpt2(), {"fused_params": value})

    def test_not_together_with_heads(self):
        model = gpt2()
        tag_parameters(model, {"fused_params": "known"})
        weight = model.transformer.h[0].attn.c_attn.weight
        weight.muon_num_heads = 4
        with pytest.raises(ValueError, match="w is to be taken apart into 4 heads by per_head_muon and into 3 parts"):
            matrices_of_parameter("w", weight, tuple(weight.shape))

    @pytest.mark.parametrize("partition_dim, refused", [(1, True), (0, False)])
    def test_not_where_tensor_ranks_cut_the_outputs(self, partition_dim, refused):
        model = gpt2()
        tag_parameters(model, {"fused_params": "known"})
        weight = model.transformer.h[0].attn.c_attn.weight
        weight.tensor_model_parallel, weight.partition_dim = True, partition_dim
        engine = SimpleNamespace(param_names={weight: "c_attn.weight"})
        if refused:
            with pytest.raises(ValueError, match="c_attn.weight is taken apart into 3 parts and cut over tensor-para"):
                engines._tensor_cut(engine, weight)
        else:
            assert engines._tensor_cut(engine, weight) == partition_dim

    def test_the_key_is_known(self):
        check_optimizer_params({"fused_params": "known"})


SHAPES = {"attention.c_attn.weight": (7, 12), "attention.query_key_value.weight": (24, 5), "mlp.up.weight": (9, 8)}
PARTS = {"attention.c_attn.weight": [4, 4, 4], "attention.query_key_value.weight": [4, 3, 1]}


def parts_of(name: str, tensor: torch.Tensor) -> List[torch.Tensor]:
    """As [outputs, inputs], which is what the reference scales by."""
    return taken_apart(tensor.T if "c_attn" in name else tensor, PARTS[name]) if name in PARTS else [tensor]


def whole_of(parts: List[torch.Tensor], name: str, shape: Any) -> torch.Tensor:
    """The inverse of `parts_of`, by solving for it: which element goes where is told by `parts_of` itself."""
    order = torch.cat([part.flatten() for part in parts_of(name, torch.arange(torch.Size(shape).numel()).view(shape))])
    return torch.empty(order.numel(),
                       dtype=parts[0].dtype).scatter_(0, order,
                                                      torch.cat([part.flatten() for part in parts])).view(shape)


class FusedReference(Reference):

    def _whole(self, matrices: Any) -> contract.Tensors:
        left, whole = list(matrices), {}
        for name in self.muon:
            count = len(self.matrices_of(name, self.start[name]))
            whole[name] = whole_of(left[:count], name, self.start[name].shape)
            del left[:count]
        return whole


class Conv1D(contract.LinearProduct):
    """Stored [in, out]; the name is what the selection knows it by."""


@pytest.mark.parametrize("world_size, engine, dtype", [
    pytest.param(world_size,
                 engine,
                 dtype,
                 marks=pytest.mark.support(
                     feature="fused projections taken apart (`fused_params`)", engine=label, state="exact"))
    for engine, dtype, label in [("stage0", "fp32",
                                  "stage 0"), ("bf16_optimizer", "bf16",
                                               "BF16_Optimizer"), ("zero1", "bf16",
                                                                   "ZeRO-1"), ("zero2_offload", "fp32",
                                                                               "ZeRO-2"), ("zero3", "fp32", "ZeRO-3")]
    for world_size in (1, 3)
])
class TestEngines(DistributedTest):

    def test(self, world_size, engine, dtype):
        gradients = Gradients(SHAPES, world_size, 1)
        model = ProductModel(SHAPES)
        model.attention.c_attn.__class__ = Conv1D
        reference = FusedReference(dict(model.named_parameters()), list(SHAPES), parts_of)
        config = contract.ds_config(engine, dtype, 1, 0.0)
        config["optimizer"]["params"]["fused_params"] = {"c_attn": 3, "query_key_value": [4, 3, 1]}
        trained = contract.initialize(model, config)
        for step in range(2):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step))
        contract.check(trained, reference, steps=2, norm=gradients.norm(1))
        trained.destroy()
