# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One optimizer step of the matrices that share a plan: momentum, norms, rounds, weights."""

from dataclasses import dataclass
from itertools import islice
from typing import Callable, Iterator, Optional, Sequence

import torch

from deepspeed.runtime.zero.muon import newton_schulz, update
from deepspeed.runtime.zero.muon.coefficients import Triple
from deepspeed.runtime.zero.muon.exchange import Exchange, Handle, run_rounds
from deepspeed.runtime.zero.muon.merge import Together, merge
from deepspeed.runtime.zero.muon.pack import (ExchangeBuffers, Part, Workspace, batch_buffer, batch_view,
                                              copy_batch_to_received, copy_received_to_batch, exchange_buffers,
                                              gather_fragments, parts_of, put_back_copies, slices)
from deepspeed.runtime.zero.muon.plan import Batch, RankPlan
from deepspeed.runtime.zero.muon.products import BATCHED
from deepspeed.runtime.zero.muon.watch import Watcher

# Elements a thread has at a time where the elementwise work is done on a CPU: with its operands and what is made of
# them it fits a core's L2 cache, so that memory is passed once for several operations. torch gives a thread no less.
CPU_SLICE_NUMEL = 2**15
MIN_CPU_PART_NUMEL = 2**17


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
class _Slices:
    """The slices of a rank's partitions on one device, by round: `kept` ones go to the batch buffer, `sent` ones to
    the send buffer. `straddling` and `indices` (one for each part) number matrices, int64 on that device: made once,
    since a copy to a device waits for it."""
    kept: tuple[tuple[Part, ...], ...]
    sent: tuple[tuple[Part, ...], ...]
    straddling: torch.Tensor
    indices: tuple[torch.Tensor, ...]

    def parts(self) -> Iterator[Part]:
        return (part for parts in (*self.kept, *self.sent) for part in parts)


class MuonStep:
    """Executes a rank's plan. Built once; `run` does a step and leaves nothing but buffers behind. Nothing in it waits
    for an accelerator.

    The gradient is read and never written: the blend is made twice, once for the norms and once to be sent, which
    costs a pass over memory and saves a copy of the partition. `products` may be set before the first step.
    """

    def __init__(self, plan: RankPlan, kernel: Kernel, exchange: Exchange, workspace: Workspace):
        self.plan = plan
        self.kernel = kernel
        self.exchange = exchange
        self.workspace = workspace
        self.products = BATCHED
        self.orthogonalized = 0
        self.watchers: list[Watcher] = []
        on_cpu = workspace.device.type == "cpu"
        self._together = [
            merge(found.batches, method=kernel.method, steps=len(kernel.triples), on_cpu=on_cpu)
            for found in plan.rounds
        ]
        self._slices_on: dict[torch.device, _Slices] = {}
        self._slices: Optional[_Slices] = None
        self._partitions: Sequence[Partition] = ()
        self._divisors: list[torch.Tensor] = []

    @torch.no_grad()
    def run(self, partitions: Sequence[Partition], meanwhile: Optional[Callable[[], None]] = None) -> None:
        """Advance momenta and step weights in place. Collective over the plan's process group. `meanwhile` is called
        once, while an exchange that nothing else hides is in flight."""
        self._partitions = partitions
        self._slices = self._find_slices(partitions[0].weight.device)
        for watcher in tuple(self.watchers):
            watcher.begin(self)
        self._divisors = self._advance_and_norms()
        run_rounds(self, len(self.plan.rounds), meanwhile)
        for watcher in self.watchers:
            watcher.end(self)
        self._partitions, self._slices, self._divisors = (), None, []

    @property
    def partitions(self) -> Sequence[Partition]:
        """Those of the step that is being done, by number; empty between steps."""
        return self._partitions

    def divisors(self, matrices: Sequence[int]) -> torch.Tensor:
        """What the blends of these matrices are divided by in this step, fp32 [len(matrices)]."""
        return torch.stack([self._divisors[index] for index in matrices])

    def normalized(self, part: Part) -> list[torch.Tensor]:
        """The slices of `part` as they are orthogonalized, fp32, new."""
        return list(torch._foreach_div(self._blend(part), [self._divisors[index] for index in part.matrices]))

    def _find_slices(self, device: torch.device) -> _Slices:
        if device not in self._slices_on:
            # On an accelerator a list of any length is one launch.
            limit = max(MIN_CPU_PART_NUMEL,
                        torch.get_num_threads() * CPU_SLICE_NUMEL) if device.type == "cpu" else None
            kept, sent = (tuple(parts_of(fragments, limit) for fragments in by_round)
                          for by_round in ([found.kept for found in self.plan.rounds],
                                           [found.sent for found in self.plan.rounds]))
            numbers = [self.plan.plan.straddling, *(part.matrices for parts in (*kept, *sent) for part in parts)]
            straddling, *indices = [torch.tensor(own, dtype=torch.long, device=device) for own in numbers]
            self._slices_on[device] = _Slices(kept, sent, straddling, tuple(indices))
        return self._slices_on[device]

    def _advance_and_norms(self) -> list[torch.Tensor]:
        """Advance the momenta, and the divisor of each matrix's blend: its Frobenius norm, 0-dim fp32, the same on
        every rank.

        Squares of fp32 are exact in float64, so what is left to depend on the cut is the last bit of a float64 sum,
        far below what an fp32 divisor can show.
        """
        found = self._slices
        device = found.straddling.device
        squares = torch.zeros(len(self.plan.plan.matrices), dtype=torch.float64, device=device)
        for part, index in zip(found.parts(), found.indices):
            partition = self._partitions[part.partition]
            momenta = gather_fragments(partition.momentum, part.fragments)
            update.advance_momentum_(momenta, gather_fragments(partition.grad, part.fragments), beta=partition.beta)
            put_back_copies(partition.momentum, part.fragments, momenta)
            squares.index_add_(0, index, update.squared_norms(self._blend(part)))
        if self.exchange.world_size > 1 and len(found.straddling):
            total = squares[found.straddling].to(self.workspace.device)
            self.exchange.sum_over_ranks_(total)
            squares[found.straddling] = total.to(device)
        return list(newton_schulz.divisor(squares.sqrt()).unbind())

    def _blend(self, part: Part) -> list[torch.Tensor]:
        """fp32 blends of a part; not to be written to (they may be the momentum itself)."""
        partition = self._partitions[part.partition]
        return update.blend(gather_fragments(partition.momentum, part.fragments),
                            gather_fragments(partition.grad, part.fragments),
                            beta=partition.beta,
                            nesterov=partition.nesterov)

    def _normalize_into(self, buffer: torch.Tensor, parts: Sequence[Part]) -> None:
        for part in parts:
            normalized = self.normalized(part)
            if buffer.device != normalized[0].device:
                # Cast where the slices live: with offload only the wire dtype crosses to the accelerator.
                normalized = [tensor.to(buffer.dtype) for tensor in normalized]
            torch._foreach_copy_(slices(buffer, part.offsets_in_buffer, part.numels), normalized)

    def _step_weights(self, buffer: torch.Tensor, parts: Sequence[Part]) -> None:
        matrices = self.plan.plan.matrices
        for part in parts:
            partition = self._partitions[part.partition]
            factors = [
                partition.lr * update.lr_scale(matrices[index].fan_out, matrices[index].fan_in, partition.adjust_lr_fn)
                for index in part.matrices
            ]
            updates = slices(buffer, part.offsets_in_buffer, part.numels)
            for watcher in self.watchers:
                watcher.before_weights(self, part, updates, factors)
            weights = gather_fragments(partition.weight, part.fragments)
            update.step_weights_(weights, updates, factors, decay=1 - partition.lr * partition.weight_decay)
            put_back_copies(partition.weight, part.fragments, weights)

    def _there(self, index: int) -> ExchangeBuffers:
        return exchange_buffers(self.workspace, self.plan.rounds[index], self.kernel.dtype, back=False)

    def _back(self, index: int) -> ExchangeBuffers:
        return exchange_buffers(self.workspace, self.plan.rounds[index], self.kernel.dtype, back=True)

    def _batch(self, index: int) -> torch.Tensor:
        return batch_buffer(self.workspace, self.plan.rounds[index], self.kernel.dtype)

    def pack(self, index: int) -> None:
        if self.plan.rounds[index].exchanged and not self.plan.plan.replicated:
            self._normalize_into(self._there(index).sent, self._slices.sent[index])

    def send_to_owners(self, index: int) -> Optional[Handle]:
        found = self.plan.rounds[index]
        if not found.exchanged or self.plan.plan.replicated:
            return None
        there = self._there(index)
        return self.exchange.start_all_to_all(there.received, there.sent, found.recv_splits, found.send_splits)

    def assemble(self, index: int) -> None:
        found = self.plan.rounds[index]
        self._normalize_into(self._batch(index), self._slices.kept[index])
        if found.exchanged and not self.plan.plan.replicated:
            copy_received_to_batch(self._there(index).received, self._batch(index), found)

    def orthogonalize(self, index: int) -> None:
        buffer = self._batch(index)
        owned = self._owned(index) if self.watchers else {}
        for together in self._together[index]:
            self._orthogonalize_(buffer, together, owned)
            self.orthogonalized += together.count

    def _orthogonalize_(self, buffer: torch.Tensor, together: Together, owned: dict[Batch, list[int]]) -> None:
        # Without column blocks these are views of the matrices as they stand.
        whole = [_whole(batch_view(buffer, batch), batch) for batch in together.batches]
        for watcher in self.watchers:
            for batch, matrices in zip(together.batches, whole):
                watcher.before_iteration(self, owned[batch], matrices)
        updates = newton_schulz.iterate_together(whole,
                                                 together.rows,
                                                 together.cols,
                                                 gram=together.gram,
                                                 triples=self.kernel.triples,
                                                 products=self.products)
        for batch, made in zip(together.batches, updates):
            for watcher in self.watchers:
                watcher.after_iteration(self, owned[batch], made)
            batch_view(buffer, batch).copy_(made.unflatten(-1, (batch.column_blocks, -1)).transpose(1, 2))

    def _owned(self, index: int) -> dict[Batch, list[int]]:
        """The matrices of round `index` that are owned here, by batch."""
        plan = self.plan.plan
        left = iter([matrix for matrix in plan.rounds[index].matrices if plan.owners[matrix] == self.plan.rank])
        return {batch: list(islice(left, batch.count)) for batch in self.plan.rounds[index].batches}

    def send_back(self, index: int) -> Optional[Handle]:
        found = self.plan.rounds[index]
        if not found.exchanged:
            return None
        back = self._back(index)
        copy_batch_to_received(self._batch(index), back.received, found)
        return self.exchange.start_all_to_all(back.sent, back.received, found.send_splits, found.recv_splits)

    def apply_kept(self, index: int) -> None:
        self._step_weights(self._batch(index), self._slices.kept[index])

    def apply_returned(self, index: int) -> None:
        if self.plan.rounds[index].exchanged:
            self._step_weights(self._back(index).sent, self._slices.sent[index])


def _whole(blocks: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[count, column_blocks, rows, width] as [count, rows, cols]: the blocks as columns side by side."""
    return blocks.transpose(1, 2).reshape(batch.count, batch.rows, batch.cols)
