# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The optimizer step alone: this fork's ZeRO-3 Muon against muon-fsdp2 and dtensor-muon, two packages for FSDP2.

    python benchmarks/others.py [--world-sizes 2 4] [--models 6x256 4x512] [--rounds 5] [--as-they-come] [--write]
    python benchmarks/others.py --smoke          # this fork alone, tiny: shows that it runs

All contenders live in the same processes and take turns, so that a ratio is of neighbours in time. They step the same
matrices, cut in the same places, with gradients of the same data. Counts come from a step that is not timed, in which
every collective and every product of matrices is seen by torch's dispatcher, whoever calls it. `others_worker.py` is a
rank.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import spread
from others_worker import ADAM, CONTENDERS, FORK, OTHERS, STANDARD

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).resolve().with_name("others_worker.py")
PACKAGES = {"muon-fsdp2": "0.3.0", "dtensor-muon": "0.1.0"}
RESULTS = ROOT / "benchmarks" / "results" / "others.md"


def packages_folder() -> Path:
    """build/others, a folder for PYTHONPATH with the two packages and nothing else; made when first asked for."""
    folder = ROOT / "build" / "others"
    done = folder / ".complete"
    if not done.exists():
        print(f"installing {PACKAGES} in {folder}", file=sys.stderr)
        pins = [f"{name}=={version}" for name, version in PACKAGES.items()]
        # Without their requirements, torch and triton, which this environment has.
        subprocess.run([
            sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--upgrade",
            "--target",
            str(folder), *pins
        ],
                       check=True)
        done.touch()
    return folder


def run(model: str, world_size: int, rounds: int, names: list[str], bf16: bool = False) -> dict[str, Any]:
    """One run in a process group of its own; its figures. Raises RuntimeError with the output where it fails."""
    layers, width = model.split("x")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "figures.json")
        # Without torch.compile: ranks that compile at the same time load one another's half-written libraries.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
        if any(name in OTHERS for name in names):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(packages_folder())]))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(world_size),
            str(WORKER), layers, width,
            str(rounds), ";".join(names), out,
            str(int(bf16))
        ]
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=folder)
        if found.returncode or not os.path.exists(out):
            raise RuntimeError(f"{model} W={world_size} bf16={bf16}:\n{found.stdout}{found.stderr}")
        return json.loads(Path(out).read_text())


def table(model: str, world_size: int, found: dict[str, Any], dtype: str) -> list[str]:
    """A line for each contender."""
    layers, width = map(int, model.split("x"))
    numel = 12 * layers * width * width
    lines = []
    for name, one in found.items():
        fork = found[FORK]["seconds"]
        ratio = spread([ours / theirs for ours, theirs in zip(fork, one["seconds"])]) if name != FORK else "1"
        adam = found.get(ADAM[name.split()[0]])
        is_adam = name in ADAM.values()
        # The fork asks the CPU, and here it is told.
        own_dtype = "" if is_adam else "fp32" if name == FORK else dtype
        beyond = ""
        if adam and not is_adam:
            beyond = f"{1e3 * statistics.median(a - b for a, b in zip(one['seconds'], adam['seconds'])):.0f}"
        counts = one["counts"]
        done = [count["orthogonalized"] for count in counts]
        counted = (f"{max(count['received'] for count in counts) / numel:.3f} | {max(done)} of {sum(done)} | "
                   f"{max(count['flops'] for count in counts) / 1e9:.2f}") if counts else " | |"
        differs = "" if is_adam else f"{one['differs']:.0e}"
        lines.append(f"| {model} | {world_size} | {name} | {own_dtype} | "
                     f"{1e3 * statistics.median(one['seconds']):.0f} | {ratio} | {beyond} | {counted} | {differs} |")
    return lines


HEADER = [
    "| model | ranks | contender | dtype | step, ms | fork's step / this one's | beyond AdamW, ms | bytes received "
    "| orthogonalized | GFLOP | update differs |", "|---|---|---|---|---|---|---|---|---|---|---|"
]

NOTES = """
A step is timed on its own, the slowest rank of it, after a backward pass of the same data in each contender; per round
each contender has one turn, and a ratio is of two steps of one round: median (least to most). "Beyond AdamW" is the
median difference to a step of AdamW in the same engine. Bytes are those that the busiest rank receives in the step,
per element of all matrices: what the contender's collectives need at least, not what gloo makes of them.
"Orthogonalized" is the matrices that the busiest rank orthogonalizes, of the sum over all ranks; GFLOP is of its
products of matrices. "Update differs" is the largest relative distance of a matrix's first update from that of
ZeRO-3's standard iteration: all compute the same update.

What is equal: the matrices (six a block and nothing else), their cut into W parts by rows, the data, fp32 weights,
gradients and momentum, five steps of the coefficients 3.4445, -4.7750, 2.0315 with Nesterov momentum 0.95, no weight
decay, one thread a rank, gloo.

What is not:

- dtype. Both packages always cast to bf16 for the iteration, which CPUs without instructions for it multiply 60 times
  slower than fp32. In the rows marked fp32 the benchmark replaces that cast, `torch.Tensor.bfloat16`, by one to fp32,
  which also makes MuonForeach send 4 bytes where it sends 2. muon-fsdp2 sends fp32 as it comes, the fork the dtype of
  its iteration. In the rows marked bf16, which are the last, nothing is replaced, and the fork's standard iteration
  runs in bf16 as well, as it does by default where the CPU has the instructions.
- dtensor-muon cannot step on a CPU as it comes. `Muon` always calls a Triton kernel, which asserts a CUDA tensor, and
  `MuonForeach` also moves every batch to the device `cuda`. The benchmark chooses the torch loop that the package has
  for `use_triton=False`, which its optimizers never pass, and turns the move into nothing. Its symmetric Triton
  kernel, which saves products on a GPU, is therefore not measured.
- `MuonForeach` asks DTensor for an all-to-all. On a CPU group DTensor makes an all-gather of it, and those bytes are
  what is counted here; on a GPU they would be 1/W of them.
- `Muon` of dtensor-muon gathers every matrix on every rank and orthogonalizes it there.
- iteration. The packages run the standard one, as the row "standard" of the fork does. The row "gram" is the fork's
  default. Both packages compile their loops with torch.compile, which is off here for all: their
  products are the same, the elementwise work between them is not fused.
- what else a step does. `engine.step()` of ZeRO-3 also looks for overflow, takes the gradient norm, sets gradients to
  zero and copies the weights to the parameters; `optimizer.step()` beside FSDP2 does none of that. ZeRO-3 keeps no
  parameter whole (`stage3_param_persistence_threshold` 0), as FSDP2 keeps none.
"""


def write(lines: list[str]) -> None:
    RESULTS.write_text("# ZeRO-3 Muon against other packages\n\n" + "\n".join(lines) + "\n" + NOTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["6x256", "4x512"], help="blocks x width")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as-they-come", action="store_true", help="also muon-fsdp2 in its own bf16")
    parser.add_argument("--smoke", action="store_true", help="this fork alone, one block of 32, two ranks")
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name} in benchmarks/results/")
    arguments = parser.parse_args()
    runs = [(model, world_size, list(CONTENDERS)) for model in arguments.models
            for world_size in arguments.world_sizes]
    if arguments.smoke:
        runs = [("1x32", 2, [FORK, STANDARD, ADAM["ZeRO-3"]])]
    packages = ", ".join(f"{name} {version}" for name, version in PACKAGES.items())
    lines = [f"{machine()}; {packages}. `python benchmarks/others.py {' '.join(sys.argv[1:])}`", "", *HEADER]
    print("\n".join(lines), flush=True)

    loads = []

    def add(model: str, ranks: int, names: list[str], rounds: int, bf16: bool = False) -> None:
        loads.append(f"{os.getloadavg()[0]:.1f}")
        found = run(model, ranks, rounds, names, bf16)
        more = table(model, ranks, found, "bf16" if bf16 else "fp32")
        lines.extend(more)
        print("\n".join(more), flush=True)
        if arguments.write:
            # After each run, so that what was measured is there when a later one fails.
            write([*lines, "", f"Load of the machine (1 minute) before each run: {', '.join(loads)}."])

    for model, ranks, names in runs:
        add(model, ranks, names, arguments.rounds)
    if arguments.as_they_come:
        from deepspeed.runtime.zero.muon.newton_schulz import cpu_multiplies_fast
        import torch
        names = [FORK, STANDARD, OTHERS[0], ADAM["ZeRO-3"], ADAM["FSDP2"]]
        if cpu_multiplies_fast(torch.bfloat16):
            add(arguments.models[0], 2, names, arguments.rounds, bf16=True)
        else:
            # A single block and one step, since it takes seconds.
            add(f"1x{arguments.models[0].split('x')[1]}", 2, names, 1, bf16=True)


def machine() -> str:
    import torch
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


if __name__ == "__main__":
    main()
