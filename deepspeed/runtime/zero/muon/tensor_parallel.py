# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One layout over data x tensor ranks from the layouts that the tensor ranks have on their own. Plain integers.

Tensor parallelism cuts a matrix into row or column blocks, ZeRO cuts each block into slices. Row blocks one after
another are the matrix itself; column blocks one after another are the matrix in another order, which the owner puts
right.
"""

from dataclasses import dataclass, replace
from typing import Optional, Sequence

from deepspeed.runtime.zero.muon.layout import Fragment, GroupLayout
from deepspeed.runtime.zero.muon.matrices import Matrix

CUT_ROWS = 0
CUT_COLUMNS = 1


@dataclass(frozen=True)
class TensorShard:
    """What one tensor rank knows: `ranks[k]` is the rank in the joint group of rank k of its data-parallel group,
    `layout` describes its own blocks, `cuts[i]` along which dimension matrix i is cut (None: not)."""
    ranks: tuple[int, ...]
    layout: GroupLayout
    cuts: tuple[Optional[int], ...]


def join(shards: Sequence[TensorShard]) -> GroupLayout:
    """The layout of whole matrices over all ranks of `shards`, which are in the order of the tensor ranks.

    A matrix that is not cut is one of each tensor rank's own: copies are stepped alike.
    Raises ValueError where the shards do not belong to one model, or blocks of columns differ in width.
    """
    first = shards[0]
    for rank, shard in enumerate(shards):
        if shard.cuts != first.cuts or shard.layout.partition_numel != first.layout.partition_numel:
            raise ValueError(f"Muon: tensor rank {rank} holds other parameters, or partitions of another size "
                             f"({shard.layout.partition_numel}), than tensor rank 0 ({first.layout.partition_numel}); "
                             "uneven tensor-parallel shards are supported with \"tensor_parallel\": \"shard\" only")
    matrices: list[Matrix] = []
    fragments: list[list[Fragment]] = []
    for index, cut in enumerate(first.cuts):
        own = [shard.layout.matrices[index] for shard in shards]
        placed = [_joint_fragments(shard, index) for shard in shards]
        if cut is None:
            for tensor_rank, (matrix, found) in enumerate(zip(own, placed)):
                matrices.append(replace(matrix, name=f"{matrix.name} of tensor rank {tensor_rank}"))
                fragments.append(found)
            continue
        matrices.append(_joined(own, cut))
        offset, joined = 0, []
        for matrix, found in zip(own, placed):
            joined.extend(replace(f, offset_in_matrix=f.offset_in_matrix + offset) for f in found)
            offset += matrix.numel
        fragments.append(joined)
    return GroupLayout.listed(matrices=matrices,
                              fragments=fragments,
                              world_size=sum(len(shard.ranks) for shard in shards),
                              partition_numel=first.layout.partition_numel)


def _joint_fragments(shard: TensorShard, index: int) -> list[Fragment]:
    return [replace(f, rank=shard.ranks[f.rank]) for f in shard.layout.placements[index].fragments()]


def _joined(own: Sequence[Matrix], cut: int) -> Matrix:
    along = "cols" if cut == CUT_ROWS else "rows"
    if len({getattr(matrix, along) for matrix in own}) > 1 or (cut == CUT_COLUMNS and len({m.cols for m in own}) > 1):
        raise ValueError(f"Muon: the tensor-parallel blocks of {own[0].name} do not fit together: "
                         f"{[(matrix.rows, matrix.cols) for matrix in own]}")
    if cut == CUT_ROWS:
        return replace(own[0], rows=sum(matrix.rows for matrix in own), fan_out=sum(matrix.fan_out for matrix in own))
    return replace(own[0],
                   cols=sum(matrix.cols for matrix in own),
                   fan_in=sum(matrix.fan_in for matrix in own),
                   column_blocks=len(own))
