# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Everything about speed that needs a GPU, in one run of a few minutes, as JSON.

    python benchmarks/gpu.py --out gpu.json [--stock TREE] [--budget 280]
    python benchmarks/gpu.py --smoke --out smoke.json        # tiny shapes, any device: shows that it runs

- kernels: the iteration with batched products, Triton's and those of installed libraries, against the floors that the
  machine's own rate of products and of copies sets;
- step: a step of one rank on whole matrices, and what of it is not the iteration;
- engines: `engine.step()` of ZeRO-1, BF16_Optimizer and ZeRO-3 with Muon and AdamW, and with the Muon of the
  DeepSpeed in `--stock` (a folder to put on PYTHONPATH); on one rank, and on two where there are two GPUs.

Times are medians of runs that alternate between what is compared. Work that does not fit the budget is listed as left
out. Nothing is installed, nothing but `--out` is written.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence

BENCHMARKED = (("gram", "float16"), ("standard", "bfloat16"))
ENGINES = ("zero1", "bf16", "zero3")
REQUESTED_STEPS = 8


class Sizes:
    """What is measured: layers of a 7 B model on a GPU, next to nothing in a smoke run."""

    def __init__(self, smoke: bool):
        self.shapes = [(2, 32, 48), (1, 48, 32)] if smoke else [(4, 1024, 4096), (4, 2048, 2048), (2, 4096, 4096),
                                                                (2, 4096, 11008)]
        self.rounds = 2 if smoke else 7
        self.product, self.copy_numel = (64, 10**4) if smoke else (8192, 2**28)
        self.hidden, self.mlp, self.layers = (32, 48, 1) if smoke else (2048, 5504, 6)


def alternate(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each of `runs`, in turns; each runs once before."""
    from deepspeed.accelerator import get_accelerator
    synchronize = get_accelerator().synchronize
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, found in zip(runs, seconds):
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            if number:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in seconds]


def device() -> Any:
    import torch
    from deepspeed.accelerator import get_accelerator
    return torch.device(get_accelerator().current_device_name())


def machine(sizes: Sizes) -> dict[str, Any]:
    """The rates that the floors are made of: products in each dtype, copies, launches."""
    import torch
    found: dict[str, Any] = {"device": str(device()), "torch": torch.__version__}
    if device().type != "cpu":
        found["name"] = torch.get_device_module(device()).get_device_name()
    for _, dtype in BENCHMARKED:
        a = torch.randn(sizes.product, sizes.product, device=device()).to(getattr(torch, dtype))
        [seconds] = alternate([lambda: a @ a], sizes.rounds)
        found[f"{dtype}_flops_per_second"] = 2 * sizes.product**3 / seconds
    a = torch.empty(sizes.copy_numel, device=device())
    b = torch.empty_like(a)
    small = torch.empty(1, device=device())
    copied, launched = alternate([lambda: b.copy_(a), lambda: [small.add_(1) for _ in range(1000)]], sizes.rounds)
    found.update(bytes_per_second=8 * sizes.copy_numel / copied, launch_seconds=launched / 1000)
    return found


def product_bytes(m: int, n: int, gram: bool, steps: int, itemsize: int) -> int:
    """Bytes that the products of an iteration read and write at least, each operand and result once."""
    from deepspeed.runtime.zero.muon.coefficients import restart_positions
    if not gram:
        return itemsize * steps * (3 * m * n + 4 * m * m)
    segments = 1 + len(restart_positions(steps))
    return itemsize * (segments * (3 * m * n + 4 * m * m) + (2 * steps + 9 * (steps - segments)) * m * m)


def kernels(sizes: Sizes, rates: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds, share of the floor and error of each implementation on each shape."""
    import torch
    from deepspeed.runtime.zero.muon.coefficients import flops, resolve, uses_gram
    from deepspeed.runtime.zero.muon.kernels import candidates
    from deepspeed.runtime.zero.muon.newton_schulz import iterate, normalize
    triples = resolve("jordan", 5)
    found = []
    for method, dtype in BENCHMARKED:
        for count, m, n in sizes.shapes:
            exact = normalize(torch.randn(count, m, n, device=device()))
            x = exact.to(getattr(torch, dtype))
            expected = iterate(exact, method="standard", triples=triples, compile=False)
            made, refused = {}, []
            for name, make in candidates(device()).items():
                try:
                    made[name] = make()
                    iterate(x, method=method, triples=triples, products=made[name], compile=False)
                except Exception as error:
                    made.pop(name, None)
                    refused.append(f"{name}: {type(error).__name__}: {error}")
            runs = [
                lambda products=products: iterate(x, method=method, triples=triples, products=products, compile=False)
                for products in made.values()
            ]
            for (name, products), run, seconds in zip(made.items(), runs, alternate(runs, sizes.rounds)):
                short, long = sorted((m, n))
                half = products.min_side <= short and name != "batched"
                work = count * flops(m, n, method, 5, symmetric=half)
                traffic = count * product_bytes(short, long, uses_gram(method, m, n), 5, x.element_size())
                floor = max(work / rates[f"{dtype}_flops_per_second"], traffic / rates["bytes_per_second"])
                found.append(
                    dict(kernel=name,
                         method=method,
                         dtype=dtype,
                         shape=[count, m, n],
                         seconds=seconds,
                         floor_seconds=floor,
                         floor_over_seconds=floor / seconds,
                         relative_error=((run().float() - expected).norm() / expected.norm()).item()))
            found.extend(dict(method=method, dtype=dtype, shape=[count, m, n], refused=said) for said in refused)
    return found


def steps(sizes: Sizes) -> list[dict[str, Any]]:
    """The optimizer on whole matrices of one shape and its transpose: a step, and the iteration in it alone."""
    import torch
    from deepspeed.runtime.zero.muon.coefficients import resolve
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    from deepspeed.runtime.zero.muon.newton_schulz import iterate, normalize
    triples = resolve("jordan", 5)
    found = []
    for method, dtype in BENCHMARKED:
        for count, m, n in sizes.shapes:
            params = [torch.nn.Parameter(torch.randn(*size, device=device())) for size in [(m, n), (n, m)] * count]
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer = MuonWithAuxAdam([dict(params=params, use_muon=True, ns_method=method, ns_dtype=dtype)])
            x = normalize(torch.randn(2 * count, m, n, device=device())).to(getattr(torch, dtype))
            step, iteration = alternate([optimizer.step, lambda: iterate(x, method=method, triples=triples)],
                                        sizes.rounds)
            found.append(
                dict(method=method,
                     dtype=dtype,
                     shape=[2 * count, m, n],
                     step_seconds=step,
                     iteration_seconds=iteration,
                     step_over_iteration=step / iteration))
    return found


def ds_config(engine: str, optimizer: str) -> dict[str, Any]:
    """bf16 in all three; gradients accumulated in fp32 make BF16_Optimizer of stage 1."""
    params = dict(lr=1e-3, torch_adam=True)
    params = dict(params, lr=0.02, adam_lr=1e-3) if optimizer != "adamw" else params
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "zero_optimization": {
            "stage": 3 if engine == "zero3" else 1
        },
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW" if optimizer == "adamw" else "Muon",
            "params": params
        },
    }
    if engine == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if engine == "zero3" and optimizer == "stock":
        config["zero_optimization"]["reduce_scatter"] = False
    return config


def model(sizes: Sizes) -> Any:
    import torch
    shapes = [(sizes.hidden, sizes.hidden)] * 4 + [(sizes.hidden, sizes.mlp)] * 2 + [(sizes.mlp, sizes.hidden)]

    class Layer(torch.nn.Module):

        def __init__(self) -> None:
            super().__init__()
            self.linears = torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for a, b in shapes)
            self.norm = torch.nn.LayerNorm(sizes.hidden)

        def forward(self, x: Any) -> Any:
            for index in range(4):
                x = x + self.linears[index](self.norm(x))
            return x + self.linears[6](torch.tanh(self.linears[4](x)) * self.linears[5](x))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(sizes.layers)))


def worker(engine_name: str, optimizer: str, out: str, sizes: Sizes) -> None:
    """One rank of an engine's run; rank 0 writes the median seconds of `engine.step()` and the peak of memory."""
    import torch
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.accelerator import get_accelerator
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    # Or a smoke run would compile DeepSpeed's all-reduce for CPUs, which takes longer than all the rest of it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    network = model(sizes)
    engine, *_ = deepspeed.initialize(model=network,
                                      model_parameters=network.parameters(),
                                      config=ds_config(engine_name, optimizer))
    x = torch.randn(8, sizes.hidden, device=device(), dtype=torch.bfloat16)
    seconds = []
    for _ in range(REQUESTED_STEPS):
        engine.backward(engine(x).float().square().mean())
        get_accelerator().synchronize()
        start = time.perf_counter()
        engine.step()
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        peak = get_accelerator().max_memory_allocated() if device().type != "cpu" else None
        Path(out).write_text(json.dumps(dict(step_seconds=statistics.median(seconds[2:]), peak_bytes=peak)))


def launch(world_size: int, engine: str, optimizer: str, arguments: argparse.Namespace, timeout: float) -> dict:
    """Run `worker` on `world_size` ranks and return what it found, or the end of what it said where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder, "found.json"), 29500 + os.getpid() % 2000
        command = [sys.executable, __file__, "--worker", engine, optimizer, str(out)] + ["--smoke"] * arguments.smoke
        ranks = []
        for rank in range(world_size):
            environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            if optimizer == "stock":
                environment["PYTHONPATH"] = os.pathsep.join(
                    filter(None, [arguments.stock, os.environ.get("PYTHONPATH")]))
            # In a file, not a pipe: a rank that says much must not wait for the others to be read.
            with open(Path(folder, f"said{rank}"), "w", encoding="utf-8") as said:
                ranks.append(subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + timeout
        try:
            codes = [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes) or codes == [None] or not out.exists():
            said = Path(folder, "said0").read_text(encoding="utf-8", errors="replace")
            return dict(failed="ran out of time" if codes == [None] else said[-2000:])
        return json.loads(out.read_text(encoding="utf-8"))


def engines(arguments: argparse.Namespace, devices: int, deadline: float) -> list[dict[str, Any]]:
    """Every engine with every optimizer, one after another, as far as the time goes."""
    found = []
    optimizers = ["muon", "adamw"] + ["stock"] * bool(arguments.stock)
    for world_size in (1, 2) if devices >= 2 else (1, ):
        for engine in arguments.engines:
            for optimizer in optimizers:
                entry: dict[str, Any] = dict(engine=engine, optimizer=optimizer, ranks=world_size)
                left = deadline - time.monotonic()
                if left < 10:
                    entry["left_out"] = "the budget is spent"
                else:
                    entry.update(launch(world_size, engine, optimizer, arguments, left))
                found.append(entry)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on whatever device there is")
    parser.add_argument("--out", default="gpu.json", help="where the results go")
    parser.add_argument("--stock", help="a folder with an unpacked or installed stock deepspeed, for comparison")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--budget", type=float, default=280, help="seconds after which nothing more is started")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    sizes = Sizes(arguments.smoke)
    if arguments.worker:
        worker(*arguments.worker, sizes)
        return
    deadline = time.monotonic() + arguments.budget
    from deepspeed.accelerator import get_accelerator
    if device().type == "cpu" and not arguments.smoke:
        raise SystemExit("no accelerator was found; --smoke shows that the script runs")
    rates = machine(sizes)
    results = dict(machine=rates, kernels=kernels(sizes, rates), steps=steps(sizes))
    get_accelerator().empty_cache()
    devices = 1 if device().type == "cpu" else get_accelerator().device_count()
    results["engines"] = engines(arguments, devices, deadline)
    text = json.dumps(results, indent=1)
    Path(arguments.out).write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
