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
from typing import Iterator, NamedTuple, Optional, Sequence, Union

from deepspeed.runtime.zero.muon.matrices import Matrix


@dataclass(frozen=True)
class Fragment:
    """Matrix ∩ partition: `numel` consecutive elements of a matrix that lie in one rank's partition, consecutively or,
    of a part of an interleaved projection, as `strips` equal strips that start `stride` elements apart."""
    rank: int
    offset_in_matrix: int
    offset_in_partition: int
    numel: int
    strips: int = 1
    stride: int = 0


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
class StridedCut:
    """As UniformCut, for a matrix that is `strips` equal strips on the axis, which start `stride` elements apart.

    A shard holds at most three fragments of it: the end of a strip, whole strips, the beginning of a strip.
    """
    offset_on_axis: int
    numel: int
    strips: int
    stride: int
    shard_numel: int
    shard_offset_in_partition: int

    @property
    def strip_numel(self) -> int:
        return self.numel // self.strips

    def _before(self, position_on_axis: int) -> int:
        """How many of the matrix's elements stand before a position."""
        strip, beyond = divmod(max(0, position_on_axis - self.offset_on_axis), self.stride)
        return min(self.numel, strip * self.strip_numel + min(beyond, self.strip_numel))

    def _position(self, element: int) -> int:
        strip, beyond = divmod(element, self.strip_numel)
        return self.offset_on_axis + strip * self.stride + beyond

    def holders(self) -> Sequence[int]:
        first, last = (self._position(element) // self.shard_numel for element in (0, self.numel - 1))
        return [rank for rank in range(first, last + 1) if self.numel_on_rank(rank)]

    def numel_on_rank(self, rank: int) -> int:
        return self._before((rank + 1) * self.shard_numel) - self._before(rank * self.shard_numel)

    def on_rank(self, rank: int) -> tuple[Fragment, ...]:
        start, stop = (self._before(shard * self.shard_numel) for shard in (rank, rank + 1))
        found = []
        while start < stop:
            whole = (stop - start) // self.strip_numel if start % self.strip_numel == 0 else 0
            numel = whole * self.strip_numel or min(stop, self.strip_numel * (start // self.strip_numel + 1)) - start
            offset = self.shard_offset_in_partition + self._position(start) - rank * self.shard_numel
            found.append(Fragment(rank, start, offset, numel, max(1, whole), self.stride if whole > 1 else 0))
            start += numel
        return tuple(found)

    def fragments(self) -> Iterator[Fragment]:
        for rank in self.holders():
            yield from self.on_rank(rank)

    def runs(self) -> tuple[Run, ...]:
        return tuple(Run(rank, rank, self.numel_on_rank(rank)) for rank in self.holders())


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
    strips: int = 1
    stride: int = 0

    def holders(self) -> range:
        return range(self.world_size)

    def on_rank(self, rank: int) -> tuple[Fragment, ...]:
        return (Fragment(rank, 0, self.offset_in_partition, self.numel, self.strips, self.stride), )

    def fragments(self) -> Iterator[Fragment]:
        for rank in self.holders():
            yield from self.on_rank(rank)

    def runs(self) -> tuple[Run, ...]:
        return (Run(0, self.world_size - 1, self.numel), )


Placement = Union[UniformCut, StridedCut, ListedFragments, Replica]


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
        spans = [_Span.of(matrix, offset) for offset, matrix in zip(flat_offsets, matrices)]
        for span in spans:
            _require(
                0 <= span.start and span.stop <= end, f"{span.name} occupies [{span.start}, {span.stop}) of a flat "
                f"buffer of {end} elements ({world_size} partitions of {partition_numel})")
        _check_disjoint(spans)
        placements = tuple(_cut(matrix, offset, partition_numel, 0) for offset, matrix in zip(flat_offsets, matrices))
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
            placements.extend(_cut(matrix, matrix.offset_in_parameter, shard_numel, base) for matrix in own)
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
        used: dict[int, list[_Span]] = {}
        for matrix, placement in zip(matrices, placements):
            _check_cover(matrix, placement.listed)
            for fragment in placement.listed:
                span = _Span(fragment.offset_in_partition, fragment.numel, fragment.strips, fragment.stride,
                             matrix.name)
                _require(
                    0 <= fragment.rank < world_size and 0 <= span.start and span.stop <= partition_numel,
                    f"{matrix.name}: fragment [{span.start}, {span.stop}) on rank {fragment.rank} leaves the "
                    f"partition of {partition_numel} elements on {world_size} ranks")
                used.setdefault(fragment.rank, []).append(span)
        for rank, spans in used.items():
            _check_disjoint(spans, f" of rank {rank}'s partition")
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
            Replica(matrix.numel, offset, world_size, matrix.strips, matrix.stride)
            for matrix, offset in zip(matrices, offsets_in_partition))
        return cls(world_size, partition_numel, whole.matrices, placements, replicated=True)

    def straddles(self, index: int) -> bool:
        """Whether matrix `index` has elements on more than one rank."""
        return len(self.placements[index].holders()) > 1


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(f"Muon layout: {found}")


class _Span(NamedTuple):
    """Elements that a matrix or a fragment occupies: `strips` equal strips, `stride` apart."""
    start: int
    numel: int
    strips: int
    stride: int
    name: str

    @classmethod
    def of(cls, matrix: Matrix, offset: int) -> "_Span":
        return cls(offset, matrix.numel, matrix.strips, matrix.stride, matrix.name)

    @property
    def strip_numel(self) -> int:
        return self.numel // self.strips

    @property
    def stop(self) -> int:
        return self.start + (self.strips - 1) * self.stride + self.strip_numel

    def interleaves(self, later: "_Span") -> bool:
        """Whether the strips of both alternate without touching one another's elements."""
        strides = {span.stride for span in (self, later) if span.strips > 1}
        ahead = (later.start - self.start) % max(strides)
        return len(strides) == 1 and self.strip_numel <= ahead and ahead + later.strip_numel <= max(strides)


def _check_disjoint(spans: Sequence[_Span], where: str = "") -> None:
    """The parts of an interleaved projection overlap as intervals, a few at a time; all others follow one another."""
    current: list[_Span] = []
    for span in sorted(spans, key=lambda found: found.start):
        current = [other for other in current if other.stop > span.start]
        for other in current:
            interleaved = max(span.strips, other.strips) > 1 and other.interleaves(span)
            _require(
                interleaved, f"{span.name} occupies [{span.start}, {span.stop}){where}, which overlaps {other.name} "
                f"up to {other.stop}")
        current.append(span)


def _cut(matrix: Matrix, offset_on_axis: int, shard_numel: int, shard_offset_in_partition: int) -> Placement:
    if matrix.strips == 1:
        return UniformCut(offset_on_axis, matrix.numel, shard_numel, shard_offset_in_partition)
    return StridedCut(offset_on_axis, matrix.numel, matrix.strips, matrix.stride, shard_numel,
                      shard_offset_in_partition)


def _check_parameter(matrices: Sequence[Matrix], parameter_numel: int) -> None:
    spans = [_Span.of(matrix, matrix.offset_in_parameter) for matrix in matrices]
    _check_disjoint(spans, " of its parameter")
    for span in spans:
        _require(span.stop <= parameter_numel,
                 f"{span.name} occupies [{span.start}, {span.stop}) of a parameter of {parameter_numel} elements")


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
