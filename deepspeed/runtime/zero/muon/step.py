# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One optimizer step of the matrices that share a plan: momentum, norms, rounds, weights."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch

from deepspeed.runtime.zero.muon import newton_schulz, update
from deepspeed.runtime.zero.muon.coefficients import Triple
from deepspeed.runtime.zero.muon.exchange import Exchange, Handle, run_rounds
from deepspeed.runtime.zero.muon.pack import (RoundBuffers, Workspace, batch_view, copy_batch_to_received,
                                              copy_received_to_batch, gather_fragments, put_back_copies, round_buffers,
                                              slices)
from deepspeed.runtime.zero.muon.plan import LocalFragment, RankPlan
from deepspeed.runtime.zero.muon.watch import Watcher


@dataclass(frozen=True)
class Kernel:
    """How matrices of a plan are orthogonalized; `dtype` is also that of the wire."""
    method: str
    triples: tuple[Triple, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Partition:
    """One partition tensor in one step: flat views, all [partition_numel] on one device, and its group's options.

    `weight` and `momentum` are changed by the step, `grad` is only read.
    """
    weight: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    lr: float
    weight_decay: float
    beta: float
    nesterov: bool
    adjust_lr_fn: str


@dataclass(frozen=True)
class _Part:
    """Local fragments of one round that lie in one partition: where they are there, and in the round's buffer."""
    partition: int
    matrices: tuple[int, ...]
    fragments: tuple[LocalFragment, ...]
    numels: tuple[int, ...]
    offsets_in_buffer: tuple[int, ...]


class MuonStep:
    """Executes a rank's plan. Built once; `run` does a step and leaves nothing but buffers behind.

    The gradient is read and never written: the blend is made twice, once for the norms and once to be sent, which
    costs a pass over memory and saves a copy of the partition.
    """

    def __init__(self, plan: RankPlan, kernel: Kernel, exchange: Exchange, workspace: Workspace):
        self.plan = plan
        self.kernel = kernel
        self.exchange = exchange
        self.workspace = workspace
        self.orthogonalized = 0
        self.watchers: list[Watcher] = []
        self._kept = [_parts(found.kept) for found in plan.rounds]
        self._sent = [_parts(found.sent) for found in plan.rounds]
        self._indices: dict[torch.device, list[torch.Tensor]] = {}
        self._partitions: Sequence[Partition] = ()
        self._divisors: list[torch.Tensor] = []

    @torch.no_grad()
    def run(self, partitions: Sequence[Partition]) -> None:
        """Advance momenta and step weights in place. Collective over the plan's process group."""
        self._partitions = partitions
        for watcher in tuple(self.watchers):
            watcher.begin(self)
        for partition, spans in zip(partitions, self.plan.spans):
            update.advance_momentum_([partition.momentum[start:stop] for start, stop in spans],
                                     [partition.grad[start:stop] for start, stop in spans],
                                     beta=partition.beta)
        self._divisors = self._norms()
        run_rounds(self, len(self.plan.rounds))
        for watcher in self.watchers:
            watcher.end(self)
        self._partitions, self._divisors = (), []

    @property
    def partitions(self) -> Sequence[Partition]:
        """Those of the step that is being done, by number; empty between steps."""
        return self._partitions

    def divisors(self, matrices: Sequence[int]) -> torch.Tensor:
        """What the blends of these matrices are divided by in this step, fp32 [len(matrices)]."""
        return torch.stack([self._divisors[index] for index in matrices])

    def normalized(self, part: _Part) -> list[torch.Tensor]:
        """The slices of `part` as they are orthogonalized, fp32, new."""
        return list(torch._foreach_div(self._blend(part), [self._divisors[index] for index in part.matrices]))

    def _owned(self, index: int) -> list[int]:
        """The matrices of round `index` that are owned here, in the order of its batches."""
        plan = self.plan.plan
        return [matrix for matrix in plan.rounds[index].matrices if plan.owners[matrix] == self.plan.rank]

    def _norms(self) -> list[torch.Tensor]:
        """Divisor of each matrix's blend, its Frobenius norm, 0-dim fp32, the same on every rank.

        Squares of fp32 are exact in float64, so what is left to depend on the cut is the last bit of a float64 sum,
        far below what an fp32 divisor can show.
        """
        device = self._partitions[0].weight.device
        straddling, *indices = self._indices_on(device)
        squares = torch.zeros(len(self.plan.plan.matrices), dtype=torch.float64, device=device)
        for part, index in zip(self._parts(), indices):
            squares.index_add_(0, index, update.squared_norms(self._blend(part)))
        if self.exchange.world_size > 1 and len(straddling):
            total = squares[straddling].to(self.workspace.device)
            self.exchange.sum_over_ranks_(total)
            squares[straddling] = total.to(device)
        return list(newton_schulz.divisor(squares.sqrt()).unbind())

    def _parts(self) -> Iterator[_Part]:
        return (part for parts in (*self._kept, *self._sent) for part in parts)

    def _indices_on(self, device: torch.device) -> list[torch.Tensor]:
        """Matrices that straddle, and those of each part, as index tensors. Kept, since a copy to the device waits."""
        if device not in self._indices:
            found = [self.plan.plan.straddling, *(part.matrices for part in self._parts())]
            self._indices[device] = [torch.tensor(own, dtype=torch.long, device=device) for own in found]
        return self._indices[device]

    def _blend(self, part: _Part) -> list[torch.Tensor]:
        """fp32 blends of a part; not to be written to (they may be the momentum itself)."""
        partition = self._partitions[part.partition]
        return update.blend(gather_fragments(partition.momentum, part.fragments),
                            gather_fragments(partition.grad, part.fragments),
                            beta=partition.beta,
                            nesterov=partition.nesterov)

    def _normalize_into(self, buffer: torch.Tensor, parts: Sequence[_Part]) -> None:
        for part in parts:
            normalized = torch._foreach_div(self._blend(part), [self._divisors[index] for index in part.matrices])
            if buffer.device != normalized[0].device:
                # Cast where the slices live: with offload only the wire dtype crosses to the accelerator.
                normalized = [tensor.to(buffer.dtype) for tensor in normalized]
            torch._foreach_copy_(slices(buffer, part.offsets_in_buffer, part.numels), normalized)

    def _step_weights(self, buffer: torch.Tensor, parts: Sequence[_Part]) -> None:
        matrices = self.plan.plan.matrices
        for part in parts:
            partition = self._partitions[part.partition]
            factors = [
                partition.lr * update.lr_scale(matrices[index].fan_out, matrices[index].fan_in, partition.adjust_lr_fn)
                for index in part.matrices
            ]
            for watcher in self.watchers:
                watcher.before_weights(self, part, slices(buffer, part.offsets_in_buffer, part.numels), factors)
            weights = gather_fragments(partition.weight, part.fragments)
            update.step_weights_(weights,
                                 slices(buffer, part.offsets_in_buffer, part.numels),
                                 factors,
                                 decay=1 - partition.lr * partition.weight_decay)
            put_back_copies(partition.weight, part.fragments, weights)

    def _buffers(self, index: int) -> RoundBuffers:
        return round_buffers(self.workspace, self.plan.rounds[index], index, self.kernel.dtype)

    def pack(self, index: int) -> None:
        if not self.plan.plan.replicated:
            self._normalize_into(self._buffers(index).sent, self._sent[index])

    def send_to_owners(self, index: int) -> Optional[Handle]:
        found, buffers = self.plan.rounds[index], self._buffers(index)
        if not found.exchanged or self.plan.plan.replicated:
            return None
        return self.exchange.start_all_to_all(buffers.received, buffers.sent, found.recv_splits, found.send_splits)

    def orthogonalize(self, index: int) -> None:
        found, buffers = self.plan.rounds[index], self._buffers(index)
        self._normalize_into(buffers.batch, self._kept[index])
        if not self.plan.plan.replicated:
            copy_received_to_batch(buffers, found)
        owned = self._owned(index) if self.watchers else []
        for batch in found.batches:
            own, owned = owned[:batch.count], owned[batch.count:]
            matrices = batch_view(buffers, batch)
            # A view of the blocks as columns side by side; without blocks it is the matrices as they stand.
            whole = matrices.transpose(1, 2).reshape(batch.count, batch.rows, batch.cols)
            for watcher in self.watchers:
                watcher.before_iteration(self, own, whole)
            update = newton_schulz.iterate(whole, method=self.kernel.method, triples=self.kernel.triples)
            del whole
            for watcher in self.watchers:
                watcher.after_iteration(self, own, update)
            matrices.copy_(update.view(batch.count, batch.rows, batch.column_blocks, -1).transpose(1, 2))
            self.orthogonalized += batch.count
        copy_batch_to_received(buffers, found)

    def send_back(self, index: int) -> Optional[Handle]:
        found, buffers = self.plan.rounds[index], self._buffers(index)
        if not found.exchanged:
            return None
        return self.exchange.start_all_to_all(buffers.sent, buffers.received, found.send_splits, found.recv_splits)

    def apply_kept(self, index: int) -> None:
        self._step_weights(self._buffers(index).batch, self._kept[index])

    def apply_returned(self, index: int) -> None:
        self._step_weights(self._buffers(index).sent, self._sent[index])


def _parts(fragments: Sequence[LocalFragment]) -> tuple[_Part, ...]:
    by_partition: dict[int, list[LocalFragment]] = defaultdict(list)
    for fragment in fragments:
        by_partition[fragment.partition].append(fragment)
    return tuple(
        _Part(partition=partition,
              matrices=tuple(fragment.matrix for fragment in own),
              fragments=tuple(own),
              numels=tuple(fragment.numel for fragment in own),
              offsets_in_buffer=tuple(fragment.offset_in_buffer for fragment in own))
        for partition, own in by_partition.items())
