# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A rank of benchmarks/others.py: the contenders, their turns, and what is counted."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable

LR, MOMENTUM, NS_STEPS = 0.02, 0.95, 5

# AdamW in each engine, which a step of Muon in it is compared with.
ADAM = {"ZeRO-3": "ZeRO-3 AdamW", "FSDP2": "FSDP2 AdamW"}
FORK, STANDARD = "ZeRO-3 Muon, gram", "ZeRO-3 Muon, standard"
OTHERS = ("FSDP2 muon-fsdp2", "FSDP2 dtensor-muon Muon", "FSDP2 dtensor-muon MuonForeach")
CONTENDERS = (FORK, STANDARD, *OTHERS, *ADAM.values())


def make_model(layers: int, width: int) -> Any:
    """Six matrices a block, as in a transformer, and no parameter besides: nothing but Muon is in the step."""
    import torch

    class Block(torch.nn.Module):

        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(4))
            self.up = torch.nn.Linear(width, 4 * width, bias=False)
            self.down = torch.nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            for linear in self.attention:
                x = x + torch.tanh(linear(x))
            return x + self.down(torch.tanh(self.up(x)))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(layers)))


class Counted:
    """What a rank does in a step: bytes received, orthogonalized matrices, floating-point operations of products."""

    def __init__(self) -> None:
        self.received, self.orthogonalized, self.flops = 0, 0, 0


def received_bytes(name: str, args: tuple[Any, ...], rank: int, world_size: int) -> float:
    """Bytes that `rank` receives at least in a collective operator `name` of torch with arguments `args`.

    Raises RuntimeError for an operator that is not known here: nothing goes uncounted.
    """

    def size(tensors: Any) -> int:
        if isinstance(tensors, (list, tuple)):
            return sum(map(size, tensors))
        return tensors.numel() * tensors.element_size()

    if name in ("wait_tensor", "barrier", "_wrap_tensor_autograd"):
        return 0
    share, first = 1 - 1 / world_size, size(args[0])
    if name in ("allreduce_", "all_reduce"):
        return 2 * share * first
    if name in ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"):
        return share * first
    if name == "all_gather_into_tensor":
        return (world_size - 1) * first
    if name in ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return share * size(args[1])
    if name == "reduce_scatter_tensor":
        return share * first
    # One has a list of outputs where it is the root, the other one of inputs.
    if name == "gather_":
        return share * first if args[3] == rank else 0
    if name == "scatter_":
        return first if args[3] != rank else 0
    if name == "broadcast_":
        return first if args[2] != rank else 0
    if name == "alltoall_base_":
        own = args[3][rank] * args[0].element_size() if args[3] else first / world_size
        return first - own
    raise RuntimeError(f"benchmarks/others.py does not know what a rank receives in {name}; add it")


def counting(counted: Counted, rank: int, world_size: int) -> Any:
    """A context in which collectives and products of matrices are added to `counted`."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(kind is DTensor for kind in types):
                # It calls again, with what this rank has of it.
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if func.namespace in ("c10d", "_c10d_functional"):
                counted.received += received_bytes(name, args, rank, world_size)
            elif func.namespace == "aten" and name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
                left = args[1 if name.startswith(("addmm", "baddbmm")) else 0]
                counted.flops += 2 * result.numel() * left.shape[-1]
            return result

    return Counting()


class Contender:
    """A model, its optimizer, and how a step of it is taken."""

    def __init__(self, model: Any, step: Callable[[], Any], backward: Callable[[Any], Any], weights: Callable[[],
                                                                                                              list]):
        self.model, self.step, self.backward, self.weights = model, step, backward, weights


def zero3(model: Any, name: str, bf16: bool) -> Contender:
    """ZeRO-3 of DeepSpeed: the timed step is all of `engine.step()`. `bf16`: the standard iteration runs in it."""
    import deepspeed
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    if name != ADAM["ZeRO-3"]:
        optimizer = {
            "type": "Muon",
            "params": {
                "lr": LR,
                "momentum": MOMENTUM,
                "weight_decay": 0.0,
                "ns_steps": NS_STEPS,
                "ns_dtype": "bfloat16" if bf16 and name == STANDARD else "float32",
                "ns_method": "gram" if name == FORK else "standard"
            }
        }
    # No parameter stays whole: gathering those would be part of the step, and FSDP2 keeps none.
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": optimizer}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def weights() -> list:
        parameters = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            return [param.detach().clone() for param in parameters]

    return Contender(engine, engine.step, engine.backward, weights)


def fsdp2(model: Any, name: str, mesh: Any) -> Contender:
    """FSDP2, a block a group: the timed step is `optimizer.step()`, with neither clipping nor setting to zero."""
    import torch
    from torch.distributed.fsdp import fully_shard
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    if name == ADAM["FSDP2"]:
        optimizer = torch.optim.AdamW(params, lr=1e-3)
    elif "muon-fsdp2" in name:
        from muon_fsdp2 import Muon
        optimizer = Muon([
            dict(params=params,
                 use_muon=True,
                 lr=LR,
                 momentum=MOMENTUM,
                 rms_scale=False,
                 nesterov=True,
                 ns_steps=NS_STEPS)
        ])
    else:
        import dtensor_muon
        kind = dtensor_muon.MuonForeach if name.endswith("Foreach") else dtensor_muon.Muon
        optimizer = kind(params,
                         lr=LR,
                         wd=0.0,
                         momentum=MOMENTUM,
                         nesterov=True,
                         ns_steps=NS_STEPS,
                         orthogonalization_strategy="newton_schulz")

    def backward(loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()

    return Contender(model, optimizer.step, backward,
                     lambda: [param.full_tensor().detach().clone() for param in params])


def count_orthogonalized(counted: Counted, with_others: bool) -> None:
    """From now on, every call of a contender's iteration adds its number of matrices to `counted`."""
    from deepspeed.runtime.zero.muon import newton_schulz

    def wrap(owner: Any, name: str, matrices: Callable[[Any], int]) -> None:
        function = getattr(owner, name)

        def wrapped(first: Any, *args: Any, **kwargs: Any) -> Any:
            counted.orthogonalized += matrices(first)
            return function(first, *args, **kwargs)

        setattr(owner, name, wrapped)

    wrap(newton_schulz, "iterate_together", lambda batches: sum(map(len, batches)))
    if with_others:
        import muon_fsdp2
        from dtensor_muon.orthogonalize import orthogonalize
        wrap(muon_fsdp2, "zeropower_via_newtonschulz5", lambda matrix: 1)
        wrap(orthogonalize, "ns_loop", lambda batch: len(batch) if batch.ndim == 3 else 1)


def let_run_on_cpu() -> None:
    """The two places of dtensor-muon that need CUDA: a Triton kernel, which it has a torch loop for that it never
    chooses, and a move of everything to the CUDA device."""
    from dtensor_muon.optim import optim_foreach
    from dtensor_muon.orthogonalize import orthogonalize
    choose = orthogonalize._get_orthogonalization_fn
    orthogonalize._get_orthogonalization_fn = lambda strategy, use_triton: choose(strategy, False)
    optim_foreach.move_tensors_to_device = lambda tensors, device_in, device_out: tensors


def cast_to_fp32() -> None:
    """Both packages cast to bf16 with Tensor.bfloat16() and have no setting for it: here that gives fp32."""
    import torch
    torch.Tensor.bfloat16 = torch.Tensor.float


class Session:
    """The contenders of one process group and the rounds in which they take turns."""

    def __init__(self, layers: int, width: int, names: list[str], bf16: bool):
        import deepspeed.comm as dist
        from torch.distributed.device_mesh import init_device_mesh
        self.dist, self.width = dist, width
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world_size, ))
        self.start = [param.detach().clone() for param in make_model(layers, width).parameters()]
        self.contenders = {
            name:
            zero3(make_model(layers, width), name, bf16) if name.startswith("ZeRO-3") else fsdp2(
                make_model(layers, width), name, mesh)
            for name in names
        }
        self.rounds = 0

    def round(self, around: Callable[[str, Callable[[], Any]], Any]) -> dict[str, Any]:
        """Let each contender make its gradients and step; `around(name, step)` takes the step."""
        import torch
        names = list(self.contenders)
        turn = self.rounds % len(names)
        found = {}
        for name in names[turn:] + names[:turn]:
            contender = self.contenders[name]
            torch.manual_seed(100 * self.rounds + self.rank)
            contender.backward(contender.model(torch.randn(8, self.width)).square().mean())
            self.dist.barrier()
            found[name] = around(name, contender.step)
        self.rounds += 1
        return found

    def timed(self, name: str, step: Callable[[], Any]) -> float:
        """Seconds of the slowest rank."""
        import torch
        start = time.perf_counter()
        step()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        self.dist.all_reduce(seconds, op=self.dist.ReduceOp.MAX)
        return seconds.item()

    def updates(self, name: str) -> list:
        return [after - before for after, before in zip(self.contenders[name].weights(), self.start)]


def count_step(session: Session, counted: Counted) -> Callable[[str, Callable[[], Any]], Any]:
    """For `Session.round`: the counts of each rank."""

    def around(name: str, step: Callable[[], Any]) -> list[dict[str, float]]:
        counted.__init__()
        with counting(counted, session.rank, session.world_size):
            step()
        by_rank: list[Any] = [None] * session.world_size
        session.dist.all_gather_object(by_rank, dict(vars(counted)))
        return by_rank

    return around


def worker(layers: int, width: int, rounds: int, names: list[str], out: str, bf16: bool) -> None:
    """One rank. Rank 0 writes to `out`, by contender: seconds of each round, counts of each rank, and how far the
    first update is from that of the fork's standard iteration."""
    import deepspeed
    import torch
    deepspeed.init_distributed("gloo")
    others = any(name in OTHERS for name in names)
    if others:
        let_run_on_cpu()
        if not bf16:
            cast_to_fp32()
    counted = Counted()
    count_orthogonalized(counted, others)
    session = Session(layers, width, names, bf16)
    session.round(session.timed)
    made = {name: session.updates(name) for name in names}
    expected = made[STANDARD if STANDARD in names else names[0]]
    differs = {
        name: max((torch.linalg.norm(a - b) / torch.linalg.norm(b)).item() for a, b in zip(update, expected))
        for name, update in made.items()
    }
    # One round in bf16 is asked for where a step takes minutes.
    slow = bf16 and rounds == 1
    # In its first steps the fork tests itself.
    for _ in range(0 if slow else 2):
        session.round(session.timed)
    seconds = [session.round(session.timed) for _ in range(rounds)]
    counts = None if slow else session.round(count_step(session, counted))
    if session.rank == 0:
        found = {
            name:
            dict(seconds=[one[name] for one in seconds], counts=counts[name] if counts else [], differs=differs[name])
            for name in names
        }
        Path(out).write_text(json.dumps(found))
    session.dist.barrier()
    # The end of a Python with gloo and DeepSpeed can abort.
    os._exit(0)


if __name__ == "__main__":
    layers, width, rounds, names, out, bf16 = sys.argv[1:]
    worker(int(layers), int(width), int(rounds), names.split(";"), out, bf16 == "1")
