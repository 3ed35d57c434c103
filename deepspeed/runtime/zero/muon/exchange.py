# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every collective of Muon, and the pipeline that overlaps them with the orthogonalization."""

from typing import Any, Optional, Protocol, Sequence

import torch

import deepspeed.comm as dist


class Handle(Protocol):
    """What an asynchronous collective returns. `wait()` makes the result safe to use."""

    def wait(self) -> Any:
        ...


class RoundWork(Protocol):
    """The computations around the exchanges of round `index`, in the order in which `run_rounds` calls them."""

    def pack(self, index: int) -> None:
        """Fill the round's send buffer from the partitions."""

    def send_to_owners(self, index: int) -> Optional[Handle]:
        """Start the exchange to the owners; None where the round has none."""

    def orthogonalize(self, index: int) -> None:
        """Assemble the owned matrices, orthogonalize them, and fill the receive buffer with what goes back."""

    def apply_kept(self, index: int) -> None:
        """Step the weights with the slices of the update that are needed where they were made."""

    def send_back(self, index: int) -> Optional[Handle]:
        """Start the exchange back; None where the round has none."""

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


def run_rounds(work: RoundWork, count: int) -> None:
    """Run the rounds so that round k + 1 travels to its owners while round k is orthogonalized.

    Two sets of exchange buffers take turns, so the update of round k - 1 is applied before round k + 1 is packed.
    """
    if count == 0:
        return
    returning: Optional[Handle] = None
    work.pack(0)
    arriving = work.send_to_owners(0)
    for index in range(count):
        if index > 0:
            _wait(returning)
            work.apply_returned(index - 1)
        following: Optional[Handle] = None
        if index + 1 < count:
            work.pack(index + 1)
            following = work.send_to_owners(index + 1)
        _wait(arriving)
        work.orthogonalize(index)
        returning = work.send_back(index)
        work.apply_kept(index)
        arriving = following
    _wait(returning)
    work.apply_returned(count - 1)


def _wait(handle: Optional[Handle]) -> None:
    if handle is not None:
        handle.wait()
