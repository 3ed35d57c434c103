# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which rank orthogonalizes which matrix. Plain integers, deterministic, the same on every rank."""

import heapq
from typing import Sequence

from deepspeed.runtime.zero.muon.layout import Placement, Replica

# An owner that holds a share of the matrix saves that share's bytes. Over more holders than this the saving is under
# 1/64 of the matrix and balance is worth more, so any rank may own it.
MAX_HOLDERS_PREFERRED = 64


def assign_owners(placements: Sequence[Placement], costs: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Owner rank of each matrix, given its placement and its Newton-Schulz cost (FLOPs).

    A matrix whole on one rank is owned there: no bytes. The others are dealt by longest processing time first (Graham
    1969): the costliest matrix goes to the least loaded candidate, ties by rank, then by index. Loads start from what
    ranks own already. Candidates are the holders, or all ranks where the matrix is cut finely or replicated.

    O(matrices * (MAX_HOLDERS_PREFERRED + log world_size)) time, O(matrices + world_size) memory.
    """
    owners = [-1] * len(placements)
    loads = [0] * world_size
    to_deal = []
    for index, placement in enumerate(placements):
        holders = placement.holders()
        if len(holders) == 1:
            owners[index] = holders[0]
            loads[holders[0]] += costs[index]
        else:
            to_deal.append(index)
    to_deal.sort(key=lambda index: (-costs[index], index))
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for index in to_deal:
        placement = placements[index]
        holders = placement.holders()
        if isinstance(placement, Replica) or len(holders) == world_size or len(holders) > MAX_HOLDERS_PREFERRED:
            owner = _least_loaded(least, loads)
        else:
            owner = min(holders, key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += costs[index]
    return tuple(owners)


def _least_loaded(least: list[tuple[int, int]], loads: Sequence[int]) -> int:
    """Rank of the smallest load. Entries of `least` lag behind `loads` (which only grow) and are renewed when met."""
    while True:
        load, rank = least[0]
        if load == loads[rank]:
            return rank
        heapq.heapreplace(least, (loads[rank], rank))
