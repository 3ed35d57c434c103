# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Time of a step and bytes of the engines: this fork against stock DeepSpeed 0.19.8 and against AdamW.

    python benchmarks/engines.py [--tables engines scaling first] [--world-sizes 2 4] [--engines zero1 zero3 ...]
                                 [--rounds 5] [--write]

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
from typing import Iterator

from figures import spread

LAYERS, WIDTH, MLP = 6, 256, 1024
WARMUP, STEPS = 2, 6
STOCK = "0.19.8"
RESULTS = Path(__file__).resolve().parent / "results" / "engines.md"
# With torch.compile on, stock's first step takes from one to many minutes on CPUs.
TIMEOUT_SECONDS = 900
NOTES = """
The time holds the backward pass, which both sides share and which is small here, since stock ZeRO-1 and 2
orthogonalize at its end. "Beyond AdamW's" is what is left of it on both sides without the time of AdamW in the same
engine: the price of Muon. Ratios are of runs that follow one another: median (least to most). Newton-Schulz is the
same on both sides, gram in fp32, and not compiled but in the table of first steps.

Scaling is of the fork's ZeRO-3. CPU time is of all threads of a rank in `engine.step()`, without what it waits: on
fewer cores than ranks the clock tells nothing of the work of one. Strong: one model on more ranks. Weak: as much model
a rank.
"""

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


def make_model(layers: int):
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
    return torch.nn.Sequential(*(Block() for _ in range(layers)), torch.nn.LayerNorm(WIDTH))


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


def worker(engine_name: str, optimizer: str, stock: bool, layers: int, out: str) -> None:
    """One rank of one run: median time of backward pass and step, CPU time of the busiest rank in the step, bytes of
    an iteration, bytes of state, time of the first step."""
    import torch
    import deepspeed
    import deepspeed.comm as dist
    deepspeed.init_distributed()
    counter = ReceivedBytes(dist.get_world_size())
    model = make_model(layers)
    dtype = torch.bfloat16 if ENGINES[engine_name].get("bf16") else torch.float32
    engine, _, _, _ = deepspeed.initialize(model=model,
                                           model_parameters=model.parameters(),
                                           config=ds_config(engine_name, optimizer, stock))
    times, busy, received = [], [], []
    for step in range(WARMUP + STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        before = counter.total
        loss = engine(torch.randn(4, 16, WIDTH, dtype=dtype)).float().square().mean()
        dist.barrier()
        # With the backward pass, which is small here, because stock ZeRO-1 and 2 orthogonalize at its end.
        start = time.perf_counter()
        engine.backward(loss)
        # Of all threads, without what it waits: on fewer cores than ranks, time tells nothing of one rank's work.
        started = time.process_time()
        engine.step()
        busy.append(time.process_time() - started)
        times.append(time.perf_counter() - start)
        received.append(counter.total - before)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = sum(value.numel() * value.element_size() for state in base.state.values() for value in state.values()
                if torch.is_tensor(value))
    busiest = torch.tensor([statistics.median(busy[WARMUP:])])
    dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        found = dict(seconds=statistics.median(times[WARMUP:]), busy=busiest.item(), first=times[0])
        Path(out).write_text(json.dumps(dict(found, bytes=received[-1], state_bytes=state)))
    dist.barrier()
    # The end of a Python with gloo and released DeepSpeed can abort.
    os._exit(0)


def run(python: str,
        engine: str,
        optimizer: str,
        world_size: int,
        stock: bool = False,
        layers: int = LAYERS,
        compile: bool = False) -> dict:
    """One run in a process group of its own; its figures. Raises RuntimeError with the output where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "figures.json")
        env = {
            **os.environ, "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": str(int(not compile)),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "compiled"),
            "TORCH_EXTENSIONS_DIR": str(Path(python).parent.parent / "torch_extensions"),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}"
        }
        env.pop("PYTHONPATH", None)
        command = [
            python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(world_size), __file__, "--worker", engine, optimizer,
            str(int(stock)),
            str(layers), out
        ]
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=folder)
        if found.returncode or not os.path.exists(out):
            raise RuntimeError(f"{engine} {optimizer} W={world_size} stock={stock}:\n{found.stdout}{found.stderr}")
        return json.loads(Path(out).read_text())


def compare(engine: str, world_size: int, rounds: int, stock_python: str) -> str:
    """A line of the table."""
    ratios, beyond, adam_ratios = [], [], []
    for _ in range(rounds):
        fork = run(sys.executable, engine, "muon", world_size)
        stock = run(stock_python, engine, "muon", world_size, stock=True)
        adam = run(sys.executable, engine, "adamw", world_size)
        ratios.append(fork["seconds"] / stock["seconds"])
        beyond.append((fork["seconds"] - adam["seconds"]) / (stock["seconds"] - adam["seconds"]))
        adam_ratios.append(fork["seconds"] / adam["seconds"])
    numel = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * MLP)
    return (f"| {engine} | {world_size} | {spread(ratios)} | {spread(beyond)} | "
            f"{statistics.median(adam_ratios):.1f} | {(fork['bytes'] - adam['bytes']) / numel:.3f} | "
            f"{(stock['bytes'] - adam['bytes']) / numel:.3f} | {fork['state_bytes'] / numel:.3f} | "
            f"{stock['state_bytes'] / numel:.3f} |")


def engines_table(arguments: argparse.Namespace, stock_python: str) -> Iterator[str]:
    yield (
        "| engine | ranks | backward + step, fork/stock | the same beyond AdamW's | fork/AdamW | bytes beyond AdamW, "
        "fork | bytes beyond AdamW, stock | state bytes, fork | state bytes, stock |")
    yield "|---" * 9 + "|"
    for world_size in arguments.world_sizes:
        for engine in arguments.engines:
            yield compare(engine, world_size, arguments.rounds, stock_python)


def scaling_table(arguments: argparse.Namespace, stock_python: str) -> Iterator[str]:
    """What a step of the fork's ZeRO-3 costs the busiest rank: one model on more ranks, and as much model a rank."""
    yield "| scaling | ranks | layers | CPU time of the step, busiest rank, ms | beyond AdamW, ms | bytes a rank, MB |"
    yield "|---" * 6 + "|"
    for kind, layers_on in (("strong", lambda world_size: 4), ("weak", lambda world_size: 2 * world_size)):
        for world_size in (1, 2, 4):
            layers = layers_on(world_size)
            found: dict = {"muon": [], "adamw": []}
            for _ in range(arguments.rounds):
                for optimizer, runs in found.items():
                    runs.append(run(sys.executable, "zero3", optimizer, world_size, layers=layers))
            busy, adam = ([1e3 * figures["busy"] for figures in found[name]] for name in ("muon", "adamw"))
            more = [mine - other for mine, other in zip(busy, adam)]
            sent = (found["muon"][0]["bytes"] - found["adamw"][0]["bytes"]) / 1e6
            yield (
                f"| {kind} | {world_size} | {layers} | {statistics.median(busy):.0f} | {statistics.median(more):.0f} "
                f"({min(more):.0f} to {max(more):.0f}) | {sent:.2f} |")


def first_table(arguments: argparse.Namespace, stock_python: str) -> Iterator[str]:
    """The first iteration with torch.compile as each has it by default: stock compiles on CPUs, the fork does not."""
    yield "| engine | ranks | first backward + step, fork, s | stock, s | fork/stock |"
    yield "|---" * 5 + "|"
    for engine in ("zero1", "zero3"):
        fork = run(sys.executable, engine, "muon", 2, compile=True)["first"]
        stock = run(stock_python, engine, "muon", 2, stock=True, compile=True)["first"]
        yield f"| {engine} | 2 | {fork:.2f} | {stock:.1f} | {fork / stock:.3f} |"


TABLES = {"engines": engines_table, "scaling": scaling_table, "first": first_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name} in benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.worker:
        engine, optimizer, stock, layers, out = arguments.worker
        worker(engine, optimizer, bool(int(stock)), int(layers), out)
        return
    from stock import python_of
    stock_python = str(python_of(STOCK))
    lines = [
        f"{LAYERS} layers, {WIDTH} wide; {platform.machine()}, {os.cpu_count()} cores; "
        f"{arguments.rounds} alternating runs of {STEPS} steps, one thread a rank. Bytes are per element of a matrix."
    ]
    print(lines[0], flush=True)
    for name in arguments.tables:
        lines.append("")
        for line in TABLES[name](arguments, stock_python):
            lines.append(line)
            print(line, flush=True)
        if arguments.write:
            RESULTS.write_text("# Engines: this fork against stock DeepSpeed 0.19.8\n\n" + "\n".join(lines) + "\n" +
                               NOTES)


if __name__ == "__main__":
    main()
