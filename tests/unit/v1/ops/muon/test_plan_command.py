# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`ds_muon plan`: its bytes are those of real runs, its other figures those of formulas written down here."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from tqdm import tqdm

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.muon import cli, plan_output
from deepspeed.runtime.zero.muon.exchange import Exchange
from unit.common import DistributedTest
from unit.v1.ops.muon import contract

SCRIPT = Path(__file__).parents[5] / "bin" / "ds_muon"

# Three layers of these sizes, so that flat partitions of 2, 3 and 4 ranks cut matrices, and padding counts: neither
# 41 * 18 nor the sum is a multiple of 8.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 18,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}

# Name of the engine, dtype, and sections of the ds_config. A small workspace makes several rounds. On two ranks two
# matrices of the MLP fill a sub-group of 41 * 18 exactly.
ROUNDS = {"workspace_mb": 0.04}
RUNS = {
    "stage0": ("stage0", "fp32", {
        "optimizer": {
            **ROUNDS, "ns_dtype": "float32"
        }
    }),
    "stage0_bf16": ("stage0", "bf16", {}),
    "bf16_optimizer": ("bf16_optimizer", "bf16", {
        "optimizer": ROUNDS
    }),
    "zero1_round_robin": ("zero1", "fp32", {
        "zero_optimization": {
            "round_robin_gradients": True
        }
    }),
    "zero2": ("zero2", "bf16", {
        "optimizer": {
            **ROUNDS, "ns_method": "gram",
            "ns_dtype": "float16"
        }
    }),
    "zero2_aligned": ("zero2", "bf16", {
        "zero_optimization": {
            "parameter_alignment": True
        }
    }),
    "zero2_offload": ("zero2_offload", "fp32", {
        "optimizer": {
            "per_head_muon": True
        }
    }),
    "zero3": ("zero3", "bf16", {
        "optimizer": {
            **ROUNDS, "ns_dtype": "float32"
        }
    }),
    "zero3_sub_groups": ("zero3", "fp32", {
        "zero_optimization": {
            "sub_group_size": 41 * 18
        }
    }),
    "zero3_init": ("zero3", "bf16", {
        "optimizer": {
            **ROUNDS, "per_head_muon": True
        }
    }),
}


def plan(folder, source, description, config, *arguments):
    """What the command prints with --json. `source` is "--model" or "--shapes"."""
    model, ds_config = Path(folder) / "model.json", Path(folder) / "ds_config.json"
    model.write_text(json.dumps(description))
    ds_config.write_text(json.dumps(config))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["plan", source, str(model), "--ds-config", str(ds_config), "--json", *arguments]) == 0
    return json.loads(printed.getvalue())


def counted_step(trained):
    """(received bytes, exchanges, bytes of norms) of this rank's Muon in one optimizer step of the engine."""
    found = []
    step = trained.basic_optimizer.step

    def counted(*arguments, **named):
        with contract.counted_collectives() as counts:
            result = step(*arguments, **named)
        found.append(dict(counts))
        return result

    trained.basic_optimizer.step = counted
    tokens = torch.arange(12, device=trained.device).view(1, 12)
    trained.backward(trained(input_ids=tokens, labels=tokens).loss)
    trained.step()
    exchanges = [counts.get("all_to_all_single", (0, 0)) for counts in found]
    norms = [counts.get("all_reduce", (0, 0))[1] for counts in found]
    return sum(size for _, size in exchanges), sum(calls for calls, _ in exchanges), sum(norms)


@pytest.mark.parametrize("name", RUNS)
class TestRealRuns(DistributedTest):
    world_size = [1, 2, 3, 4]
    reuse_dist_env = True

    def test_bytes(self, name):
        engine, dtype, sections = RUNS[name]
        sections = {**sections, "optimizer": {"ns_dtype": "bfloat16", **sections.get("optimizer", {})}}
        config = contract.ds_config(engine, dtype, **sections)
        zero_init = name == "zero3_init"
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config) if zero_init else contextlib.nullcontext():
            model = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**LLAMA))
        trained = contract.initialize(model.to(contract.TORCH_DTYPES[dtype]) if not zero_init else model, config)
        received, exchanges, norms = counted_step(trained)
        reports = trained.basic_optimizer.plan_reports()
        momentum = sum(shard.numel() * 4 for _, shard in contract.momentum_shards(trained))
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--zero-init"] if zero_init else []
            found = plan(folder, "--model", LLAMA, config, "--world-size", str(self.world_size), *arguments)
        expected, = found["estimates"]
        by_rank = Exchange(dist.get_world_group()).gather_objects(received)
        # Round robin over three ranks gives each rank one of every three alike, whole.
        assert sum(by_rank) > 0 or self.world_size == 1 or (name, self.world_size) == ("zero1_round_robin", 3)
        contract.equal("largest received", max(by_rank), expected["received_bytes_max"])
        contract.equal("received", sum(by_rank), round(expected["received_bytes_mean"] * self.world_size))
        contract.equal("exchanges", exchanges, expected["exchanges"])
        contract.equal("norms", norms, expected["norm_bytes"])
        contract.equal("momentum", momentum, expected["momentum_bytes"])
        workspace = max(max(report.workspace_bytes) for report in reports)
        contract.equal("workspace", workspace, expected["workspace_bytes"])
        loads = [sum(report.flops[rank] for report in reports) for rank in range(self.world_size)]
        contract.equal("FLOPs", max(loads), expected["flops_max"])
        contract.equal("matrices", sum(sum(report.matrices) for report in reports), found["model"]["matrices"])
        trained.destroy()


def config_of(stage, **sections):
    params = {"lr": 0.02, **sections.pop("params", {})}
    return {
        "bf16": {
            "enabled": True
        },
        "zero_optimization": {
            "stage": stage
        },
        "optimizer": {
            "type": "Muon",
            "params": params
        },
        **sections
    }


def shapes_of(*shapes):
    return [{"name": f"layers.{index}.weight", "shape": list(shape)} for index, shape in enumerate(shapes)]


MACHINE = ("--nodes-of", "4", "--tflops", "0.001", "--intra-GBps", "2", "--inter-GBps", "1")


class TestFormulas:

    def test_bytes_flops_and_traffic_of_zero_3(self, tmp_path):
        """16 matrices of 64 x 256 and 1,600 elements for Adam; 8 micro-batches."""
        shapes = [*shapes_of(*[(64, 256)] * 16), {"name": "norm", "shape": [1600]}]
        config = config_of(3, gradient_accumulation_steps=8)
        found = plan(tmp_path, "--shapes", shapes, config, "--world-size", "8,2")
        for estimate, ranks in zip(found["estimates"], (2, 8)):
            numel, f = 16 * 64 * 256, 1 - 1 / ranks
            assert estimate["world_size"] == ranks
            assert estimate["received_bytes_max"] == estimate["received_bytes_mean"] == 2 * 2 * numel / ranks * f
            assert estimate["norm_bytes"] == 8 * 16
            # Gram with one restart, r = 4: 8r + 28 in m^3.
            assert estimate["flops_max"] == estimate["flops_mean"] == 16 / ranks * 60 * 64**3
            assert estimate["balance"] == 1.0 and estimate["momentum_bytes"] == 4 * numel / ranks
            assert estimate["adam_bytes"] == pytest.approx(3 * 8 * (numel + 1600) * 2 * f)
            assert estimate["stock"]["received_bytes"] == 4 * numel * 2 * f
            # All are in one bucket, so each rank has 16/W of them.
            assert estimate["stock"]["flops"] == 16 / ranks * 60 * 64**3

    def test_traffic_of_the_other_stages(self, tmp_path):
        for stage, passes in ((0, 2), (1, 2), (2, 5)):
            config = config_of(stage, gradient_accumulation_steps=4, bf16={"enabled": False})
            found = plan(tmp_path, "--shapes", shapes_of((8, 8)), config, "--world-size", "4")
            assert found["estimates"][0]["adam_bytes"] == passes * 64 * 4 * 0.75

    def test_stock_0_19_8_by_stage(self, tmp_path):
        """Two matrices of 64 elements over 3 flat partitions of 44: the first lies on 2 ranks, the second on 2."""
        shapes, cost = shapes_of((8, 8), (8, 8)), 30 * 8**3
        holders = {"data_types": {"grad_accum_dtype": "fp32"}}
        cases = [
            # Every rank orthogonalizes both.
            (config_of(0), 0, 2 * cost),
            # Rank 1 holds a part of each.
            (config_of(2), 0, 2 * cost),
            # Rank 1 has elements 44..87: it lacks 44 of the first and 40 of the second. fp32.
            (config_of(1, **holders), 4 * (44 + 40), 2 * cost),
            (config_of(3, zero_optimization={
                "stage": 3,
                "offload_optimizer": {
                    "device": "cpu"
                }
            }), 2 * 128 * 4 * 2 // 3, 2 * cost),
            # Buckets of one matrix: both are rank 0's, one after the other.
            (config_of(3, zero_optimization={
                "stage": 3,
                "reduce_bucket_size": 100
            }), 4 * 128 * 2 * 2 // 3, 2 * cost),
            (config_of(3), 4 * 128 * 2 * 2 // 3, cost),
        ]
        for config, received, flops in cases:
            found = plan(tmp_path, "--shapes", shapes, config, "--world-size", "3", *MACHINE)["estimates"][0]["stock"]
            assert (found["received_bytes"], found["flops"]) == (received, flops), config
            assert found["seconds"] == pytest.approx(flops / 1e9 + received / 2e9)

    @pytest.mark.parametrize("ranks, link", [(2, 2e9), (8, 1e9)])
    def test_seconds_of_one_round(self, tmp_path, ranks, link):
        found = plan(tmp_path, "--shapes", shapes_of((64, 64)), config_of(3), "--world-size", str(ranks), *MACHINE)
        travel = 64 * 64 * (1 - 1 / ranks) * 2 / link
        norms = 2 * 8 / link
        assert found["estimates"][0]["seconds"] == pytest.approx(2 * travel + norms + 30 * 64**3 / 1e9)

    @pytest.mark.parametrize("inter", ["1", "0.0001"])
    def test_seconds_of_two_rounds(self, tmp_path, inter):
        """The second round's way there hides behind the first orthogonalization, the first one's way back behind the
        second, or the other way about."""
        config = config_of(3, params={"workspace_mb": 0.08})
        shapes = shapes_of(*[(64, 64)] * 4)
        machine = [*MACHINE[:-1], inter, "--nodes-of", "1"]
        found = plan(tmp_path, "--shapes", shapes, config, "--world-size", "2", *machine)["estimates"][0]
        link, compute = float(inter) * 1e9, 30 * 64**3 / 1e9
        # A rank owns one matrix a round, and gets half of it from the other.
        travel = 64 * 64 / 2 * 2 / link
        assert found["exchanges"] == 4
        expected = 2 * 8 * 4 / link + travel + 2 * max(compute, travel) + travel
        assert found["seconds"] == pytest.approx(expected)
        assert found["compute_seconds"] == pytest.approx(2 * compute)

    def test_nothing_but_the_whole_on_one_rank(self, tmp_path):
        found = plan(tmp_path, "--shapes", shapes_of((64, 64)), config_of(3), "--world-size", "1")["estimates"][0]
        assert (found["received_bytes_max"], found["norm_bytes"], found["adam_bytes"]) == (0, 0, 0)
        assert found["seconds"] == found["stock"]["seconds"] == pytest.approx(30 * 64**3 / 400e12)

    def test_limits(self, tmp_path):
        kinds = {"self_attn.q_proj": [64, 64], "mlp.up_proj": [256, 64]}
        shapes = [{
            "name": f"model.layers.{layer}.{kind}.weight",
            "shape": shape
        } for layer in range(4) for kind, shape in kinds.items()]
        # In 64^3: q 30, up 60, so 360 in all. A share is 360/W.
        up, query = ("model.layers.*.mlp.up_proj.weight", 4, 7), ("model.layers.*.self_attn.q_proj.weight", 4, 13)
        for ranks, expected in (("6", []), ("12", [up]), ("13", [up, query])):
            found = plan(tmp_path, "--shapes", shapes, config_of(3), "--world-size", ranks)["limits"]
            assert [(entry["pattern"], entry["count"], entry["from_ranks"]) for entry in found] == expected
        assert "per_head_muon" in found[1]["advice"] and "per_head_muon" not in found[0]["advice"]


class TestSources:

    def test_shapes_with_experts_parts_and_adam(self, tmp_path):
        shapes = [
            {"name": "experts.gate_up_proj", "shape": [3, 16, 8], "expert_stack": True, "parts": [8, 8]},
            {"name": "head.weight", "shape": [8, 8], "use_muon": False},
            {"name": "bias", "shape": [8]},
        ]  # yapf: disable
        found = plan(tmp_path, "--shapes", shapes, config_of(3), "--world-size", "2")
        assert found["model"] == {
            "parameters": 3,
            "elements": 3 * 16 * 8 + 64 + 8,
            "muon_parameters": 1,
            "muon_elements": 3 * 16 * 8,
            "matrices": 6,
        }
        assert found["estimates"][0]["flops_mean"] == 6 * 30 * 8**3 / 2

    def test_a_model_with_tables_heads_and_heads_of_attention(self, tmp_path):
        config = config_of(3, params={"per_head_muon": True})
        found = plan(tmp_path, "--model", LLAMA, config, "--world-size", "2")
        # Of 3 layers: q in 3 heads, k and v in 1, o and three of the MLP whole.
        assert found["model"]["matrices"] == 3 * (3 + 1 + 1 + 1 + 3) and found["model"]["muon_parameters"] == 21

    @pytest.mark.parametrize("name, elements, matrices", [
        ("llama-3-8b", 8030261248, 224),
        ("llama-3-70b", 70553706496, 560),
        ("deepseek-v3-like", 671026404352, 45032),
    ])
    def test_the_examples(self, name, elements, matrices):
        """Sizes as published: 8.03, 70.6 and 671 billion. DeepSeek-V3: 58 layers of 256 experts of 3 matrices, with
        3 of a shared one; 3 dense layers of 3; 61 times 5 of attention."""
        folder = SCRIPT.parents[1] / "examples" / "plan"
        found = cli.read_model(folder / f"{name}.json", folder / "zero3.json")
        assert sum(parameter.numel for parameter in found) == elements
        assert sum(len(parameter.matrices) for parameter in found) == matrices
        assert matrices in (7 * 32, 7 * 80, 58 * (256 * 3 + 3) + 3 * 3 + 61 * 5)


def message_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


class TestMistakes:

    @pytest.mark.parametrize("config, expected", [
        (config_of(3, params={"momentun": 0.9}), "did you mean 'momentum'"),
        (config_of(3, params={"ns_steps": 0}), "ns_steps"),
        (config_of(3, params={"workspace_mb": 0}), "workspace_mb must be a number above 0"),
        (config_of(7), "stage"),
        (config_of(3, zero_optimization={"stage": 3, "sub_grup_size": 1}), "sub_grup_size"),
        (config_of(3, zero_optimization={"stage": 3, "mics_shard_size": 4}), "zero_optimization.mics_shard_size is 4"),
        (config_of(3, tensor_parallel={"autotp_size": 2}), "tensor_parallel.autotp_size is 2"),
        (config_of(3, gradient_accumulation_steps=0), "gradient_accumulation_steps"),
        (config_of(3, optimizer={"type": "AdamW"}), "must be Muon, got 'AdamW'"),
        (config_of(3, optimizer=["Muon"]), "optimizer must be an object"),
        ([], "must hold a JSON object, found a list"),
    ])  # yapf: disable
    def test_in_the_ds_config(self, tmp_path, capsys, config, expected):
        (tmp_path / "shapes.json").write_text(json.dumps(shapes_of((8, 8))))
        (tmp_path / "ds.json").write_text(json.dumps(config))
        sources = ["--shapes", str(tmp_path / "shapes.json"), "--ds-config", str(tmp_path / "ds.json")]
        message = message_of(capsys, *sources, "--world-size", "2")
        assert expected in message

    @pytest.mark.parametrize("source, text, expected", [
        ("--model", '{"model_type": "no_such"}', "describes no model that transformers"),
        ("--model", '{"hidden_size": 8}', "describes no model that transformers"),
        ("--model", '{"model_type": "llama", "hidden_size": "x"}', "use --shapes"),
        ("--model", '{"model_type"', "is no JSON"),
        ("--model", "[]", "must hold a JSON object"),
        ("--shapes", "{}", "must hold a JSON list"),
        ("--shapes", '[{"name": "a", "shape": [8, 8], "size": 64}]', "entry 0"),
        ("--shapes", '[{"name": "a", "shape": [8, 0]}]', "positive integers"),
        ("--shapes", '[{"name": "a", "shape": [8, 8], "parts": [3, 4]}]', "do not split into parts"),
        ("--shapes", '[{"name": "a", "shape": [8], "use_muon": true}]', "Muon needs a matrix"),
        ("--shapes", '[{"name": "a", "shape": [8]}]', "no parameter goes to Muon"),
    ])
    def test_in_the_model(self, tmp_path, capsys, source, text, expected):
        (tmp_path / "model.json").write_text(text)
        (tmp_path / "ds.json").write_text(json.dumps(config_of(3)))
        message = message_of(capsys, source, str(tmp_path / "model.json"), "--ds-config", str(tmp_path / "ds.json"),
                             "--world-size", "2")
        assert expected in message

    @pytest.mark.parametrize("arguments, expected", [
        (["--world-size", "8,x"], "must be integers"),
        (["--world-size", "0"], "must be at least 1"),
        (["--world-size", "8", "--tflops", "-1"], "must be above 0"),
        (["--world-size", "8", "--zero-init"], "--zero-init means stage 3"),
        (["--world-size", "8", "--model", "x"], "not allowed with"),
        ([], "--world-size"),
    ])
    def test_in_the_arguments(self, tmp_path, capsys, arguments, expected):
        (tmp_path / "shapes.json").write_text(json.dumps(shapes_of((8, 8))))
        (tmp_path / "ds.json").write_text(json.dumps(config_of(2)))
        sources = ["--shapes", str(tmp_path / "shapes.json"), "--ds-config", str(tmp_path / "ds.json")]
        assert expected in message_of(capsys, *sources, *arguments)

    def test_no_such_file(self, tmp_path, capsys):
        sources = ["--model", str(tmp_path), "--ds-config", str(tmp_path / "gone.json")]
        message = message_of(capsys, *sources, "--world-size", "2")
        assert "No such file" in message and "gone.json" in message


class TestScript:

    def test_progress_counts_plans_and_stays_out_of_the_output(self, tmp_path, monkeypatch, capsys):
        """Sub-groups are closed at 32 elements of a rank: on 2 ranks a matrix each, on 4 two each."""
        monkeypatch.setattr(cli, "tqdm", lambda **named: tqdm(**{
            **named, "delay": 0,
            "mininterval": 0,
            "leave": True
        }))
        config = config_of(3, zero_optimization={"stage": 3, "sub_group_size": 32})
        plan(tmp_path, "--shapes", shapes_of(*[(8, 8)] * 4), config, "--world-size", "2,4")
        last = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
        assert "planning: 100%" in last and "6/6" in last

    def test_table_and_plot(self, tmp_path):
        """10,000 matrices on 16,384 ranks."""
        shapes = [{"name": f"layers.{i}.weight", "shape": [1024 + 1024 * (i % 4), 4096]} for i in range(10000)]
        (tmp_path / "shapes.json").write_text(json.dumps(shapes))
        (tmp_path / "ds.json").write_text(json.dumps(config_of(3)))
        command = [sys.executable, SCRIPT, "plan", "--shapes", tmp_path / "shapes.json", "--world-size", "64,16384"]
        command += ["--ds-config", tmp_path / "ds.json", "--plot", tmp_path / "plan.png"]
        environment = {**os.environ, "PYTHONPATH": str(Path(deepspeed.__file__).parents[1])}
        found = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0, found.stderr
        rows = [line.split("|") for line in found.stdout.splitlines() if line.startswith("|")]
        assert [row[1].strip() for row in rows] == ["ranks", "---", "64", "16,384"]
        assert {len(row) for row in rows} == {len(plan_output.HEADINGS) + 2}
        assert "10,000 matrices" in found.stdout and "layers.*.weight (2,500 of 4096 x 4096)" in found.stdout
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
