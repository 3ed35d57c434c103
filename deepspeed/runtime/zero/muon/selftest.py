# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether the first step did what Muon's name says: every matrix orthogonalized once, and the weights moved by that.

All bounds hold for every matrix, of full rank or of rank one, since they follow from the polynomial f that five steps
apply to the singular values s_i, of which sum(s_i^2) = 1 after normalization. With r of them, Q = sum(s_i^4):
for k < 1, at least (1 - k^2)^2/Q of them are at least k/sqrt(r) (Paley and Zygmund, 1932), and the largest is at least
sqrt(Q), so

    sum(f(s_i)^2) >= max((1 - k^2)^2/Q * min f^2 on [k/sqrt(r), 1], min f^2 on [sqrt(Q), 1])
    sum(f(s_i)^2) <= r * max f^2,    sum(f(s_i)^4) <= max f^2 * sum(f(s_i)^2)
    <X_R, O_R> >= min(f(s)/s) * |X_R|^2 for the rows R of a matrix: X O^T = U S f(S) U^T is that much of X X^T

A gradient that was not orthogonalized breaks the first, one that was only rescaled the last of the second line, and an
update that came back to the wrong place the third.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Iterator, Sequence

import torch

from deepspeed.runtime.zero.muon.coefficients import Triple
from deepspeed.runtime.zero.muon.step import MuonStep
from deepspeed.runtime.zero.muon.update import lr_scale
from deepspeed.runtime.zero.muon.watch import Watcher

# Relative slack on norms of updates, for the rounding of the iteration: in bfloat16, the coarsest, the largest error
# of a bound was 0.022 over the shapes and spectra of test_selftest.py.
SLACK = 0.1
# Normalized matrices have norm 1 up to the rounding of the wire, 2^-9 an element in bfloat16.
NORM_SLACK = 0.02
# Of the move of sampled weights.
MOVE_SLACK = 0.05
SAMPLED_FRAGMENTS, SAMPLED_NUMEL = 8, 64
# Rows that hold less of a matrix than this are too small beside its rounding errors to be judged by their direction.
SMALLEST_SHARE = 1e-3


@dataclass(frozen=True)
class Group:
    """What messages say about the partition's param group, and the rounding of its parameters' dtype."""
    name: str
    eps: float


@dataclass(frozen=True)
class Spectrum:
    """The polynomial of a Newton-Schulz iteration on (0, 1], by its values at POINTS points."""
    values: tuple[tuple[float, float], ...]

    @property
    def highest(self) -> float:
        return max(abs(f) for _, f in self.values)

    @property
    def steepness(self) -> float:
        """The smallest f(s)/s."""
        return min(f / s for s, f in self.values)

    def lowest_from(self, start: float) -> float:
        """The smallest |f(s)| for s of at least `start`, one percent less for its rounding."""
        return min(abs(f) for s, f in self.values if s >= 0.99 * min(start, 1.0))


@lru_cache(maxsize=None)
def spectrum(triples: tuple[Triple, ...]) -> Spectrum:
    """Of 4000 points, a factor of 1.003 apart, from 1e-5 to 1.005: rounding lets singular values exceed 1."""
    values = []
    for index in range(4000):
        s = start = 1.005 * 10**(-5.002 * index / 3999)
        for a, b, c in triples:
            # One that overflows bounds nothing.
            s = max(-1e30, min(1e30, a * s + b * s**3 + c * s**5 if abs(s) < 1e6 else math.copysign(1e30, s)))
        values.append((start, s))
    return Spectrum(tuple(values))


@dataclass(frozen=True)
class _Batch:
    """`moments` float64 [2, 2, count]: |X|, |X X^T|, then those of the orthogonalized; `divisors` fp32 [count]."""
    matrices: tuple[int, ...]
    divisors: torch.Tensor
    moments: list[torch.Tensor]


@dataclass(frozen=True)
class _Move:
    """A sampled slice [numel] of a partition, before the step and as it has to be after it."""
    partition: int
    matrix: int
    offset: int
    before: torch.Tensor
    expected: torch.Tensor
    update_norm: torch.Tensor

    def now(self, step: MuonStep) -> torch.Tensor:
        return step.partitions[self.partition].weight[self.offset:self.offset + len(self.before)]


class SelfTest(Watcher):
    """Watches the first step of each partition whose learning rate is above 0, judges it at the beginning of the next
    one, when its values have long been computed, and then leaves.

    `groups` has an entry for each partition of the step. Raises RuntimeError in `begin`, with the group, what was
    found and what was expected. Every rank judges what it owns and holds; nothing is exchanged.
    """

    def __init__(self, groups: Sequence[Group]):
        self.groups = groups
        self._waiting = set(range(len(groups)))
        self._forget()

    @classmethod
    def of(cls, members: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> "SelfTest":
        """For the parameters of a step, each with its param group."""
        return cls([
            Group(group.get("name", "the Muon param group"),
                  torch.finfo(param.dtype).eps) for param, group in members
        ])

    def _forget(self) -> None:
        self._watched: set[int] = set()
        self._batches: list[_Batch] = []
        self._moves: list[_Move] = []
        self._moved: list[torch.Tensor] = []
        self._directions: list[tuple[int, torch.Tensor]] = []

    def weights_were_set(self) -> None:
        """Weights are others than the step has left: a checkpoint was loaded."""
        self._moves, self._moved = [], []

    def begin(self, step: MuonStep) -> None:
        if self._watched:
            self._judge(step)
            self._waiting -= self._watched
            self._forget()
        if not self._waiting:
            step.watchers.remove(self)
            return
        self._watched = {index for index in self._waiting if step.partitions[index].lr > 0}
        self._count = step.orthogonalized

    def before_iteration(self, step: MuonStep, matrices: Sequence[int], x: torch.Tensor) -> None:
        if self._watched:
            self._batches.append(_Batch(tuple(matrices), step.divisors(matrices), [_moments(x)]))

    def after_iteration(self, step: MuonStep, matrices: Sequence[int], x: torch.Tensor) -> None:
        if self._watched:
            # Batches that are iterated as one come one after another.
            batch = next(found for found in self._batches if found.matrices == tuple(matrices))
            batch.moments.append(_moments(x))

    def before_weights(self, step: MuonStep, part: Any, updates: Sequence[torch.Tensor],
                       factors: Sequence[float]) -> None:
        if part.partition not in self._watched:
            return
        self._sample_moves(step, part, updates, factors)
        plan, rank = step.plan.plan, step.plan.rank
        for index, held, x, update in zip(part.matrices, part.fragments, step.normalized(part), updates):
            matrix = plan.matrices[index]
            for fragment in plan.placements[index].on_rank(rank) if matrix.column_blocks == 1 else ():
                if fragment.offset_in_partition != held.offset_in_partition:
                    continue
                start = -fragment.offset_in_matrix % matrix.cols
                # A fragment may be stepped in pieces, of which the first tells.
                stop = start + (held.numel - start) // matrix.cols * matrix.cols
                if start < stop:
                    rows, moved = x[start:stop], update[start:stop].to(device=x.device, dtype=x.dtype)
                    self._directions.append((index, torch.stack([rows.dot(rows), rows.dot(moved)])))

    def _sample_moves(self, step: MuonStep, part: Any, updates: Sequence[torch.Tensor],
                      factors: Sequence[float]) -> None:
        partition = step.partitions[part.partition]
        decay = 1 - partition.lr * partition.weight_decay
        taken = sum(move.partition == part.partition for move in self._moves)
        for index in range(min(len(part.matrices), SAMPLED_FRAGMENTS - taken)):
            fragment = part.fragments[index]
            offset, numel = fragment.offset_in_partition, min(fragment.numel // fragment.strips, SAMPLED_NUMEL)
            before = partition.weight[offset:offset + numel].clone()
            update = updates[index][:numel].to(device=before.device, dtype=before.dtype) * factors[index]
            self._moves.append(
                _Move(part.partition, part.matrices[index], offset, before, before * decay - update, update.norm()))

    def end(self, step: MuonStep) -> None:
        self._count = step.orthogonalized - self._count
        for move in self._moves:
            self._moved.append((move.now(step) - move.expected).norm())

    def _judge(self, step: MuonStep) -> None:
        """Everything that is found on this rank; the first values that are read here."""
        found = [*self._wrong_count(step), *self._wrong_updates(step), *self._wrong_directions(step)]
        found += self._wrong_moves(step)
        if found:
            more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
            raise RuntimeError(f"Muon self-test after the first step: {found[0]}{more}. What trains is not Muon. "
                               "\"muon_selftest\": false leaves this check out.")

    def _about(self, step: MuonStep, index: int) -> str:
        matrix = step.plan.plan.matrices[index]
        name = self.groups[step.plan.plan.layout_of[index]].name
        return f"{name}, {matrix.name} ({matrix.rows} x {matrix.cols})"

    def _wrong_count(self, step: MuonStep) -> Iterator[str]:
        plan = step.plan.plan
        expected = sum(owner == step.plan.rank for owner in plan.owners)
        if self._count != expected:
            names = ", ".join(dict.fromkeys(group.name for group in self.groups))
            yield f"{names}: {self._count} matrices were orthogonalized here, expected {expected}"

    def _wrong_updates(self, step: MuonStep) -> Iterator[str]:
        shape = spectrum(step.kernel.triples)
        for batch in self._batches:
            tiny = torch.finfo(torch.float32).tiny
            divisors = batch.divisors.tolist()
            (norms, squares), (after, after_squares) = (moments.tolist() for moments in batch.moments)
            for position, index in enumerate(batch.matrices):
                if step.plan.plan.layout_of[index] not in self._watched:
                    continue
                norm, square = norms[position], squares[position]
                if not math.isfinite(norm) or norm == 0 and after[position] == 0:
                    continue
                whole = divisors[position] > tiny
                yield from (f"{self._about(step, index)}: {words}"
                            for words in self._wrong_update(step, index, shape, (norm, square, after[position],
                                                                                 after_squares[position], whole)))

    def _wrong_update(self, step: MuonStep, index: int, shape: Spectrum, found: Sequence[float]) -> Iterator[str]:
        norm, square, after, after_square, whole = found
        matrix, rank = step.plan.plan.matrices[index], min(step.plan.plan.matrices[index].rows,
                                                           step.plan.plan.matrices[index].cols)
        if whole and abs(norm - 1) > NORM_SLACK:
            yield f"what was orthogonalized had the norm {norm:.3g}, expected 1: its slices are not all there"
            return
        low, high = 0.0, math.sqrt(rank) * shape.highest * (1 + SLACK)
        if whole:
            many = max((1 - k * k) / square * shape.lowest_from(k / math.sqrt(rank)) for k in (0.5, 0.2, 0.1, 0.05))
            low = (1 - SLACK) * max(many, shape.lowest_from(square))
            if rank == 1:
                high = (1 + SLACK) * max(abs(f) for s, f in shape.values if s >= 0.99)
        adjust = step.partitions[step.plan.plan.layout_of[index]].adjust_lr_fn
        to_rms = lr_scale(matrix.fan_out, matrix.fan_in, adjust) / math.sqrt(matrix.numel)
        if not low <= after <= high:
            yield (f"the update has an RMS of {to_rms * after:.3g} an element, expected {to_rms * low:.3g} to "
                   f"{to_rms * high:.3g} with the scale {adjust!r}: it is not orthogonalized")
        elif not after_square <= after * shape.highest * (1 + SLACK):
            yield (f"the squared singular values of the update have a norm of {after_square:.3g}, expected at most "
                   f"{after * shape.highest * (1 + SLACK):.3g}: it is not orthogonalized")

    def _wrong_directions(self, step: MuonStep) -> Iterator[str]:
        least = spectrum(step.kernel.triples).steepness / 2
        for index, values in self._directions:
            share, product = values.tolist()
            if SMALLEST_SHARE < share < math.inf and not product >= least * share:
                yield (
                    f"{self._about(step, index)}: the product of this rank's rows with their update is {product:.3g}"
                    f", expected at least {least * share:.3g}: it is the update of something else")

    def _wrong_moves(self, step: MuonStep) -> Iterator[str]:
        for move, error in zip(self._moves, self._moved):
            rounding = self.groups[move.partition].eps * float(move.before.norm())
            way, now = (move.expected - move.before).double(), (move.now(step) - move.before).double()
            length = float(way.norm())
            if not math.isfinite(length):
                continue
            if not float(error) <= MOVE_SLACK * length + 4 * rounding:
                yield (f"{self._about(step, move.matrix)}: {len(way)} weights were {float(error):.3g} away from where "
                       f"their update puts them, expected a move of {length:.3g}")
            # Others may set weights between two steps. Judged is only what nobody would: a move along the update.
            if len(way) < 8 or length < 16 * rounding or float(move.update_norm) < length / 2:
                continue
            share = float(now.dot(way)) / length**2
            if float((now - share * way).norm()) < 0.1 * share * length or not now.any():
                if abs(share - 1) > 2 * MOVE_SLACK:
                    yield (f"{self._about(step, move.matrix)}: at the next step weights have moved by {share:.3g} of "
                           "their update, expected all of it: something scales or undoes it")


def _moments(x: torch.Tensor) -> torch.Tensor:
    """|X| and |X X^T| of each of `x` [count, rows, cols], float64 [2, count]."""
    gram = torch.bmm(x, x.mT) if x.shape[1] <= x.shape[2] else torch.bmm(x.mT, x)
    return torch.stack([torch.linalg.vector_norm(found, dim=(1, 2), dtype=torch.float64) for found in (x, gram)])
