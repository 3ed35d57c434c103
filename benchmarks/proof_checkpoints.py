# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Proves that checkpoints which released DeepSpeed writes with Muon load here, and that training goes on with their
momentum.

    python benchmarks/proof_checkpoints.py [VERSION ...]

Each release writes its checkpoints in an environment of its own (see stock.py). Here each momentum is compared with
the one that the known gradients give, and the steps after the load with those of the float64 reference from that
point. Exits with 1 where one does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("0.19.6", "0.19.7", "0.19.8")
RANKS = (1, 2, 3)
SAVED_AFTER, STEPS = 3, 5
ONE_MATRIX = "layers.0.weight"


class Case(NamedTuple):
    """An engine of contract.py as stock trains with it, and what its momentum may differ by for its dtype there.

    `mixed`: on all matrices of the contract, else on one, which all releases get right.
    """
    engine: str
    dtype: str
    rounding: float
    sections: Dict[str, Any] = {}
    mixed: bool = True

    @property
    def shapes(self) -> Dict[str, Tuple[int, ...]]:
        from unit.v1.ops.muon.contract import SHAPES
        return SHAPES if self.mixed else {name: SHAPES[name] for name in (ONE_MATRIX, *saving().OTHERS)}


# Stock's ZeRO-3 refuses to scatter gradients.
_NO_SCATTER = {"zero_optimization": {"reduce_scatter": False}}
_DYNAMIC = {"fp16": {"loss_scale": 0, "initial_scale_power": 6}}
CASES = {
    "stage0-fp32": Case("stage0", "fp32", 1e-6),
    "stage0-bf16": Case("stage0", "bf16", 1e-6),
    "bf16_optimizer": Case("bf16_optimizer", "bf16", 1e-6),
    "zero1-fp32": Case("zero1", "fp32", 1e-6),
    "zero1-bf16": Case("zero1", "bf16", 1e-2),
    "zero2-fp32": Case("zero2", "fp32", 1e-6),
    "zero2-fp32-round-robin": Case("zero2", "fp32", 1e-6, {"zero_optimization": {
        "round_robin_gradients": True
    }}),
    "zero2-bf16": Case("zero2", "bf16", 1e-2),
    "zero2-fp16": Case("zero2", "fp16", 2e-3),
    "zero2-fp16-dynamic": Case("zero2", "fp16", 2e-3, _DYNAMIC),
    "zero2_offload-fp32": Case("zero2_offload", "fp32", 1e-6),
    "zero2_offload-fp16": Case("zero2_offload", "fp16", 1e-6),
    "zero3-fp32": Case("zero3", "fp32", 1e-6, _NO_SCATTER),
    "zero3-bf16": Case("zero3", "bf16", 1e-2, _NO_SCATTER),
    "zero3-fp16": Case("zero3", "fp16", 2e-3, _NO_SCATTER),
    "zero3_offload-bf16": Case("zero3_offload", "bf16", 1e-2, _NO_SCATTER),
}

CASES.update({
    f"{name}-one-matrix": case._replace(mixed=False)
    for name, case in CASES.items() if case.engine in ("zero1", "zero2", "zero3") and name.count("-") == 1
})

# What a release must have written with momentum; the others refuse some engines, or keep no momentum there.
MUST = {
    "0.19.6": {name
               for name, case in CASES.items() if case.engine in ("zero1", "zero2") or not case.mixed},
    "0.19.7": {name
               for name, case in CASES.items() if case.engine == "stage0" or not case.mixed},
    "0.19.8": set(CASES),
}


def saving() -> Any:
    """The tests' module of that name, which is not importable before the path is set."""
    from unit.v1.ops.muon import saving as module
    return module


def made(case: Case) -> Any:
    """Its engine, without a clip: there stock clips updates."""
    return saving().made(case.engine, case.dtype, case.shapes, gradient_clipping=0.0, **case.sections)


def write(folder: str) -> None:
    """Train each case on these ranks and save it to `<folder>/<case>`.

    `<folder>/<case>.json` says whether it was saved, whether there is momentum in it, and why not.
    """
    import deepspeed.comm as dist
    from unit.v1.ops.muon import contract
    for name, case in CASES.items():
        found = {"saved": False, "momentum": False, "reason": ""}
        try:
            with contract.fp16_accepted():
                engine = made(case)
                saving().train(engine, range(SAVED_AFTER), case.shapes)
                engine.save_checkpoint(os.path.join(folder, name), tag="saved")
            found.update(saved=True, momentum=bool(contract.momentum_shards(engine)))
            engine.destroy()
        except Exception as error:  # what a release refuses, it refuses on all ranks
            found["reason"] = f"{type(error).__name__}: {error}".split(". ")[0]
        if dist.get_rank() == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(found))


def read(folder: str, version: str) -> bool:
    """Load each case on these ranks and go on. Prints a row for each on rank 0; returns whether all hold."""
    import deepspeed.comm as dist
    good = True
    for name, case in CASES.items():
        written = json.loads(Path(folder, f"{name}.json").read_text())
        if not written["momentum"]:
            holds = name not in MUST[version]
            found = "saved without momentum" if written["saved"] else f"not saved: {written['reason']}"
        elif version == "0.19.7" and case.mixed and case.engine in ("zero1", "zero2"):
            holds, found = True, "that release keeps the momentum of one matrix of each partition; see one-matrix"
        else:
            holds, found = _judge(os.path.join(folder, name), case)
        good = good and holds
        if dist.get_rank() == 0:
            print(f"  {name:24} {dist.get_world_size()} ranks   {found}{'' if holds else '   DOES NOT HOLD'}",
                  flush=True)
    return good


def _judge(folder: str, case: Case) -> Tuple[bool, str]:
    try:
        momentum, weights = _load_and_go_on(folder, case)
    except Exception as error:  # one case that fails must not hide the others
        return False, f"{type(error).__name__}: {error}"
    found = f"momentum {momentum:.1e} (< {case.rounding:.0e})   steps after it {weights:.1e} (< 2e-05)"
    return momentum < case.rounding and weights < 2e-5, found


def _load_and_go_on(folder: str, case: Case) -> Tuple[float, float]:
    """How far the loaded momenta are from the known ones, and the steps after the load from the reference's."""
    from unit.v1.ops.muon import contract
    gradients, muon = saving().SteadyGradients(case.shapes, 1), contract.muon_names(case.shapes)
    known = contract.Reference(dict(contract.ProductModel(case.shapes).named_parameters()), muon)
    for step in range(SAVED_AFTER):
        known.step(gradients.mean(step))
    with contract.fp16_accepted():
        engine = made(case)
        engine.load_checkpoint(folder)
        loaded = contract.momenta(engine, muon)
        distance = contract.largest_distance(loaded, known.momenta)
        start = contract.master_weights(engine)
        reference = contract.Reference(start, muon)
        reference.oracle.momenta = [momentum.double().clone() for momentum in loaded.values()]
        saving().train(engine, range(SAVED_AFTER, STEPS), case.shapes)
        for step in range(SAVED_AFTER, STEPS):
            reference.step(gradients.mean(step))
        weights = contract.master_weights(engine, muon)
        expected = {name: reference.weights[name] for name in muon}
        engine.destroy()
    return distance, contract.largest_distance(weights, expected, start)


def _on_ranks(python: str, role: str, folder: str, version: str, ranks: int, **environment: str) -> bool:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    settings = dict(os.environ, DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1", **environment)
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    output = None if role == "read" else subprocess.PIPE
    done = subprocess.run([*command, "--role", role, "--folder", folder, version],
                          env=settings,
                          stdout=output,
                          cwd=folder,
                          stderr=subprocess.PIPE,
                          text=True)
    if done.returncode and role == "write":
        raise RuntimeError(f"writing in {python} failed:\n{done.stderr[-4000:]}")
    return done.returncode == 0


def prove(versions: List[str]) -> bool:
    """Write and read the checkpoints of each release on each number of ranks. True where all of them hold."""
    from stock import python_of
    good = True
    for version in versions:
        print(f"checkpoints of deepspeed {version}", flush=True)
        python = str(python_of(version))
        for ranks in RANKS:
            with tempfile.TemporaryDirectory() as folder:
                # Kernels that one release compiles at first use would take the place of another's.
                kernels = str(Path(python).parent.parent / "torch_extensions")
                _on_ranks(python, "write", folder, version, ranks, TORCH_EXTENSIONS_DIR=kernels)
                good = _on_ranks(sys.executable, "read", folder, version, ranks) and good
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--role", choices=["write", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is None:
        sys.exit(0 if prove(list(arguments.versions)) else 1)
    import logging

    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    good = True
    if arguments.role == "write":
        write(arguments.folder)
    else:
        good = read(arguments.folder, *arguments.versions)
    dist.barrier()
    sys.stdout.flush()
    # Not sys.exit: the end of a process with gloo and released DeepSpeed can abort.
    os._exit(0 if good else 1)


if __name__ == "__main__":
    main()
