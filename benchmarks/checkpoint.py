# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What it costs to save and to load a checkpoint of Muon, against AdamW.

    python benchmarks/checkpoint.py [--engines zero1 zero3 ...] [--ranks 2] [--rounds 3]

The model of engines.py. Seconds are medians of the slowest rank; bytes are those of the files of optimizer states over
all ranks, per element of the model; `peak` is how much the process grows while it saves and loads, in bytes per
element of the model.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict

from engines import ENGINES, WIDTH, ds_config, make_model


def worker(engine_name: str, optimizer: str, rounds: int, folder: str) -> None:
    """One rank: train a step, save and load `rounds` times, and write the figures to `<folder>/figures.json`."""
    import deepspeed
    import deepspeed.comm as dist
    import torch
    deepspeed.init_distributed()

    def make() -> Any:
        model = make_model()
        return deepspeed.initialize(model=model,
                                    model_parameters=model.parameters(),
                                    config=ds_config(engine_name, optimizer, False))[0]

    def seconds(action: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        action()
        longest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    engine = make()
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in engine.module.parameters())
    loss = engine(torch.randn(4, 16, WIDTH, dtype=next(engine.module.parameters()).dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    saves = [seconds(lambda: engine.save_checkpoint(folder, tag=f"save{index}")) for index in range(rounds)]
    engine.destroy()
    loads = []
    for index in range(rounds):
        engine = make()  # ZeRO-3 loads into a new engine only
        loads.append(seconds(lambda: engine.load_checkpoint(folder, tag=f"save{index}")))
        engine.destroy()
    peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    dist.barrier()
    if dist.get_rank() == 0:
        states = sum(path.stat().st_size for path in Path(folder, "save0").glob("*optim_states.pt"))
        weights = sum(path.stat().st_size for path in Path(folder, "save0").glob("*model_states.pt"))
        Path(folder, "figures.json").write_text(
            json.dumps(
                dict(save=statistics.median(saves),
                     load=statistics.median(loads),
                     bytes=(states or weights) / numel,
                     peak=float(peak) * 1024 / numel)))
    dist.barrier()
    os._exit(0)  # the end of a process with gloo can abort


def run(engine: str, optimizer: str, ranks: int, rounds: int) -> Dict[str, float]:
    """The figures of ranks of their own. Raises RuntimeError with their output where they fail."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(ranks), __file__, "--worker", engine, optimizer, folder, "--rounds",
            str(rounds)
        ]
        settings = dict(os.environ, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600)
        figures = Path(folder, "figures.json")
        if not figures.exists():
            raise RuntimeError(f"{engine} {optimizer}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads(figures.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.worker:
        engine, optimizer, folder = arguments.worker
        worker(engine, optimizer, arguments.rounds, folder)
    print("| engine | save s, Muon | AdamW | load s, Muon | AdamW | bytes, Muon | AdamW | peak, Muon | AdamW |")
    print("|---|---|---|---|---|---|---|---|---|")
    for engine in arguments.engines:
        muon, adam = (run(engine, optimizer, arguments.ranks, arguments.rounds) for optimizer in ("muon", "adamw"))
        print(
            f"| {engine} | {muon['save']:.3f} | {adam['save']:.3f} | {muon['load']:.3f} | {adam['load']:.3f} | "
            f"{muon['bytes']:.2f} | {adam['bytes']:.2f} | {muon['peak']:.1f} | {adam['peak']:.1f} |",
            flush=True)


if __name__ == "__main__":
    main()
