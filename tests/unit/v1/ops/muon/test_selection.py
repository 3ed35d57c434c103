# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which parameters go to Muon: expected lists written down from the architectures, on transformers' own classes."""

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.muon.selection import BY_GROUP_KEY, check_groups, choose, mark_groups, tag_parameters
from unit.common import DistributedTest
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel, Reference

transformers = pytest.importorskip("transformers")

SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
GQA = dict(**SMALL, num_key_value_heads=2)
ATTENTION = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GQA, head_dim=8))


def gpt_neox():
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL))


def t5():
    config = transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4, vocab_size=64)
    return transformers.T5ForConditionalGeneration(config)


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))


def vit():
    config = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config, image_size=16, patch_size=8))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**GQA, num_local_experts=4))


def deepseek_v3():
    config = transformers.DeepseekV3Config(**{
        **SMALL, "num_hidden_layers": 2
    },
                                           num_key_value_heads=4,
                                           moe_intermediate_size=16,
                                           first_k_dense_replace=1,
                                           n_routed_experts=8,
                                           n_group=2,
                                           topk_group=1,
                                           num_experts_per_tok=2,
                                           q_lora_rank=16,
                                           kv_lora_rank=16,
                                           qk_rope_head_dim=8,
                                           v_head_dim=8,
                                           qk_nope_head_dim=8)
    return transformers.DeepseekV3ForCausalLM(config)


def mamba():
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64, state_size=4)
    return transformers.MambaForCausalLM(config)


MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPECTED = {
    gpt2: {f"transformer.h.0.{name}.weight"
           for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
    llama: ATTENTION | MLP,
    qwen3: ATTENTION | MLP,
    gpt_neox: {
        f"gpt_neox.layers.0.{name}.weight"
        for name in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    },
    t5: {f"{side}.block.0.layer.0.SelfAttention.{name}.weight"
         for side in ("encoder", "decoder")
         for name in "qkvo"}
    | {f"decoder.block.0.layer.1.EncDecAttention.{name}.weight"
       for name in "qkvo"}
    | {
        f"{layer}.DenseReluDense.{name}.weight"
        for layer in ("encoder.block.0.layer.1", "decoder.block.0.layer.2")
        for name in ("wi", "wo")
    },
    bert: {
        f"bert.encoder.layer.0.{name}.weight"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                     "intermediate.dense", "output.dense")
    }
    | {"bert.pooler.dense.weight"},
    vit: {f"vit.layers.0.attention.{name}_proj.weight"
          for name in "qkvo"}
    | {f"vit.layers.0.mlp.{name}.weight"
       for name in ("fc1", "fc2")},
    mixtral: ATTENTION | {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"},
    deepseek_v3: {f"model.layers.{layer}.self_attn.{name}.weight"
                  for layer in (0, 1)
                  for name in MLA} | MLP
    | {f"model.layers.1.mlp.experts.{name}"
       for name in ("gate_up_proj", "down_proj")}
    | {f"model.layers.1.mlp.shared_experts.{name}_proj.weight"
       for name in ("gate", "up", "down")},
    mamba: {f"backbone.layers.0.mixer.{name}.weight"
            for name in ("in_proj", "x_proj", "dt_proj", "out_proj")},
}


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_expected_list(make):
    choices = choose(make(), {})
    assert {name for name, choice in choices.items() if choice.use_muon} == EXPECTED[make]


@pytest.mark.parametrize("make, name, rule", [
    (gpt2, "transformer.wte.weight", "embedding table"),
    (gpt2, "transformer.wpe.weight", "embedding table"),
    (llama, "lm_head.weight", "output head"),
    (llama, "model.norm.weight", "fewer than two dimensions"),
    (t5, "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "embedding table"),
    (bert, "classifier.weight", "output head"),
    (vit, "vit.embeddings.position_embeddings", "name says embedding or head"),
    (mixtral, "model.layers.0.mlp.gate.weight", "router"),
    (mamba, "backbone.layers.0.mixer.A_log", "MambaMixer.A_log is not known as the weight of a product"),
    (mamba, "backbone.layers.0.mixer.conv1d.weight", "1-D convolution"),
])
def test_rule_for_adam(make, name, rule):
    assert choose(make(), {})[name].rule == rule


def test_a_tied_head_is_the_embedding():
    config = transformers.LlamaConfig(**GQA, tie_word_embeddings=True)
    choices = choose(transformers.LlamaForCausalLM(config), {})
    assert "lm_head.weight" not in choices and choices["model.embed_tokens.weight"].rule == "embedding table"


def test_gpt2_weights_are_stored_transposed():
    model = gpt2()
    tag_parameters(model, {})
    assert model.transformer.h[0].mlp.c_fc.weight.muon_transposed is True
    model = llama()
    tag_parameters(model, {})
    assert model.model.layers[0].mlp.up_proj.weight.muon_transposed is False


def test_expert_stacks_are_marked_and_gate_and_up_are_parts():
    model = mixtral()
    tag_parameters(model, {})
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.is_expert_group is True and experts.gate_up_proj.muon_parts == (64, 64)
    assert experts.down_proj.is_expert_group is True and experts.down_proj.muon_parts is None


def test_convolutions():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv1d(4, 4, 3), nn.Conv3d(2, 4, 3))
    muon = {name for name, choice in choose(model, {}).items() if choice.use_muon}
    assert muon == {"0.weight", "3.weight"}


class TestTheUsersChoice:

    def test_the_parameters_own_mark_wins(self):
        model = llama()
        model.lm_head.weight.use_muon = True
        model.model.layers[0].mlp.up_proj.weight.use_muon = False
        choices = tag_parameters(model, dict(adam_params=["lm_head"], muon_params=["up_proj"]))
        assert choices["lm_head.weight"].use_muon and model.lm_head.weight.use_muon is True
        assert not choices["model.layers.0.mlp.up_proj.weight"].use_muon

    def test_a_mark_of_ours_is_not_the_users(self):
        model = llama()
        tag_parameters(model, {})
        choices = tag_parameters(model, dict(adam_params=["mlp"]))
        assert not choices["model.layers.0.mlp.up_proj.weight"].use_muon

    def test_patterns(self):
        choices = choose(mamba(), dict(adam_params=[r"x_proj", r"dt_proj\.weight$"], muon_params=["A_log"]))
        muon = {name.rpartition("mixer.")[2] for name, choice in choices.items() if choice.use_muon}
        assert muon == {"in_proj.weight", "out_proj.weight", "A_log"}

    @pytest.mark.parametrize("options, found", [
        (dict(adam_params=["no_such_layer"]), "adam_params holds 'no_such_layer', which matches no parameter"),
        (dict(muon_params=["("]), r"muon_params holds '\(', which is no regular expression"),
        (dict(adam_params="mlp"), "adam_params must be a list of regular expressions"),
        (dict(adam_params=["mlp"], muon_params=["up_proj"]), "both match"),
        (dict(muon_params=["norm"]), "takes two or more dimensions"),
    ])
    def test_refused(self, options, found):
        with pytest.raises(ValueError, match=found):
            choose(llama(), options)


def test_the_mixing_gate_of_a_residual_moe_layer_is_a_router():
    """`use_residual` of deepspeed.moe.layer.MoE, without the process groups that it needs."""
    moe = nn.ModuleDict(dict(mlp=nn.Linear(8, 8), coefficient=nn.Linear(8, 2)))
    choices = choose(nn.ModuleDict(dict(moe=moe)), {})
    assert choices["moe.coefficient.weight"].rule == "router" and choices["moe.mlp.weight"].use_muon


def test_parameters_of_modules_we_do_not_know():

    class Scaled(nn.Module):

        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 4))

    class MyLinear(nn.Module):

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))

    choices = choose(nn.ModuleDict(dict(scaled=Scaled(), mine=MyLinear())), {})
    assert choices["mine.weight"].use_muon
    assert choices["scaled.table"].rule == "Scaled.table is not known as the weight of a product"


def test_parts_set_by_the_user_stay():
    model = gpt_neox()
    fused = model.gpt_neox.layers[0].attention.query_key_value.weight
    fused.muon_parts = (32, 32, 32)
    tag_parameters(model, {})
    assert fused.muon_parts == (32, 32, 32) and fused.use_muon is True


class TestGroups:
    """`use_muon` of a param group."""

    def test_it_wins_over_patterns_and_rules_and_loses_to_the_parameters_own(self):
        model = llama()
        layer, head = model.model.layers[0], model.lm_head.weight
        layer.mlp.up_proj.weight.use_muon = True
        groups = mark_groups([{
            "params": layer.mlp.parameters(),
            "use_muon": False
        }, {
            "params": head,
            "use_muon": True
        }])
        choices = tag_parameters(model, dict(muon_params=["down_proj"]))
        muon = {name for name, choice in choices.items() if choice.use_muon}
        assert muon == ATTENTION | {"model.layers.0.mlp.up_proj.weight", "lm_head.weight"}
        assert choices["lm_head.weight"].rule == BY_GROUP_KEY
        assert [len(group["params"]) for group in groups] == [3, 1]
        check_groups(groups)

    def test_the_groups_of_one_call_do_not_reach_the_next(self):
        model = llama()
        mark_groups([{"params": [model.lm_head.weight], "use_muon": True}])
        assert tag_parameters(model, {})["lm_head.weight"].use_muon
        assert not tag_parameters(model, {})["lm_head.weight"].use_muon

    def test_what_holds_no_group_stays_as_it_is(self):
        for given in (None, iter([]), [torch.zeros(1)], ({"params": []} for _ in range(2))):
            assert mark_groups(given) is given

    @pytest.mark.parametrize("value, expected", [("no", "weight must be True or False, got 'no'"),
                                                 (True, "group asks for Muon on model.norm.weight, which has shape")])
    def test_refused(self, value, expected):
        model = llama()
        mark_groups([{"params": [model.lm_head.weight, model.model.norm.weight], "use_muon": value}])
        with pytest.raises(ValueError, match=expected):
            choose(model, {})

    def test_an_iterator_over_groups_is_refused(self):
        model = llama()
        groups = list(mark_groups(iter([{"params": [model.lm_head.weight], "use_muon": True}])))
        tag_parameters(model, {})
        with pytest.raises(ValueError, match="use_muon of param group 0 came too late"):
            check_groups(groups)


class TestGroupsOfEngines(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="use_muon of a param group", engine="all", state="exact")
    @pytest.mark.parametrize("engine", ["stage0", "zero1", "zero3"])
    def test_groups_choose(self, engine):
        model = ProductModel(SHAPES)
        weights = dict(model.named_parameters())
        weights["layers.0.weight"].use_muon = True
        to_adam, to_muon = ["layers.0.weight", "layers.3.weight"], ["embed_tokens.weight"]
        rest = [name for name in SHAPES if name not in to_adam + to_muon]
        muon = ["layers.0.weight", "layers.1.weight", "layers.2.weight", "layers.4.weight", "embed_tokens.weight"]
        reference = Reference(weights, muon)
        gradients = Gradients(SHAPES, self.world_size)
        groups = ({
            "params": [weights[name] for name in to_adam],
            "use_muon": False
        }, {
            "params": (weights[name] for name in to_muon),
            "use_muon": True
        }, {
            "params": [weights[name] for name in rest]
        })
        trained = contract.initialize(model, contract.ds_config(engine), model_parameters=groups)
        for step in range(2):
            contract.train_step(trained, gradients, step)
            reference.step(gradients.mean(step))
        contract.check(trained, reference, steps=2, norm=gradients.norm(1))
        trained.destroy()

    def test_a_key_that_is_not_read_is_refused(self):
        model = ProductModel(SHAPES)
        groups = [{"params": list(model.parameters()), "lr_scale": 0.1}]
        with pytest.raises(ValueError, match="does not read the key 'lr_scale' of param group 0"):
            contract.initialize(model, contract.ds_config("zero1"), model_parameters=groups)
