# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Speed of the Newton-Schulz kernels on this CPU, as medians of alternating runs.

    OMP_NUM_THREADS=2 python benchmarks/newton_schulz_speed.py --write    # benchmarks/results/newton_schulz_speed.md

Batched against a Python loop over the same matrices, Gram against standard, achieved against the machine's own rate of
matrix products, and the rest of an optimizer step against the iteration. bf16 only where the CPU has instructions for
it: elsewhere a product takes 60 times as long as in fp32, and the optimizer does not use it. Kernels for GPUs are in
gpu.py.
"""

import argparse
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Callable, Sequence
from unittest import mock

import torch

from deepspeed.runtime.zero.muon import newton_schulz
from deepspeed.runtime.zero.muon.coefficients import flops, resolve
from deepspeed.runtime.zero.muon.exchange import Exchange
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import matrices_of
from deepspeed.runtime.zero.muon.newton_schulz import cpu_multiplies_fast, iterate, normalize
from deepspeed.runtime.zero.muon.pack import Workspace
from deepspeed.runtime.zero.muon.plan import build_plan, rank_plan
from deepspeed.runtime.zero.muon.step import Kernel, MuonStep, Partition

RESULTS = Path(__file__).parent / "results" / "newton_schulz_speed.md"
JORDAN5 = resolve("jordan", 5)
KERNELS = [("gram", torch.float32), ("standard", torch.float32)]
KERNELS += [("standard", torch.bfloat16)] if cpu_multiplies_fast(torch.bfloat16) else []


def medians(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each of `runs`, which alternate so that a busy machine slows all of them."""
    seconds: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(rounds):
        for run, found in zip(runs, seconds):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in seconds]


def batch_table(rounds: int) -> list[str]:
    lines = ["| matrices | method, dtype | loop, ms | batched, ms | loop / batched |", "|---|---|---|---|---|"]
    for count, m, n in ((48, 64, 256), (64, 32, 32), (12, 256, 256)):
        for method, dtype in KERNELS:
            x = normalize(torch.randn(count, m, n)).to(dtype)

            def batched() -> None:
                iterate(x, method=method, triples=JORDAN5)

            def loop() -> None:
                for index in range(count):
                    iterate(x[index:index + 1], method=method, triples=JORDAN5)

            together, alone = medians([batched, loop], rounds)
            lines.append(
                f"| {count} x {m}x{n} | {method}, {str(dtype)[6:]} | {alone * 1e3:.1f} | {together * 1e3:.1f} | "
                f"{alone / together:.2f} |")
    return lines


def rate_table(rounds: int) -> list[str]:
    lines = [
        "| shape | dtype | product, GFLOP/s | standard, share of it | Gram, share of it | standard / Gram, time |"
    ]
    lines.append("|---" * 6 + "|")
    for m, n in ((256, 1024), (512, 512), (512, 2048), (768, 3072)):
        for dtype in sorted({dtype for _, dtype in KERNELS}, key=str, reverse=True):
            x, square = (normalize(torch.randn(1, m, size)).to(dtype) for size in (n, m))
            gram = "gram" if dtype == torch.float32 else "standard"
            base, standard, shorter = medians([
                lambda: torch.bmm(square, x),
                lambda: iterate(x, method="standard", triples=JORDAN5),
                lambda: iterate(x, method=gram, triples=JORDAN5),
            ], rounds)
            rate, work = 2 * m * m * n / base, flops(m, n, "standard", 5)
            cells = ["", ""]
            if gram == "gram":
                cells = [f"{flops(m, n, 'gram', 5) / shorter / rate:.2f}", f"{standard / shorter:.2f}"]
            lines.append(f"| {m}x{n} | {str(dtype)[6:]} | {rate / 1e9:.0f} | {work / standard / rate:.2f} | "
                         f"{cells[0]} | {cells[1]} |")
    return lines


def step_of(count: int, m: int, n: int, method: str, dtype: torch.dtype) -> Callable[[], None]:
    """A step of the optimizer's core on `count` matrices in one flat partition, on one rank."""
    matrices = [matrices_of(f"m{index}", (m, n))[0] for index in range(count)]
    layout = GroupLayout.flat(matrices=matrices,
                              flat_offsets=[index * m * n for index in range(count)],
                              world_size=1,
                              partition_numel=count * m * n)
    plan = build_plan([layout], costs=[1] * count, itemsize=dtype.itemsize, round_numel=layout.partition_numel)
    step = MuonStep(rank_plan(plan, 0), Kernel(method, JORDAN5, dtype), Exchange(None), Workspace(torch.device("cpu")))
    weight, grad, momentum = (torch.randn(layout.partition_numel) for _ in range(3))
    partition = Partition(weight, grad, momentum, 0.02, 0.1, 0.95, True, "original")
    return lambda: step.run([partition])


def rest_table(rounds: int) -> list[str]:
    """A step with the iteration replaced by nothing, and its share of both."""
    lines = ["| matrices | method | iteration, ms | rest, ms | rest / step |", "|---|---|---|---|---|"]
    count, m, n = 8, 256, 1024
    for method, dtype in KERNELS:
        batch = normalize(torch.randn(count, m, n)).to(dtype)
        step = step_of(count, m, n, method, dtype)

        def rest() -> None:
            with mock.patch.object(newton_schulz, "iterate_together",
                                   lambda xs, *args, **options: [x.clone() for x in xs]):
                step()

        iteration, other = medians([lambda: iterate(batch, method=method, triples=JORDAN5), rest], rounds)
        lines.append(f"| {count} x {m}x{n} | {method}, {str(dtype)[6:]} | {iteration * 1e3:.1f} | {other * 1e3:.1f} | "
                     f"{other / (other + iteration):.0%} |")
    return lines


def report(rounds: int) -> str:
    parts = [
        "# Speed of the Newton-Schulz kernels on a CPU", "",
        "Written by `python benchmarks/newton_schulz_speed.py --write`: "
        f"torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} CPUs, "
        f"medians of {rounds} alternating runs, five steps.", "", "## A batch against a loop", "",
        *batch_table(rounds), "", "## Against the machine's own products", "",
        "Gram runs the standard iteration on 512x512, where it would cost more.", "", *rate_table(rounds), "",
        "## The rest of a step", "", "Momentum, blend (twice), norms, division, cast, copies and weight step.", "",
        *rest_table(rounds)
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each measurement")
    parser.add_argument("--write", action="store_true", help=f"also write benchmarks/results/{RESULTS.name}")
    arguments = parser.parse_args()
    text = report(arguments.rounds)
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
