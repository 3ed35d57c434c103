# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What is exchanged and orthogonalized in which order: frozen data, built once, the same on every rank.

A plan is layouts + owners + rounds. A *round* is what fits the workspace: one forward exchange of slices to the
owners, one batched orthogonalization, one exchange back. Only the way there is written down; the way back swaps the
two sides. A `RankPlan` is the part of it that one rank executes. Nothing here imports torch or knows a process group.
"""

import hashlib
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Iterable, Optional, Sequence

from deepspeed.runtime.zero.muon.layout import GroupLayout, Placement
from deepspeed.runtime.zero.muon.matrices import Matrix
from deepspeed.runtime.zero.muon.owners import assign_owners

FP64_BYTES = 8

# The batch, and the tensors of its size that the iteration holds at a time.
BATCH_COPIES = 5
# What is held for each element of a round at most: the exchange buffers of the way there and of the way back, each to
# send and to receive, and the batch.
HELD_PER_ROUND_NUMEL = 4 + BATCH_COPIES
# A local round of fewer elements than this is not split to hide an exchange: its launches would cost more.
MIN_SPLIT_NUMEL = 2**22


@dataclass(frozen=True)
class Round:
    """Matrices handled together: `straddling` ones need an exchange, `whole` ones are complete on their owner."""
    matrices: tuple[int, ...]
    exchanged: bool


@dataclass(frozen=True)
class Plan:
    """The same on every rank: matrices (indices into these tuples are used everywhere), owners, rounds.

    `layout_of[i]` is the index of the layout, and so of the partition tensor, that matrix i comes from.
    `straddling` lists the matrices whose squared norms are summed over ranks, in this order.
    """
    world_size: int
    itemsize: int
    replicated: bool
    matrices: tuple[Matrix, ...]
    placements: tuple[Placement, ...]
    layout_of: tuple[int, ...]
    costs: tuple[int, ...]
    owners: tuple[int, ...]
    rounds: tuple[Round, ...]
    straddling: tuple[int, ...]

    def digests(self) -> list[tuple[str, str]]:
        """(parameter name, digest) of each matrix and, last, of the plan as a whole: 16 hex digits each."""
        whole = hashlib.sha256(
            repr((self.world_size, self.itemsize, self.replicated, self.owners, self.rounds)).encode())
        digests = []
        for matrix, placement in zip(self.matrices, self.placements):
            own = hashlib.sha256(repr((matrix, placement)).encode())
            whole.update(own.digest())
            digests.append((matrix.name, own.hexdigest()[:16]))
        return [*digests, ("the order of exchanges", whole.hexdigest()[:16])]

    def report(self) -> "PlanReport":
        """Bytes, matrices, FLOPs and workspace of every rank. O(matrices + rounds * world_size)."""
        return _report(self)


@dataclass(frozen=True)
class LocalFragment:
    """A slice of this rank's partition number `partition` and where it stands in a buffer of the round.

    `offset_in_buffer` counts elements in the exchange buffer (a fragment sent to another owner) or in the batch buffer
    (a fragment of a matrix owned here). In the partition it may be cut into strips, see layout.Fragment; in a buffer
    its elements are consecutive.
    """
    matrix: int
    partition: int
    offset_in_partition: int
    numel: int
    offset_in_buffer: int
    strips: int = 1
    stride: int = 0


@dataclass(frozen=True)
class RemoteFragment:
    """A slice, held by another rank, of a matrix owned here: its place in the exchange buffer and in the batch."""
    offset_in_exchange: int
    offset_in_batch: int
    numel: int


@dataclass(frozen=True)
class Batch:
    """`count` matrices of one shape that stand one after another in the batch buffer from `offset_in_batch`."""
    offset_in_batch: int
    count: int
    rows: int
    cols: int
    column_blocks: int


@dataclass(frozen=True)
class RankRound:
    """One round as one rank executes it. Split sizes are elements per rank, as all_to_all_single has them.

    `kept` fragments go from the partition to the batch buffer, `sent` ones to the send buffer, ordered by destination;
    `received` ones from the receive buffer, ordered by source, to the batch buffer. On the way back the roles swap.
    """
    exchanged: bool
    kept: tuple[LocalFragment, ...]
    sent: tuple[LocalFragment, ...]
    received: tuple[RemoteFragment, ...]
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    batches: tuple[Batch, ...]
    batch_numel: int

    @property
    def send_numel(self) -> int:
        return sum(self.send_splits)

    @property
    def recv_numel(self) -> int:
        return sum(self.recv_splits)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: its part of each round."""
    plan: Plan
    rank: int
    rounds: tuple[RankRound, ...]


@dataclass(frozen=True)
class PlanReport:
    """Figures of a plan, each tuple indexed by rank. What goes back is the way there with sides swapped, except for
    replicated layouts, where nothing is sent to the owner.

    `workspace_bytes` is what a rank holds beyond the momentum during a step: exchange buffers for two rounds, one on
    its way to the owners and one on its way back while a third is orthogonalized, and the batch with what the
    iteration makes of it, which is at most four times as much: itemsize * (2 * (sent + received) + 5 * batch), with
    the largest round for each. fp32 slices that are packed or applied while no batch is at work stay below that. The
    iteration rounds rows and columns up to multiples of 16, which counts for matrices that are smaller than that.
    """
    forward_sent_bytes: tuple[int, ...]
    forward_received_bytes: tuple[int, ...]
    back_sent_bytes: tuple[int, ...]
    back_received_bytes: tuple[int, ...]
    norm_bytes: int
    exchanges: int
    matrices: tuple[int, ...]
    flops: tuple[int, ...]
    workspace_bytes: tuple[int, ...]

    @property
    def received_bytes(self) -> tuple[int, ...]:
        return tuple(there + back for there, back in zip(self.forward_received_bytes, self.back_received_bytes))

    @property
    def flops_max_over_mean(self) -> float:
        return max_over_mean(self.flops)


def max_over_mean(values: Sequence[int]) -> float:
    """Largest over average: 1.0 is perfect balance. 1.0 as well where all are zero."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def round_numel_within(workspace_mb: float, itemsize: int, limit: Optional[int] = None) -> int:
    """The most elements an owner may orthogonalize in a round, so that a rank holds no more than `workspace_mb` MiB at
    `itemsize` bytes an element (see PlanReport), and no more than `limit` elements."""
    numel = max(1, int(workspace_mb * 2**20) // (itemsize * HELD_PER_ROUND_NUMEL))
    return numel if limit is None else min(numel, limit)


def build_plan(layouts: Sequence[GroupLayout], *, costs: Sequence[int], itemsize: int, round_numel: int) -> Plan:
    """Owners and rounds for the matrices of `layouts`, which share a process group.

    `costs` are Newton-Schulz FLOPs per matrix in the order of the layouts, `itemsize` the bytes of an element on the
    wire, `round_numel` the most elements an owner orthogonalizes in a round; a larger matrix is a round of its own.

    Raises ValueError where layouts differ in world size or mix replicated with partitioned ones.
    """
    world_sizes = {layout.world_size for layout in layouts}
    kinds = {layout.replicated for layout in layouts}
    if len(world_sizes) != 1 or len(kinds) != 1:
        raise ValueError(f"Muon plan: layouts of one plan must share world size and kind, found world sizes "
                         f"{sorted(world_sizes)}, replicated {sorted(kinds)}")
    world_size, replicated = world_sizes.pop(), kinds.pop()
    matrices = tuple(matrix for layout in layouts for matrix in layout.matrices)
    placements = tuple(placement for layout in layouts for placement in layout.placements)
    layout_of = tuple(index for index, layout in enumerate(layouts) for _ in layout.matrices)
    if len(costs) != len(matrices):
        raise ValueError(f"Muon plan: {len(costs)} costs for {len(matrices)} matrices")
    owners = assign_owners(placements, costs, world_size)
    # A round of a replicated layout comes back to every rank from all owners, so an owner gets a share of the bound.
    limit = max(1, round_numel // world_size) if replicated else round_numel
    straddling = [index for index, placement in enumerate(placements) if len(placement.holders()) > 1]
    crossing = frozenset(straddling)
    whole = [index for index in range(len(matrices)) if index not in crossing]
    exchanged = [Round(tuple(found), True) for found in _rounds(straddling, matrices, owners, limit)]
    if exchanged:
        limit = min(limit, _half_of_the_heaviest(whole, matrices, owners))
    local = [Round(tuple(found), False) for found in _rounds(whole, matrices, owners, limit)]
    return Plan(
        world_size=world_size,
        itemsize=itemsize,
        replicated=replicated,
        matrices=matrices,
        placements=placements,
        layout_of=layout_of,
        costs=tuple(costs),
        owners=owners,
        # One local round goes first, the others last: the first exchange there and the last one back are hidden.
        rounds=(*local[:1], *exchanged, *local[1:]),
        straddling=() if replicated else tuple(straddling))


def _half_of_the_heaviest(indices: Sequence[int], matrices: Sequence[Matrix], owners: Sequence[int]) -> int:
    """A limit on a round by which the owner with the most elements of `indices` has two, if they are worth it."""
    loads: dict[int, int] = {}
    for index in indices:
        loads[owners[index]] = loads.get(owners[index], 0) + matrices[index].numel
    heaviest = max(loads.values(), default=0)
    return max(-(-heaviest // 2), MIN_SPLIT_NUMEL // 2)


def _rounds(indices: Iterable[int], matrices: Sequence[Matrix], owners: Sequence[int], limit: int) -> list[list[int]]:
    """Deal matrices to rounds so that no owner has more than `limit` elements in one, same shapes side by side."""
    rounds: list[list[int]] = []
    current: dict[int, tuple[int, int]] = {}
    by_shape = sorted(indices, key=lambda index: (-matrices[index].numel, _shape(matrices[index]), index))
    for index in by_shape:
        number, filled = current.get(owners[index], (0, 0))
        numel = matrices[index].numel
        if filled and filled + numel > limit:
            number, filled = number + 1, 0
        current[owners[index]] = (number, filled + numel)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds


def rank_plan(plan: Plan, rank: int) -> RankPlan:
    """The part of `plan` that `rank` executes."""
    return RankPlan(plan, rank, tuple(_rank_round(plan, found, rank) for found in plan.rounds))


def _rank_round(plan: Plan, found: Round, rank: int) -> RankRound:
    owned = [index for index in found.matrices if plan.owners[index] == rank]
    batch_offsets = dict(zip(owned, accumulate([0, *(plan.matrices[index].numel for index in owned)])))
    kept, incoming, outgoing = [], [], []
    for index in found.matrices:
        owner, placement = plan.owners[index], plan.placements[index]
        for fragment in placement.fragments() if owner == rank else placement.on_rank(rank):
            if owner == fragment.rank == rank:
                kept.append(
                    LocalFragment(index, plan.layout_of[index], fragment.offset_in_partition, fragment.numel,
                                  batch_offsets[index] + fragment.offset_in_matrix, fragment.strips, fragment.stride))
            elif owner == rank:
                incoming.append((fragment.rank, batch_offsets[index] + fragment.offset_in_matrix, fragment.numel))
            else:
                outgoing.append((owner, index, fragment))
    # Sorting is stable, so both sides of a pair list its fragments in the order of the round's matrices.
    incoming.sort(key=lambda entry: entry[0])
    outgoing.sort(key=lambda entry: entry[0])
    exchange_offsets = accumulate([0, *(numel for _, _, numel in incoming)])
    received = tuple(
        RemoteFragment(offset, in_batch, numel) for offset, (_, in_batch, numel) in zip(exchange_offsets, incoming))
    exchange_offsets = accumulate([0, *(fragment.numel for _, _, fragment in outgoing)])
    sent = tuple(
        LocalFragment(index, plan.layout_of[index], fragment.offset_in_partition, fragment.numel, offset,
                      fragment.strips, fragment.stride)
        for offset, (_, index, fragment) in zip(exchange_offsets, outgoing))
    return RankRound(exchanged=found.exchanged,
                     kept=tuple(kept),
                     sent=sent,
                     received=received,
                     send_splits=_splits(plan.world_size,
                                         ((owner, fragment.numel) for owner, _, fragment in outgoing)),
                     recv_splits=_splits(plan.world_size, ((source, numel) for source, _, numel in incoming)),
                     batches=tuple(_batches(plan.matrices, owned)),
                     batch_numel=sum(plan.matrices[index].numel for index in owned))


def _splits(world_size: int, transfers: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    splits = [0] * world_size
    for rank, numel in transfers:
        splits[rank] += numel
    return tuple(splits)


def _batches(matrices: Sequence[Matrix], owned: Sequence[int]) -> Iterable[Batch]:
    offset = 0
    for (rows, cols, blocks), alike in groupby(owned, key=lambda index: _shape(matrices[index])):
        count = sum(1 for _ in alike)
        yield Batch(offset, count, rows, cols, blocks)
        offset += count * rows * cols


def _shape(matrix: Matrix) -> tuple[int, int, int]:
    return matrix.rows, matrix.cols, matrix.column_blocks


def _report(plan: Plan) -> PlanReport:
    ranks = range(plan.world_size)
    matrices, flops = [0] * plan.world_size, [0] * plan.world_size
    sent, received = [0] * plan.world_size, [0] * plan.world_size
    peak_sent, peak_received, peak_batch = [0] * plan.world_size, [0] * plan.world_size, [0] * plan.world_size
    for found in plan.rounds:
        # `change` is the difference from rank to rank of what ranks send: a run of equal shares costs two entries.
        change, round_received, batch = [0] * (plan.world_size + 1), [0] * plan.world_size, [0] * plan.world_size
        for index in found.matrices:
            owner, numel = plan.owners[index], plan.matrices[index].numel
            matrices[owner] += 1
            flops[owner] += plan.costs[index]
            batch[owner] += numel
            own = sum(fragment.numel for fragment in plan.placements[index].on_rank(owner))
            round_received[owner] += (plan.world_size - 1) * numel if plan.replicated else numel - own
            change[owner] -= own
            change[owner + 1] += own
            for run in plan.placements[index].runs():
                change[run.first_rank] += run.numel
                change[run.last_rank + 1] -= run.numel
        round_sent = list(accumulate(change))
        for rank in ranks:
            sent[rank] += round_sent[rank]
            received[rank] += round_received[rank]
            peak_sent[rank] = max(peak_sent[rank], round_sent[rank])
            peak_received[rank] = max(peak_received[rank], round_received[rank])
            peak_batch[rank] = max(peak_batch[rank], batch[rank])
    in_bytes = [tuple(plan.itemsize * count for count in counts) for counts in (sent, received)]
    forward_sent, forward_received = [(0, ) * plan.world_size] * 2 if plan.replicated else in_bytes
    exchanges = sum(found.exchanged for found in plan.rounds)
    return PlanReport(forward_sent_bytes=forward_sent,
                      forward_received_bytes=forward_received,
                      back_sent_bytes=in_bytes[1],
                      back_received_bytes=in_bytes[0],
                      norm_bytes=FP64_BYTES * len(plan.straddling),
                      exchanges=exchanges if plan.replicated else 2 * exchanges,
                      matrices=tuple(matrices),
                      flops=tuple(flops),
                      workspace_bytes=tuple(plan.itemsize *
                                            (2 *
                                             (peak_sent[rank] + peak_received[rank]) + BATCH_COPIES * peak_batch[rank])
                                            for rank in ranks))
