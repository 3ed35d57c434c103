# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""All ranks of a group in one process: a thread a rank, and an exchange that moves tensors between the threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional, Sequence

import torch

from deepspeed.runtime.zero.muon.coefficients import flops, resolve
from deepspeed.runtime.zero.muon.layout import Fragment, GroupLayout
from deepspeed.runtime.zero.muon.pack import Workspace
from deepspeed.runtime.zero.muon.plan import Plan, build_plan, rank_plan
from deepspeed.runtime.zero.muon.step import Kernel, MuonStep, Partition

TIMEOUT_S = 60


class Board:
    """Where ranks leave what others take. Every collective is a rendezvous of all ranks."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)
        self.left: list[Any] = [None] * world_size

    def swap(self, rank: int, given: Any) -> list[Any]:
        self.left[rank] = given
        self.barrier.wait()
        taken = list(self.left)
        self.barrier.wait()
        self.left[rank] = None
        return taken


class _Arrived:

    def wait(self) -> None:
        """Nothing to wait for: the rendezvous has moved the data."""


class SimulatedExchange:
    """The interface of `exchange.Exchange` for one rank of a board, with counters of what it received."""

    def __init__(self, board: Board, rank: int):
        self.board, self.rank, self.world_size = board, rank, board.world_size
        self.exchanges = 0
        self.received_bytes = 0
        self.summed_bytes = 0

    def sum_over_ranks_(self, values: torch.Tensor) -> None:
        parts = self.board.swap(self.rank, values.clone())
        values.copy_(torch.stack(parts).sum(0))
        self.summed_bytes += values.numel() * values.element_size()

    def start_all_to_all(self, output: torch.Tensor, source: torch.Tensor, output_splits: Sequence[int],
                         source_splits: Sequence[int]) -> _Arrived:
        assert output.numel() == sum(output_splits) and source.numel() == sum(source_splits)
        given = list(source.clone().split(list(source_splits)))
        for part, sent in zip(output.split(list(output_splits)), self.board.swap(self.rank, given)):
            part.copy_(sent[self.rank])
        self.exchanges += 1
        self.received_bytes += output.numel() * output.element_size()
        return _Arrived()

    def gather_objects(self, found: Any) -> list[Any]:
        return self.board.swap(self.rank, found)


def on_all_ranks(world_size: int, work: Callable[[SimulatedExchange], Any]) -> list[Any]:
    """Run `work` on every rank at the same time; results by rank. The first failure is raised, and ends the others."""
    board = Board(world_size)

    def guarded(rank: int) -> Any:
        try:
            return work(SimulatedExchange(board, rank))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(world_size)]
        errors = [future.exception() for future in futures]
        first = [error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)]
        if any(errors):
            raise first[0] if first else next(filter(None, errors))
        return [future.result() for future in futures]


KERNEL = Kernel("gram", resolve("jordan", 5), torch.float32)


def plan_for(layouts: Sequence[GroupLayout], kernel: Kernel = KERNEL, round_numel: int = 1 << 20) -> Plan:
    costs = [flops(m.rows, m.cols, kernel.method, len(kernel.triples)) for layout in layouts for m in layout.matrices]
    itemsize = torch.empty((), dtype=kernel.dtype).element_size()
    return build_plan(layouts, costs=costs, itemsize=itemsize, round_numel=round_numel)


def in_partition(partition: torch.Tensor, f: Fragment) -> torch.Tensor:
    """A fragment's elements, [strips, elements of a strip], a view."""
    return partition.as_strided((f.strips, f.numel // f.strips), (f.stride, 1), f.offset_in_partition)


def scatter(layout: GroupLayout, index_values: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """A rank's partition with the values of whole matrices put where the layout says; padding zero."""
    partition = torch.zeros(layout.partition_numel)
    for placement, values in zip(layout.placements, index_values):
        for f in placement.on_rank(rank):
            place = in_partition(partition, f)
            place.copy_(values.flatten()[f.offset_in_matrix:f.offset_in_matrix + f.numel].view(place.shape))
    return partition


def gather(layout: GroupLayout, partitions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `scatter`: whole matrices from the partitions of all ranks."""
    found = []
    for matrix, placement in zip(layout.matrices, layout.placements):
        whole = torch.full((matrix.numel, ), float("nan"))
        for f in placement.fragments():
            whole[f.offset_in_matrix:f.offset_in_matrix + f.numel] = in_partition(partitions[f.rank], f).flatten()
        found.append(whole.view(matrix.rows, matrix.cols))
    return found


def simulate_steps(layout: GroupLayout,
                   weights: Sequence[torch.Tensor],
                   grads_by_step: Sequence[Sequence[torch.Tensor]],
                   *,
                   kernel: Kernel = KERNEL,
                   round_numel: int = 1 << 20,
                   options: Optional[dict[str, Any]] = None) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Steps of all ranks of `layout` on whole matrices: their weights afterwards, and per rank what was counted."""
    plan = plan_for([layout], kernel, round_numel)
    settings = dict(lr=0.02, weight_decay=0.1, beta=0.95, nesterov=True, adjust_lr_fn="original")
    settings.update(options or {})

    def rank_work(exchange: SimulatedExchange) -> dict[str, Any]:
        workspace = Workspace(torch.device("cpu"))
        step = MuonStep(rank_plan(plan, exchange.rank), kernel, exchange, workspace)
        weight = scatter(layout, weights, exchange.rank)
        momentum = torch.zeros_like(weight)
        for grads in grads_by_step:
            step.run([Partition(weight, scatter(layout, grads, exchange.rank), momentum, **settings)])
        return dict(weight=weight,
                    momentum=momentum,
                    orthogonalized=step.orthogonalized,
                    exchanges=exchange.exchanges,
                    received_bytes=exchange.received_bytes,
                    summed_bytes=exchange.summed_bytes,
                    held_bytes=workspace.held_bytes)

    found = on_all_ranks(layout.world_size, rank_work)
    return gather(layout, [rank["weight"] for rank in found]), found
