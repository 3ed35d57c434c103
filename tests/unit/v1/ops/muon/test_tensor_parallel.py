# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Matrices cut over tensor-parallel ranks: blocks of rows or columns, each cut again by ZeRO."""

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import Matrix
from deepspeed.runtime.zero.muon.tensor_parallel import CUT_COLUMNS, CUT_ROWS, TensorShard, join
from deepspeed.utils import groups
from unit.common import DistributedTest
from unit.v1.ops.muon.oracle import MuonOracle
from unit.v1.ops.muon.simulate import KERNEL, gather, scatter, simulate_steps
from unit.v1.ops.muon.test_layout import flat_layout

TENSOR, DATA = 2, 2
CLIP = 0.1


def shard_layout(shapes):
    return flat_layout(shapes, DATA)


def joint(shapes, cuts):
    """Layout over 2 x 2 ranks of matrices with the local `shapes`; tensor rank t has ranks 2t and 2t + 1."""
    return join([TensorShard((DATA * t, DATA * t + 1), shard_layout(shapes), cuts) for t in range(TENSOR)])


class TestJoin:

    def test_rows_columns_and_copies(self):
        layout = joint([(4, 6), (5, 3), (2, 2)], (CUT_ROWS, CUT_COLUMNS, None))
        assert [(m.rows, m.cols, m.column_blocks, m.fan_out, m.fan_in) for m in layout.matrices] == [(8, 6, 1, 8, 6),
                                                                                                     (5, 6, 2, 5, 6),
                                                                                                     (2, 2, 1, 2, 2),
                                                                                                     (2, 2, 1, 2, 2)]
        assert layout.world_size == 4

    def test_equals_the_unsharded_matrix(self):
        """Column blocks are put side by side by the owner: the result is that of the whole matrix, bit for bit."""
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape in ((8, 6), (5, 6))]
        grads = [torch.randn(shape, generator=generator) for shape in ((8, 6), (5, 6))]

        def stored(matrix):
            return torch.cat([block.reshape(-1) for block in matrix.chunk(TENSOR, dim=1)])

        expected, _ = simulate_steps(flat_layout([(8, 6), (5, 6)], 1), weights, [grads, grads])
        layout = joint([(4, 6), (5, 3)], (CUT_ROWS, CUT_COLUMNS))
        found, ranks = simulate_steps(layout, [weights[0], stored(weights[1])], [[grads[0], stored(grads[1])]] * 2,
                                      kernel=KERNEL)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1].flatten(), stored(expected[1]))
        assert sum(rank["orthogonalized"] for rank in ranks) == 2 * 2

    def test_blocks_that_do_not_fit(self):
        narrow = GroupLayout.flat(matrices=[Matrix("w", 5, 2, 0, 5, 2)],
                                  flat_offsets=[0],
                                  world_size=DATA,
                                  partition_numel=8)
        wide = GroupLayout.flat(matrices=[Matrix("w", 5, 3, 0, 5, 3)],
                                flat_offsets=[0],
                                world_size=DATA,
                                partition_numel=8)
        shards = [TensorShard((0, 1), narrow, (CUT_COLUMNS, )), TensorShard((2, 3), wide, (CUT_COLUMNS, ))]
        with pytest.raises(ValueError, match=r"blocks of w do not fit together: \[\(5, 2\), \(5, 3\)\]"):
            join(shards)

    def test_partitions_of_other_sizes(self):
        shards = [
            TensorShard((0, 1), shard_layout([(4, 6)]), (CUT_ROWS, )),
            TensorShard((2, 3), shard_layout([(6, 6)]), (CUT_ROWS, ))
        ]
        with pytest.raises(ValueError, match="tensor rank 1 holds other parameters, or partitions of another size"):
            join(shards)

    def test_every_element_has_one_place(self):
        layout = joint([(4, 6), (5, 3)], (CUT_ROWS, CUT_COLUMNS))
        values = [torch.arange(m.numel, dtype=torch.float).view(m.rows, m.cols) for m in layout.matrices]
        partitions = [scatter(layout, values, rank) for rank in range(4)]
        assert all(torch.equal(one, other) for one, other in zip(values, gather(layout, partitions)))


def tiny_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=32,
                                      intermediate_size=48,
                                      num_hidden_layers=2,
                                      num_attention_heads=4,
                                      num_key_value_heads=2,
                                      vocab_size=64)
    return transformers.LlamaForCausalLM(config)


def ds_config(stage, **options):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage
        },
        "tensor_parallel": {
            "autotp_size": TENSOR
        },
        "optimizer": {
            "type": "Muon",
            "params": {
                "lr": 0.02,
                "adam_lr": 0.001,
                "torch_adam": True,
                "ns_method": "standard",
                "ns_dtype": "float32",
                "muon_report": False,
                **options
            }
        }
    }


def batch(step, data_rank):
    generator = torch.Generator().manual_seed(DATA * step + data_rank)
    return torch.randint(0, 64, (2, 12), generator=generator)


def train(stage, data_rank, steps, **options):
    """Tensor ranks of one data rank see the same batch."""
    engine, _, _, _ = deepspeed.initialize(model=tiny_llama(), config=ds_config(stage, **options))
    for step in range(steps):
        own = batch(step, data_rank)
        engine.backward(engine(input_ids=own, labels=own).loss)
        engine.step()
    return engine


def whole_weights(engine, stage):
    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            shard = param.detach().clone()
        meta = getattr(param, "ds_autotp_universal_checkpoint_meta", None) or {}
        dim = meta.get("partition_dim")
        if getattr(param, "tensor_model_parallel", False) and dim is not None:
            group = groups.get_tensor_model_parallel_group()
            parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group=group))]
            dist.all_gather(parts, shard.contiguous(), group=group)
            shard = torch.cat(parts, dim=dim)
        found[name] = shard
    return found


def unsharded_weights(steps):
    """The same training in one process: all batches, whole matrices, the oracle's Muon and torch's AdamW."""
    model = tiny_llama()
    named = dict(model.named_parameters())
    muon = [
        name for name, param in named.items() if param.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    oracle = MuonOracle([named[name] for name in muon], lr=0.02)
    adam = torch.optim.AdamW([param for name, param in named.items() if name not in muon],
                             lr=0.001,
                             betas=(0.9, 0.95),
                             eps=1e-10,
                             weight_decay=0)
    norms = []
    for step in range(steps):
        model.zero_grad()
        for data_rank in range(DATA):
            own = batch(step, data_rank)
            (model(input_ids=own, labels=own).loss / DATA).backward()
        norms.append(float(torch.cat([param.grad.double().flatten() for param in named.values()]).norm()))
        grads = [named[name].grad.clone() for name in muon]
        oracle.step(grads, clip=CLIP, norm=norms[-1])
        for param in named.values():
            param.grad.mul_(min(1.0, CLIP / (norms[-1] + 1e-6)))
        adam.step()
        with torch.no_grad():
            for name, weight in zip(muon, oracle.weights):
                named[name].copy_(weight)
    return named, norms, len(muon)


@pytest.mark.parametrize("stage", [
    pytest.param(
        stage, marks=pytest.mark.support(feature="Tensor parallelism (AutoTP)", engine=f"ZeRO-{stage}", state="exact"))
    for stage in (1, 2, 3)
])
class TestAutoTP(DistributedTest):
    world_size = 4

    def test_two_by_two_equals_the_unsharded_model(self, stage):
        """fp32 against float64, and sums over tensor ranks: 3e-5 of what the weights moved is allowed. Muon on each
        shard by itself was 0.5 to 1.0 away."""
        steps = 3
        expected, norms, matrices = unsharded_weights(steps)
        assert min(norms) > CLIP
        start = {name: param.detach().clone() for name, param in tiny_llama().named_parameters()}
        engine = train(stage, dist.get_rank() // TENSOR, steps)
        assert float(engine.get_global_grad_norm()) == pytest.approx(norms[-1], rel=1e-4)
        for name, weight in whole_weights(engine, stage).items():
            moved = (expected[name] - start[name]).norm()
            assert (weight - expected[name]).norm() <= 3e-5 * moved, name
        counted = torch.tensor(engine.optimizer.optimizer.orthogonalizations)
        dist.all_reduce(counted)
        assert counted == steps * matrices

    def test_shard_is_another_optimizer(self, stage):
        expected, _, _ = unsharded_weights(1)
        engine = train(stage, dist.get_rank() // TENSOR, 1, tensor_parallel="shard")
        start = dict(tiny_llama().named_parameters())
        name = "model.layers.0.self_attn.q_proj.weight"
        moved = (expected[name] - start[name]).norm()
        assert (whole_weights(engine, stage)[name] - expected[name]).norm() > 0.05 * moved


class TestZeroInit(DistributedTest):
    """AutoTP makes new parameters of those that zero.Init has cut; the marks have to go along."""
    world_size = 2

    def test_marks_are_kept(self):
        config = ds_config(3, per_head_muon=True, adam_params=["up_proj"])
        # transformers cannot be imported while zero.Init has put its own functions into torch.
        tiny_llama()
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = tiny_llama()
        engine = deepspeed.initialize(model=model, config=config)[0]
        layer = engine.module.model.layers[0]
        query = layer.self_attn.q_proj.weight
        # Two of the four heads, each as wide as before.
        assert (query.muon_num_heads, query.muon_head_dim, query.ds_shape[0]) == (2, 8, 16)
        assert query.muon_rule == "weight of a product" and query.muon_transposed is False
        assert layer.mlp.up_proj.weight.use_muon is False and layer.mlp.up_proj.weight.muon_rule == "adam_params"
        engine.destroy()


class TestStage0(DistributedTest):
    world_size = 2

    @pytest.mark.support(feature="Tensor parallelism (AutoTP)", engine="stage 0", state="refused")
    def test_is_refused(self):
        with pytest.raises(ValueError, match="stage 0 does not support tensor parallelism; use ZeRO stage 1, 2 or 3"):
            deepspeed.initialize(model=tiny_llama(), config=ds_config(0))
