# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every collective of Muon, and the pipeline that overlaps them with the orthogonalization."""

from typing import Any, Callable, Optional, Protocol, Sequence

import torch

import deepspeed.comm as dist


class Handle(Protocol):
    """What an asynchronous collective returns. `wait()` makes the result safe to use."""

    def wait(self) -> Any:
        ...


class RoundWork(Protocol):
    """The computations around the exchanges of round `index`. One pair of buffers serves the way to the owners and
    another the way back, one round at a time each; a batch holds the matrices in between."""

    def pack(self, index: int) -> None:
        """Fill the send buffer from the partitions."""

    def send_to_owners(self, index: int) -> Optional[Handle]:
        """Start the exchange to the owners; None where the round has none."""

    def assemble(self, index: int) -> None:
        """Put the owned matrices together in the batch. What has arrived is free afterwards."""

    def orthogonalize(self, index: int) -> None:
        """Replace the batch by its update."""

    def send_back(self, index: int) -> Optional[Handle]:
        """Start the exchange back of what came from other ranks; None where the round has none."""

    def apply_kept(self, index: int) -> None:
        """Step the weights with the slices of the update that are needed where they were made."""

    def apply_returned(self, index: int) -> None:
        """Step the weights with the slices of the update that have come back."""


class Exchange:
    """The collectives of one process group, or none of them where it is None or has one rank."""

    def __init__(self, process_group: Optional[Any]):
        self.process_group = process_group
        distributed = process_group is not None
        self.world_size: int = dist.get_world_size(group=process_group) if distributed else 1
        self.rank: int = dist.get_rank(group=process_group) if distributed else 0

    def sum_over_ranks_(self, values: torch.Tensor) -> None:
        """Sum `values` over the ranks in place."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.process_group)

    def start_all_to_all(self, output: torch.Tensor, source: torch.Tensor, output_splits: Sequence[int],
                         source_splits: Sequence[int]) -> Handle:
        """Start an all-to-all of 1-D tensors of one dtype; splits are elements per rank. `output` is overwritten."""
        return dist.all_to_all_single(output,
                                      source,
                                      output_split_sizes=list(output_splits),
                                      input_split_sizes=list(source_splits),
                                      group=self.process_group,
                                      async_op=True)

    def gather_objects(self, found: Any) -> list[Any]:
        """`found` of every rank, by rank. For checks when a plan is built, never in a step."""
        if self.world_size == 1:
            return [found]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, found, group=self.process_group)
        return gathered


def require_same_on_all_ranks(exchange: Exchange, digests: Sequence[tuple[str, str]], what: str) -> None:
    """Compare (name, digest) lists over the ranks; two collectives at most, the second only on a mismatch.

    Raises RuntimeError on every rank, naming the first entry that differs, so that no rank goes on to hang alone.
    """
    total = str(digests[-1])
    if len(set(exchange.gather_objects(total))) == 1:
        return
    by_rank = exchange.gather_objects(list(digests))
    for position in range(max(len(entries) for entries in by_rank)):
        entries = [found[position] if position < len(found) else None for found in by_rank]
        if len(set(entries)) > 1:
            names = sorted({entry[0] for entry in entries if entry is not None})
            views = "; ".join(f"rank {rank}: {entry[0]} ({entry[1]})" if entry else f"rank {rank}: nothing"
                              for rank, entry in enumerate(entries))
            raise RuntimeError(f"Muon: ranks disagree on {what} at {', '.join(names)}. Found {views}. Every rank must "
                               "build the same model with the same shapes, in the same order, and the same config.")


def run_rounds(work: RoundWork, count: int, meanwhile: Optional[Callable[[], None]] = None) -> None:
    """Run the rounds so that, while round k is orthogonalized, round k + 1 travels to its owners and the update of
    round k - 1 travels back. `meanwhile`, work that has nothing to do with the rounds, is called once: while the last
    update travels, which no round hides.
    """
    returning: Optional[Handle] = None
    arriving: Optional[Handle] = None
    if count > 0:
        work.pack(0)
        arriving = work.send_to_owners(0)
    for index in range(count):
        _wait(arriving)
        work.assemble(index)
        # Only now is the buffer of the way there free for the next round.
        if index + 1 < count:
            work.pack(index + 1)
            arriving = work.send_to_owners(index + 1)
        work.orthogonalize(index)
        # And only now the one of the way back.
        if index > 0:
            _wait(returning)
            work.apply_returned(index - 1)
        returning = work.send_back(index)
        work.apply_kept(index)
    if meanwhile is not None:
        meanwhile()
    if count > 0:
        _wait(returning)
        work.apply_returned(count - 1)


def _wait(handle: Optional[Handle]) -> None:
    if handle is not None:
        handle.wait()
