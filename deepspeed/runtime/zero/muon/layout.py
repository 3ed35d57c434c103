# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where the slices of each matrix lie: frozen records made of plain integers.

A *layout* says, for one parameter group and all ranks of its process group, which elements of which matrix stand where
in which rank's partition. It is the only thing an engine tells the optimizer. Nothing here imports torch or knows a
process group, so a layout for thousands of ranks is built and checked on one CPU.

Fragments are described by a *placement* per matrix and made on demand: 10,000 matrices cut over 16,384 ranks have 164
million fragments, of which a rank ever needs only its own and those of the matrices it owns.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Iterator, Optional, Sequence, Union


@dataclass(frozen=True)
class Matrix:
    """A 2-D unit orthogonalized on its own: `numel` consecutive elements of a parameter, row-major [rows, cols].

    `fan_out` and `fan_in` are those of the product it computes, which for weights stored [in, out] (transformers'
    Conv1D) are not `rows` and `cols`; only the update's scale reads them. With `column_blocks` above 1 the elements
    are in the order of that many blocks [rows, cols / column_blocks], one after another, as tensor-parallel ranks hold
    a matrix that is cut along its columns.
    """
    name: str
    rows: int
    cols: int
    offset_in_parameter: int
    fan_out: int
    fan_in: int
    column_blocks: int = 1

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Fragment:
    """Matrix ∩ partition: `numel` consecutive elements of a matrix that lie consecutively in one rank's partition."""
    rank: int
    offset_in_matrix: int
    offset_in_partition: int
    numel: int


@dataclass(frozen=True)
class Run:
    """Consecutive ranks `first_rank .. last_rank` that each hold `numel` elements of a matrix."""
    first_rank: int
    last_rank: int
    numel: int


@dataclass(frozen=True)
class UniformCut:
    """A span of an axis that is cut into equal shards, shard k on rank k.

    The axis is a group's flat buffer (every matrix of the group shares it) or one parameter (cut on its own). The
    matrix occupies [offset_on_axis, offset_on_axis + numel); the shard of rank k starts at k * shard_numel and lies in
    the rank's partition from `shard_offset_in_partition`.
    """
    offset_on_axis: int
    numel: int
    shard_numel: int
    shard_offset_in_partition: int

    def _rank_at(self, offset_on_axis: int) -> int:
        return offset_on_axis // self.shard_numel

    @property
    def first_rank(self) -> int:
        return self._rank_at(self.offset_on_axis)

    @property
    def last_rank(self) -> int:
        return self._rank_at(self.offset_on_axis + self.numel - 1)

    def holders(self) -> range:
        return range(self.first_rank, self.last_rank + 1)

    def on_rank(self, rank: int) -> tuple[Fragment, ...]:
        start = max(self.offset_on_axis, rank * self.shard_numel)
        stop = min(self.offset_on_axis + self.numel, (rank + 1) * self.shard_numel)
        if start >= stop:
            return ()
        return (Fragment(rank=rank,
                         offset_in_matrix=start - self.offset_on_axis,
                         offset_in_partition=self.shard_offset_in_partition + start - rank * self.shard_numel,
                         numel=stop - start), )

    def fragments(self) -> Iterator[Fragment]:
        for rank in self.holders():
            yield from self.on_rank(rank)

    def runs(self) -> tuple[Run, ...]:
        first, last = self.first_rank, self.last_rank
        if first == last:
            return (Run(first, first, self.numel), )
        head = (first + 1) * self.shard_numel - self.offset_on_axis
        tail = self.offset_on_axis + self.numel - last * self.shard_numel
        inner = (Run(first + 1, last - 1, self.shard_numel), ) if last - first > 1 else ()
        return (Run(first, first, head), *inner, Run(last, last, tail))


@dataclass(frozen=True)
class ListedFragments:
    """Fragments as an engine lists them, in the order of their `offset_in_matrix`; together they are the matrix."""
    listed: tuple[Fragment, ...]

    @property
    def numel(self) -> int:
        return sum(fragment.numel for fragment in self.listed)

    def holders(self) -> Sequence[int]:
        return sorted({fragment.rank for fragment in self.listed})

    def on_rank(self, rank: int) -> tuple[Fragment, ...]:
        return tuple(fragment for fragment in self.listed if fragment.rank == rank)

    def fragments(self) -> Iterator[Fragment]:
        return iter(self.listed)

    def runs(self) -> tuple[Run, ...]:
        return tuple(Run(fragment.rank, fragment.rank, fragment.numel) for fragment in self.listed)


@dataclass(frozen=True)
class Replica:
    """The whole matrix on every rank, at the same place: no rank sends it, every rank wants the update."""
    numel: int
    offset_in_partition: int
    world_size: int

    def holders(self) -> range:
        return range(self.world_size)

    def on_rank(self, rank: int) -> tuple[Fragment, ...]:
        return (Fragment(rank, 0, self.offset_in_partition, self.numel), )

    def fragments(self) -> Iterator[Fragment]:
        for rank in self.holders():
            yield from self.on_rank(rank)

    def runs(self) -> tuple[Run, ...]:
        return (Run(0, self.world_size - 1, self.numel), )


Placement = Union[UniformCut, ListedFragments, Replica]


@dataclass(frozen=True)
class GroupLayout:
    """All matrices of one partition tensor and where each lies on every rank of its process group.

    `partition_numel` is the number of elements of a rank's partition (the same on all ranks, padding included);
    `placements[i]` belongs to `matrices[i]`. Build one with the constructors below, which check it.
    """
    world_size: int
    partition_numel: int
    matrices: tuple[Matrix, ...]
    placements: tuple[Placement, ...]
    replicated: bool = False

    @classmethod
    def flat(cls, *, matrices: Sequence[Matrix], flat_offsets: Sequence[int], world_size: int,
             partition_numel: int) -> "GroupLayout":
        """One flat buffer of world_size * partition_numel elements, rank k holding the k-th part (ZeRO-1/2,
        BF16_Optimizer; at world_size 1 a whole parameter). `flat_offsets[i]` is where `matrices[i]` starts in it.

        Raises ValueError where a matrix leaves the buffer or two matrices overlap.
        """
        _require(len(matrices) == len(flat_offsets), f"{len(matrices)} matrices but {len(flat_offsets)} offsets")
        end = world_size * partition_numel
        previous_name, previous_stop = "", 0
        for offset, matrix in sorted(zip(flat_offsets, matrices), key=lambda pair: pair[0]):
            stop = offset + matrix.numel
            _require(
                0 <= offset and stop <= end, f"{matrix.name} occupies [{offset}, {stop}) of a flat buffer of "
                f"{end} elements ({world_size} partitions of {partition_numel})")
            _require(
                offset >= previous_stop,
                f"{matrix.name} occupies [{offset}, {stop}), which overlaps {previous_name} up to {previous_stop}")
            previous_name, previous_stop = matrix.name, stop
        placements = tuple(
            UniformCut(offset, matrix.numel, partition_numel, 0) for offset, matrix in zip(flat_offsets, matrices))
        return cls(world_size, partition_numel, tuple(matrices), placements)

    @classmethod
    def sharded(cls,
                *,
                parameters: Sequence[Sequence[Matrix]],
                parameter_numels: Sequence[int],
                world_size: int,
                shard_offsets: Optional[Sequence[int]] = None,
                partition_numel: Optional[int] = None) -> "GroupLayout":
        """Each parameter cut on its own into world_size equal shards, the last ones short or empty (ZeRO-3).

        `parameters[p]` are the matrices of parameter p, which has `parameter_numels[p]` elements, so shards of
        ceil(numel / world_size). `shard_offsets[p]` is where its shard lies in the partition (default: one after
        another without gaps), `partition_numel` the partition's size (default: the sum of the shards).

        Raises ValueError where a matrix leaves its parameter, matrices of a parameter overlap, or shards overlap.
        """
        shard_numels = [-(-numel // world_size) for numel in parameter_numels]
        if shard_offsets is None:
            shard_offsets = [0, *accumulate(shard_numels)][:-1]
        if partition_numel is None:
            partition_numel = sum(shard_numels)
        _check_shards(parameters, shard_offsets, shard_numels, partition_numel)
        matrices, placements = [], []
        for own, numel, shard_numel, base in zip(parameters, parameter_numels, shard_numels, shard_offsets):
            _check_parameter(own, numel)
            matrices.extend(own)
            placements.extend(UniformCut(m.offset_in_parameter, m.numel, shard_numel, base) for m in own)
        return cls(world_size, partition_numel, tuple(matrices), tuple(placements))

    @classmethod
    def listed(cls, *, matrices: Sequence[Matrix], fragments: Sequence[Sequence[Fragment]], world_size: int,
               partition_numel: int) -> "GroupLayout":
        """Fragments as an engine's own tables give them: `fragments[i]` are those of `matrices[i]` on all ranks.

        Raises ValueError where a fragment leaves its matrix or partition, fragments of a matrix overlap or leave a
        gap, or two matrices share elements of a partition.
        """
        _require(len(matrices) == len(fragments), f"{len(matrices)} matrices but {len(fragments)} fragment lists")
        placements = tuple(ListedFragments(tuple(sorted(own, key=lambda f: f.offset_in_matrix))) for own in fragments)
        used: dict[int, list[tuple[int, int, str]]] = {}
        for matrix, placement in zip(matrices, placements):
            _check_cover(matrix, placement.listed)
            for fragment in placement.listed:
                start, stop = fragment.offset_in_partition, fragment.offset_in_partition + fragment.numel
                _require(
                    0 <= fragment.rank < world_size and 0 <= start and stop <= partition_numel,
                    f"{matrix.name}: fragment [{start}, {stop}) on rank {fragment.rank} leaves the partition of "
                    f"{partition_numel} elements on {world_size} ranks")
                used.setdefault(fragment.rank, []).append((start, stop, matrix.name))
        for rank, spans in used.items():
            spans.sort()
            for (_, stop, name), (start, next_stop, next_name) in zip(spans, spans[1:]):
                _require(
                    start >= stop, f"{next_name} occupies [{start}, {next_stop}) of rank {rank}'s partition, which "
                    f"overlaps {name} up to {stop}")
        return cls(world_size, partition_numel, tuple(matrices), placements)

    @classmethod
    def replicate(cls, *, matrices: Sequence[Matrix], offsets_in_partition: Sequence[int], world_size: int,
                  partition_numel: int) -> "GroupLayout":
        """Every rank holds everything (stage 0). Raises ValueError as `flat` does."""
        whole = cls.flat(matrices=matrices,
                         flat_offsets=offsets_in_partition,
                         world_size=1,
                         partition_numel=partition_numel)
        placements = tuple(
            Replica(matrix.numel, offset, world_size) for matrix, offset in zip(matrices, offsets_in_partition))
        return cls(world_size, partition_numel, whole.matrices, placements, replicated=True)

    def straddles(self, index: int) -> bool:
        """Whether matrix `index` has elements on more than one rank."""
        return len(self.placements[index].holders()) > 1


def matrices_of(name: str,
                shape: Sequence[int],
                *,
                expert_stack: bool = False,
                parts: Optional[Sequence[int]] = None,
                transposed: bool = False) -> tuple[Matrix, ...]:
    """The matrices of a parameter of `shape`, consecutive and covering it.

    2-D: the parameter itself. More dimensions: [out, rest], as a convolution computes, or with `expert_stack` (3-D)
    one matrix per expert. `parts` are row counts that sum to the rows of the matrix (of each expert): heads of a
    projection or parts of a fused one become matrices of their own. `transposed` says that the rows are inputs, as
    transformers' Conv1D stores its weight. A parameter without elements has no matrices.

    Raises ValueError for fewer than 2 dimensions, an expert stack that is not 3-D, and parts that do not fit.
    """
    shape = tuple(shape)
    _require(len(shape) >= 2, f"{name} has shape {shape}: Muon needs a matrix; use Adam for it")
    _require(not expert_stack or len(shape) == 3, f"{name} is marked as an expert stack but has shape {shape}")
    stack, rows, rest = (shape[0], shape[1], shape[2:]) if expert_stack else (1, shape[0], shape[1:])
    cols = 1
    for size in rest:
        cols *= size
    if stack * rows * cols == 0:
        return ()
    parts = tuple(parts) if parts else (rows, )
    _require(
        sum(parts) == rows and min(parts) > 0,
        f"{name} has {rows} rows, which do not split into parts of {list(parts)} rows")
    labelled = stack > 1 or len(parts) > 1
    matrices: list[Matrix] = []
    offset = 0
    for index in range(stack * len(parts)):
        part_rows = parts[index % len(parts)]
        fan_out, fan_in = (cols, part_rows) if transposed else (part_rows, cols)
        label = f"{name}[{index}]" if labelled else name
        matrices.append(Matrix(label, part_rows, cols, offset, fan_out, fan_in))
        offset += part_rows * cols
    return tuple(matrices)


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(f"Muon layout: {found}")


def _check_parameter(matrices: Sequence[Matrix], parameter_numel: int) -> None:
    stop = 0
    for matrix in sorted(matrices, key=lambda m: m.offset_in_parameter):
        start = matrix.offset_in_parameter
        _require(
            start >= stop, f"{matrix.name} starts at {start} of its parameter, which overlaps the one before it, "
            f"up to {stop}")
        stop = start + matrix.numel
        _require(stop <= parameter_numel,
                 f"{matrix.name} occupies [{start}, {stop}) of a parameter of {parameter_numel} elements")


def _check_shards(parameters: Sequence[Sequence[Matrix]], offsets: Sequence[int], numels: Sequence[int],
                  partition_numel: int) -> None:
    _require(
        len(parameters) == len(numels) == len(offsets),
        f"{len(parameters)} parameters, {len(numels)} sizes, {len(offsets)} shard offsets")
    stop = 0
    for p in sorted(range(len(parameters)), key=lambda index: offsets[index]):
        name = parameters[p][0].name if parameters[p] else f"parameter {p}"
        _require(offsets[p] >= stop, f"{name}: its shard starts at {offsets[p]}, which overlaps the one up to {stop}")
        stop = offsets[p] + numels[p]
        _require(stop <= partition_numel,
                 f"{name}: its shard [{offsets[p]}, {stop}) leaves the partition of {partition_numel} elements")


def _check_cover(matrix: Matrix, fragments: Sequence[Fragment]) -> None:
    covered = 0
    for fragment in fragments:
        _require(
            fragment.offset_in_matrix == covered and fragment.numel > 0,
            f"{matrix.name}: a fragment of {fragment.numel} elements on rank {fragment.rank} starts at "
            f"{fragment.offset_in_matrix}, expected {covered}")
        covered += fragment.numel
    _require(covered == matrix.numel, f"{matrix.name}: its fragments cover [0, {covered}) of {matrix.numel} elements")
