# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Time of a step and bytes of the engines: this fork against stock DeepSpeed 0.19.8 and against AdamW.

    python benchmarks/engines.py [--world-sizes 2 4] [--engines zero1 zero3 ...] [--rounds 5] [--write]

The same model, data and number of ranks, in alternating runs of both installations; the table has medians of ratios
and their spread. Bytes are what a rank receives in an iteration, counted in the collectives themselves: an all-gather
of n elements counts n*(1-1/W), an all-reduce 2n*(1-1/W), a reduce-scatter n*(1-1/W), an all-to-all what other ranks
send.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS, WIDTH, MLP = 6, 256, 1024
WARMUP, STEPS = 2, 6
STOCK = "0.19.8"
RESULTS = Path(__file__).resolve().parent / "results" / "engines.md"

ENGINES = {
    "stage0": dict(stage=0),
    "bf16": dict(stage=1, bf16=True),
    "zero1": dict(stage=1),
    "zero2": dict(stage=2),
    "zero3": dict(stage=3),
    "zero3-offload": dict(stage=3, offload=True),
}


def ds_config(engine: str, optimizer: str, stock: bool) -> dict:
    options = ENGINES[engine]
    zero = {"stage": options["stage"]}
    if options.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if options["stage"] == 3 and stock and optimizer == "muon":
        zero["reduce_scatter"] = False
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-3,
                "torch_adam": True
            }
        }
    }
    if optimizer == "muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "torch_adam": True}}
    if options.get("bf16"):
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def make_model():
    import torch

    class Block(torch.nn.Module):

        def __init__(self):
            super().__init__()
            self.attention = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.up = torch.nn.Linear(WIDTH, MLP, bias=False)
            self.down = torch.nn.Linear(MLP, WIDTH, bias=False)

        def forward(self, x):
            for linear in self.attention:
                x = x + torch.tanh(linear(x))
            return x + self.down(torch.tanh(self.up(x)))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(LAYERS)), torch.nn.LayerNorm(WIDTH))


class ReceivedBytes:
    """Counts what a rank receives in torch.distributed's collectives."""

    def __init__(self, world_size: int):
        import torch.distributed as dist
        self.total = 0
        share = 1 - 1 / world_size
        # Which argument, by position, has the elements that count, and how often they count.
        kinds = {
            "all_reduce": (0, 2 * share),
            "all_gather_into_tensor": (0, share),
            "all_gather": (0, share),
            "reduce_scatter_tensor": (1, share),
            "reduce_scatter": (1, share),
            "all_to_all_single": (0, share),
            "broadcast": (0, share),
            "reduce": (0, share),
        }
        for name, (position, factor) in kinds.items():
            setattr(dist, name, self._counted(getattr(dist, name), name, position, factor))

    def _counted(self, function, name, position, factor):

        def counted(*args, **kwargs):
            named = {"output": 0, "output_tensor": 0, "tensor": 0, "tensor_list": 0, "input": 1, "input_tensor": 1}
            by_position = dict(enumerate(args))
            by_position.update({named[key]: value for key, value in kwargs.items() if key in named})
            tensors = by_position[position]
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if name == "all_to_all_single" and kwargs.get("output_split_sizes"):
                import torch.distributed as dist
                own = kwargs["output_split_sizes"][dist.get_rank(kwargs.get("group"))]
                self.total += size - own * tensors[0].element_size()
            else:
                self.total += size * factor
            return function(*args, **kwargs)

        return counted


def worker(engine_name: str, optimizer: str, stock: bool, out: str) -> None:
    """One rank of one run: median time of backward pass and step, bytes of an iteration, bytes of state."""
    import torch
    import deepspeed
    import deepspeed.comm as dist
    deepspeed.init_distributed()
    counter = ReceivedBytes(dist.get_world_size())
    model = make_model()
    dtype = torch.bfloat16 if ENGINES[engine_name].get("bf16") else torch.float32
    engine, _, _, _ = deepspeed.initialize(model=model,
                                           model_parameters=model.parameters(),
                                           config=ds_config(engine_name, optimizer, stock))
    times, received = [], []
    for step in range(WARMUP + STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        before = counter.total
        loss = engine(torch.randn(4, 16, WIDTH, dtype=dtype)).float().square().mean()
        dist.barrier()
        # With the backward pass, which is small here, because stock ZeRO-1 and 2 orthogonalize at its end.
        start = time.perf_counter()
        engine.backward(loss)
        engine.step()
        times.append(time.perf_counter() - start)
        received.append(counter.total - before)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = sum(value.numel() * value.element_size() for state in base.state.values() for value in state.values()
                if torch.is_tensor(value))
    if dist.get_rank() == 0:
        Path(out).write_text(
            json.dumps(dict(seconds=statistics.median(times[WARMUP:]), bytes=received[-1], state_bytes=state)))
    dist.barrier()
    # The end of a Python with gloo and released DeepSpeed can abort.
    os._exit(0)


def run(python: str, engine: str, optimizer: str, world_size: int, stock: bool) -> dict:
    """One run in a process group of its own; its figures. Raises RuntimeError with the output where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "figures.json")
        env = {
            **os.environ, "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_EXTENSIONS_DIR": str(Path(python).parent.parent / "torch_extensions"),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}"
        }
        env.pop("PYTHONPATH", None)
        command = [
            python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(world_size), __file__, "--worker", engine, optimizer,
            str(int(stock)), out
        ]
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=folder)
        if found.returncode or not os.path.exists(out):
            raise RuntimeError(f"{engine} {optimizer} W={world_size} stock={stock}:\n{found.stdout}{found.stderr}")
        return json.loads(Path(out).read_text())


def compare(engine: str, world_size: int, rounds: int, stock_python: str) -> str:
    """A line of the table."""
    ratios, adam_ratios = [], []
    for _ in range(rounds):
        fork = run(sys.executable, engine, "muon", world_size, False)
        stock = run(stock_python, engine, "muon", world_size, True)
        adam = run(sys.executable, engine, "adamw", world_size, False)
        ratios.append(fork["seconds"] / stock["seconds"])
        adam_ratios.append(fork["seconds"] / adam["seconds"])
    numel = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * MLP)
    return (f"| {engine} | {world_size} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{statistics.median(adam_ratios):.1f} | {(fork['bytes'] - adam['bytes']) / numel:.3f} | "
            f"{(stock['bytes'] - adam['bytes']) / numel:.3f} | {fork['state_bytes'] / numel:.3f} | "
            f"{stock['state_bytes'] / numel:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name} in benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.worker:
        engine, optimizer, stock, out = arguments.worker
        worker(engine, optimizer, bool(int(stock)), out)
        return
    from stock import python_of
    stock_python = str(python_of(STOCK))
    lines = [
        f"{LAYERS} layers, {WIDTH} wide; {platform.machine()}, {os.cpu_count()} cores; "
        f"{arguments.rounds} alternating runs of {STEPS} steps, one thread a rank. Bytes are per element of a matrix.",
        "", "| engine | ranks | backward + step, fork/stock | fork/AdamW | bytes beyond AdamW, fork | stock "
        "| state bytes, fork | stock |", "|---|---|---|---|---|---|---|---|"
    ]
    print("\n".join(lines), flush=True)
    for world_size in arguments.world_sizes:
        for engine in arguments.engines:
            lines.append(compare(engine, world_size, arguments.rounds, stock_python))
            print(lines[-1], flush=True)
    if arguments.write:
        RESULTS.write_text("# Engines: this fork against stock DeepSpeed 0.19.8\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
