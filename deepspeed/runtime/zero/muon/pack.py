# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Buffers of a step and the views into them that a round copies between. No collective, no arithmetic."""

from dataclasses import dataclass
from typing import Sequence

import torch

from deepspeed.runtime.zero.muon.plan import Batch, LocalFragment, RankRound

SLOTS = 2


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
class RoundBuffers:
    """The buffers of one round: `sent` [send_numel] and `received` [recv_numel] for the exchanges, `batch`
    [batch_numel] for the owned matrices. On the way back `received` is sent and `sent` receives."""
    sent: torch.Tensor
    received: torch.Tensor
    batch: torch.Tensor


def round_buffers(workspace: Workspace, found: RankRound, index: int, dtype: torch.dtype) -> RoundBuffers:
    """Views of the workspace for round number `index`. Exchange buffers alternate between two slots, because round
    index + 1 is in flight while round `index` is orthogonalized; there is one batch at a time."""
    slot = index % SLOTS
    return RoundBuffers(sent=workspace.flat(f"sent{slot}", found.send_numel, dtype),
                        received=workspace.flat(f"received{slot}", found.recv_numel, dtype),
                        batch=workspace.flat("batch", found.batch_numel, dtype))


def batch_view(buffers: RoundBuffers, batch: Batch) -> torch.Tensor:
    """The matrices of `batch` as [count, column_blocks, rows, cols / column_blocks], a view of the batch buffer."""
    width = batch.cols // batch.column_blocks
    numel = batch.count * batch.rows * batch.cols
    return buffers.batch.narrow(0, batch.offset_in_batch, numel).view(batch.count, batch.column_blocks, batch.rows,
                                                                      width)


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


def copy_received_to_batch(buffers: RoundBuffers, found: RankRound) -> None:
    """Assemble the owned matrices from what other ranks sent. Overwrites those parts of `buffers.batch`."""
    arrived, assembled = _received_views(buffers, found)
    if arrived:
        torch._foreach_copy_(assembled, arrived)


def copy_batch_to_received(buffers: RoundBuffers, found: RankRound) -> None:
    """The inverse: put the update's slices where their matrix's slices came from. Overwrites `buffers.received`."""
    arrived, assembled = _received_views(buffers, found)
    if arrived:
        torch._foreach_copy_(arrived, assembled)


def _received_views(buffers: RoundBuffers, found: RankRound) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    numels = [fragment.numel for fragment in found.received]
    return (slices(buffers.received, [fragment.offset_in_exchange for fragment in found.received],
                   numels), slices(buffers.batch, [fragment.offset_in_batch for fragment in found.received], numels))
