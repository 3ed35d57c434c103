# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How well the updates of a step were orthogonalized and how large they were, of a few matrices of each family.

A family is all matrices whose parameters' names differ in layer numbers only, as the start-up report shows them. Of
each, the first and the last matrix of a plan are looked at. During the step their figures stay on the device, each
rank's share on that rank; they are summed over the ranks, and read, when somebody asks.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Iterable, Optional, Sequence

import torch

from deepspeed.runtime.zero.muon.exchange import Exchange
from deepspeed.runtime.zero.muon.pack import gather_fragments
from deepspeed.runtime.zero.muon.plan import Plan
from deepspeed.runtime.zero.muon.report import folded
from deepspeed.runtime.zero.muon.step import MuonStep
from deepspeed.runtime.zero.muon.update import lr_scale
from deepspeed.runtime.zero.muon.watch import Watcher


@dataclass(frozen=True)
class MatrixStats:
    """Figures of one matrix in one step, or the means of a family.

    `orthogonality_error`: RMS of the entries of O O^T - I (of O^T O - I for a tall matrix) times sqrt(r), with r the
    short side: the RMS of s^2 - 1 over the singular values s of the orthogonalized matrix O, 0 where O is orthogonal.
    `update_rms`: RMS of an element of the update, that is of scale * O, without the learning rate.
    `momentum_norm`: Frobenius norm of the momentum after the step.
    `update_to_weight`: |lr * scale * O| over |W| before the step, Frobenius norms, without weight decay.
    """
    orthogonality_error: float
    update_rms: float
    momentum_norm: float
    update_to_weight: float


@dataclass(frozen=True)
class FamilyStats:
    """Means over the `matrices` of a family that were looked at, in optimizer step `step`, the first of which is 1."""
    step: int
    matrices: int
    mean: MatrixStats


@dataclass(frozen=True)
class _Sample:
    """A matrix that is looked at, by its index in the plan, and the factors of its update in the last such step."""
    matrix: int
    family: str
    lr: float = 0.0
    scale: float = 0.0


class Statistics(Watcher):
    """Takes the figures of every `every`-th step of one `MuonStep`. Nothing is read on the host, nothing exchanged."""

    def __init__(self, plan: Plan, every: int):
        self.every = every
        self.step_number = 0
        self.taken_in: Optional[int] = None
        self.told = True
        self.samples = _samples(plan)
        self._rows = {sample.matrix: row for row, sample in enumerate(self.samples)}
        self._taking = False
        self._errors_and_updates: dict[int, torch.Tensor] = {}
        self._momenta_and_weights: dict[int, list[torch.Tensor]] = {}

    def begin(self, step: MuonStep) -> None:
        self.step_number += 1
        self._taking = self.step_number % self.every == 0
        if self._taking:
            self._errors_and_updates, self._momenta_and_weights = {}, {}
            self.samples = [_with_factors(sample, step) for sample in self.samples]

    def after_iteration(self, step: MuonStep, matrices: Sequence[int], x: torch.Tensor) -> None:
        for position, index in enumerate(matrices if self._taking else ()):
            if index in self._rows:
                self._errors_and_updates[self._rows[index]] = _error_and_norm(x[position])

    def before_weights(self, step: MuonStep, part: Any, updates: Sequence[torch.Tensor],
                       factors: Sequence[float]) -> None:
        if not self._taking:
            return
        plan, partition = step.plan.plan, step.partitions[part.partition]
        for index, fragment in zip(part.matrices, part.fragments):
            # Of a replicated matrix every rank holds all: one counts.
            if index in self._rows and not (plan.replicated and plan.owners[index] != step.plan.rank):
                found = [
                    torch.linalg.vector_norm(one, dtype=torch.float64)**2
                    for flat in (partition.momentum, partition.weight) for one in gather_fragments(flat, [fragment])
                ]
                self._momenta_and_weights.setdefault(self._rows[index], []).append(torch.stack(found))

    def end(self, step: MuonStep) -> None:
        if self._taking:
            self.taken_in, self.told = self.step_number, False

    def table(self, device: torch.device) -> torch.Tensor:
        """This rank's shares, float64 [samples, 4] on `device`: squares of the error, of O, of the momentum, of W."""
        table = torch.zeros(len(self.samples), 4, dtype=torch.float64, device=device)
        for row, found in self._errors_and_updates.items():
            table[row, :2] = found.to(device)
        for row, found in self._momenta_and_weights.items():
            table[row, 2:] = torch.stack(found).sum(0).to(device)
        return table


def collect(steps: Iterable[MuonStep], new_only: bool = False) -> dict[str, FamilyStats]:
    """The families' figures when they were last taken, with `new_only` of those alone that were not collected yet.

    One sum over the ranks of each process group that has some, so all ranks have to call it, after the same step.
    Waits for the device.
    """
    by_group: dict[int, list[tuple[MuonStep, Statistics]]] = {}
    for step in steps:
        for watcher in step.watchers:
            if isinstance(watcher, Statistics) and watcher.taken_in and not (new_only and watcher.told):
                watcher.told = True
                by_group.setdefault(id(step.exchange.process_group), []).append((step, watcher))
    found: dict[str, list[tuple[int, MatrixStats]]] = {}
    for members in by_group.values():
        for (step, watcher), rows in zip(members, _summed([(step, watcher) for step, watcher in members])):
            for sample, row in zip(watcher.samples, rows):
                found.setdefault(sample.family, []).append((watcher.taken_in, _figures(step.plan.plan, sample, row)))
    return {family: _mean(entries) for family, entries in sorted(found.items())}


def _summed(members: Sequence[tuple[MuonStep, Statistics]]) -> list[list[list[float]]]:
    """The tables of steps that share a process group, summed over its ranks."""
    exchange: Exchange = members[0][0].exchange
    device = members[0][0].workspace.device
    table = torch.cat([watcher.table(device) for _, watcher in members])
    exchange.sum_over_ranks_(table)
    return [part.tolist() for part in table.split([len(watcher.samples) for _, watcher in members])]


def _samples(plan: Plan) -> list[_Sample]:
    families: dict[str, list[int]] = {}
    for index, matrix in enumerate(plan.matrices):
        families.setdefault(re.sub(r"\[\d+\]$", "[*]", folded(matrix.name)), []).append(index)
    return [
        _Sample(index, family) for family, indices in families.items()
        for index in dict.fromkeys((indices[0], indices[-1]))
    ]


def _with_factors(sample: _Sample, step: MuonStep) -> _Sample:
    plan = step.plan.plan
    matrix, partition = plan.matrices[sample.matrix], step.partitions[plan.layout_of[sample.matrix]]
    return _Sample(sample.matrix, sample.family, partition.lr,
                   lr_scale(matrix.fan_out, matrix.fan_in, partition.adjust_lr_fn))


def _error_and_norm(matrix: torch.Tensor) -> torch.Tensor:
    """|O O^T - I|^2 and |O|^2 of one orthogonalized matrix [rows, cols], float64 [2]."""
    # In fp32: the squares of half precision are coarser than a good orthogonalization's error.
    wide = matrix.float()
    gram = wide @ wide.mT if wide.shape[0] <= wide.shape[1] else wide.mT @ wide
    gram.diagonal().sub_(1)
    return torch.stack([torch.linalg.vector_norm(found, dtype=torch.float64)**2 for found in (gram, wide)])


def _figures(plan: Plan, sample: _Sample, row: Sequence[float]) -> MatrixStats:
    matrix = plan.matrices[sample.matrix]
    error, update, momentum, weight = (math.sqrt(value) if value >= 0 else value for value in row)
    step = sample.lr * sample.scale * update
    return MatrixStats(orthogonality_error=error / math.sqrt(min(matrix.rows, matrix.cols)),
                       update_rms=sample.scale * update / math.sqrt(matrix.numel),
                       momentum_norm=momentum,
                       update_to_weight=step / weight if weight else (math.inf if step else 0.0))


def _mean(entries: Sequence[tuple[int, MatrixStats]]) -> FamilyStats:
    names = MatrixStats.__dataclass_fields__
    means = {name: sum(getattr(found, name) for _, found in entries) / len(entries) for name in names}
    return FamilyStats(max(step for step, _ in entries), len(entries), MatrixStats(**means))
