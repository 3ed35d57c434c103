# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Speed of the Newton-Schulz kernels on this CPU, as medians of alternating runs.

    OMP_NUM_THREADS=2 python benchmarks/newton_schulz_speed.py --write    # benchmarks/results/newton_schulz_speed.md

Batched against a Python loop over the same matrices, Gram against standard, achieved against the machine's own rate of
matrix products, and the elementwise rest of a step against the iteration.
"""

import argparse
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Callable, Sequence

import torch

from deepspeed.runtime.zero.muon.coefficients import flops, resolve
from deepspeed.runtime.zero.muon.newton_schulz import iterate, normalize
from deepspeed.runtime.zero.muon.update import advance_momentum_, blend, squared_norms, step_weights_

RESULTS = Path(__file__).parent / "results" / "newton_schulz_speed.md"
JORDAN5 = resolve("jordan", 5)


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
        for method, dtype in (("gram", torch.float32), ("standard", torch.float32), ("standard", torch.bfloat16)):
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
        x = normalize(torch.randn(1, m, n))
        square = torch.randn(1, m, m)
        half, half_square = x.bfloat16(), square.bfloat16()
        product, half_product, standard, half_standard, gram = medians([
            lambda: torch.bmm(square, x), lambda: torch.bmm(half_square, half),
            lambda: iterate(x, method="standard", triples=JORDAN5),
            lambda: iterate(half, method="standard", triples=JORDAN5),
            lambda: iterate(x, method="gram", triples=JORDAN5)
        ], rounds)
        for dtype, base, run in (("fp32", product, standard), ("bf16", half_product, half_standard)):
            rate, work = 2 * m * m * n / base, flops(m, n, "standard", 5)
            cells = ["", ""]
            if dtype == "fp32":
                cells = [f"{flops(m, n, 'gram', 5) / gram / rate:.2f}", f"{standard / gram:.2f}"]
            lines.append(
                f"| {m}x{n} | {dtype} | {rate / 1e9:.0f} | {work / run / rate:.2f} | {cells[0]} | {cells[1]} |")
    return lines


def rest_table(rounds: int) -> list[str]:
    """The elementwise work of a step, and its share of the step, for 8 matrices in one flat slice each."""
    lines = ["| matrices | method | iteration, ms | rest, ms | rest / step |", "|---|---|---|---|---|"]
    count, m, n = 8, 256, 1024
    grads, momenta, weights = ([torch.randn(m * n) for _ in range(count)] for _ in range(3))
    for method, dtype in (("gram", torch.float32), ("standard", torch.float32), ("standard", torch.bfloat16)):
        batch = torch.empty(count, m, n, dtype=dtype)
        result = batch.clone()

        def rest() -> None:
            advance_momentum_(momenta, grads, beta=0.95)
            norms = squared_norms(blend(momenta, grads, beta=0.95, nesterov=True)).sqrt()
            blended = blend(momenta, grads, beta=0.95, nesterov=True)
            for index, u in enumerate(blended):
                batch[index].view(-1).copy_(normalize(u, norms[index]))
            updates = list(result.view(count, -1))
            step_weights_(weights, updates, [0.02] * count, decay=0.998)

        rest()
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
        "## The elementwise rest", "", "Momentum, blend (twice), norms, division, cast, copy and weight step.", "",
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
