# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Buffers of a step and the views into them that a round copies between. No collective, no arithmetic."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Iterator, Optional, Sequence

import torch

from deepspeed.runtime.zero.muon.plan import Batch, LocalFragment, RankRound


class Workspace:
    """Named flat buffers on one device that grow to the largest request, serve all steps, and can be given back."""

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def flat(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized [numel] of `dtype`. The same memory for the same name and dtype until `release`."""
        held = self._buffers.get((name, dtype))
        if held is None or held.numel() < numel:
            # Dropped before the larger one is made, so that the two never exist together.
            self._buffers.pop((name, dtype), None)
            held = self._buffers[(name, dtype)] = torch.empty(numel, dtype=dtype, device=self.device)
        return held[:numel]

    @property
    def held_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def release(self) -> None:
        """Give the memory back; the next step allocates it anew."""
        self._buffers.clear()


@dataclass(frozen=True)
class ExchangeBuffers:
    """One way of a round's exchange: `sent` [send_numel] are the slices of this rank's partitions that others own,
    `received` [recv_numel] the slices of others' partitions that are owned here. Back, `received` is sent."""
    sent: torch.Tensor
    received: torch.Tensor


def exchange_buffers(workspace: Workspace, found: RankRound, dtype: torch.dtype, *, back: bool) -> ExchangeBuffers:
    """Views of the workspace for a round. The way there and the way back have buffers of their own, because one round
    travels there while another travels back; two rounds never travel the same way at a time."""
    way = "back" if back else "there"
    return ExchangeBuffers(sent=workspace.flat(f"sent {way}", found.send_numel, dtype),
                           received=workspace.flat(f"received {way}", found.recv_numel, dtype))


def batch_buffer(workspace: Workspace, found: RankRound, dtype: torch.dtype) -> torch.Tensor:
    """[batch_numel] for the matrices that a rank owns in a round."""
    return workspace.flat("batch", found.batch_numel, dtype)


def batch_view(buffer: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The matrices of `batch` as [count, column_blocks, rows, cols / column_blocks], a view of the batch buffer."""
    width = batch.cols // batch.column_blocks
    numel = batch.count * batch.rows * batch.cols
    return buffer.narrow(0, batch.offset_in_batch, numel).view(batch.count, batch.column_blocks, batch.rows, width)


@dataclass(frozen=True)
class Part:
    """Slices of one partition that are handled together, with their matrices, sizes and places in the round's buffer
    side by side."""
    partition: int
    fragments: tuple[LocalFragment, ...]
    matrices: tuple[int, ...]
    numels: tuple[int, ...]
    offsets_in_buffer: tuple[int, ...]


def parts_of(fragments: Sequence[LocalFragment], max_numel: Optional[int]) -> tuple[Part, ...]:
    """The fragments by partition, and those of one cut into slices and parts of at most `max_numel` elements."""
    by_partition: dict[int, list[LocalFragment]] = defaultdict(list)
    for fragment in fragments:
        by_partition[fragment.partition].append(fragment)
    return tuple(part for partition, own in by_partition.items() for part in _cut(partition, own, max_numel))


def _cut(partition: int, fragments: Sequence[LocalFragment], max_numel: Optional[int]) -> Iterator[Part]:
    limit = max_numel or sum(fragment.numel for fragment in fragments)
    found: list[LocalFragment] = []
    filled = 0
    for fragment in fragments:
        for piece in _pieces(fragment, limit):
            if filled and filled + piece.numel > limit:
                yield _part(partition, found)
                found, filled = [], 0
            found.append(piece)
            filled += piece.numel
    yield _part(partition, found)


def _pieces(fragment: LocalFragment, limit: int) -> Iterator[LocalFragment]:
    """A fragment in pieces of at most `limit` elements, or of one strip where that is more."""
    strip_numel = fragment.numel // fragment.strips
    step = limit if fragment.strips == 1 else max(1, limit // strip_numel) * strip_numel
    for start in range(0, fragment.numel, step):
        numel = min(step, fragment.numel - start)
        skipped = start if fragment.strips == 1 else start // strip_numel * fragment.stride
        yield replace(fragment,
                      offset_in_partition=fragment.offset_in_partition + skipped,
                      numel=numel,
                      offset_in_buffer=fragment.offset_in_buffer + start,
                      strips=1 if fragment.strips == 1 else numel // strip_numel)


def _part(partition: int, fragments: Sequence[LocalFragment]) -> Part:
    return Part(partition=partition,
                fragments=tuple(fragments),
                matrices=tuple(fragment.matrix for fragment in fragments),
                numels=tuple(fragment.numel for fragment in fragments),
                offsets_in_buffer=tuple(fragment.offset_in_buffer for fragment in fragments))


def slices(buffer: torch.Tensor, offsets: Sequence[int], numels: Sequence[int]) -> list[torch.Tensor]:
    """Views [numel] of a flat buffer."""
    return [buffer.narrow(0, offset, numel) for offset, numel in zip(offsets, numels)]


def gather_fragments(flat: torch.Tensor, fragments: Sequence[LocalFragment]) -> list[torch.Tensor]:
    """[numel] of each fragment of a partition, a contiguous 1-D tensor: a view, or of a fragment in strips a copy.

    A copy, since arithmetic on strips would take other loops than on consecutive elements, with other last bits.
    """
    return [
        flat.narrow(0, fragment.offset_in_partition, fragment.numel) if fragment.strips == 1 else _in_strips(
            flat, fragment).reshape(-1) for fragment in fragments
    ]


def put_back_copies(flat: torch.Tensor, fragments: Sequence[LocalFragment], gathered: Sequence[torch.Tensor]) -> None:
    """Write what `gather_fragments` returned back into `flat`, which is needed for copies only."""
    for fragment, values in zip(fragments, gathered):
        if fragment.strips > 1:
            strips = _in_strips(flat, fragment)
            strips.copy_(values.view(strips.shape))


def _in_strips(flat: torch.Tensor, fragment: LocalFragment) -> torch.Tensor:
    return flat.as_strided((fragment.strips, fragment.numel // fragment.strips), (fragment.stride, 1),
                           flat.storage_offset() + fragment.offset_in_partition)


def copy_received_to_batch(received: torch.Tensor, batch: torch.Tensor, found: RankRound) -> None:
    """Put what other ranks sent into the owned matrices. Overwrites those parts of `batch`."""
    arrived, assembled = _received_views(received, batch, found)
    if arrived:
        torch._foreach_copy_(assembled, arrived)


def copy_batch_to_received(batch: torch.Tensor, received: torch.Tensor, found: RankRound) -> None:
    """The inverse: put the update's slices where their matrix's slices came from. Overwrites `received`."""
    arrived, assembled = _received_views(received, batch, found)
    if arrived:
        torch._foreach_copy_(arrived, assembled)


def _received_views(received: torch.Tensor, batch: torch.Tensor,
                    found: RankRound) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    numels = [fragment.numel for fragment in found.received]
    return (slices(received, [fragment.offset_in_exchange for fragment in found.received],
                   numels), slices(batch, [fragment.offset_in_batch for fragment in found.received], numels))
