# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which batches of a round are orthogonalized in one go. Plain integers, no torch.

A launch serves a whole batch, so a round costs as many launches as it has batches, whatever their counts. Batches
whose matrices are iterated as the same m x n, m <= n (transposed, or equal once padded), can go together: no matrix
gets other bits by that. It takes a copy of them, which on a CPU only small ones are worth. Batches of another n can be
padded with zeros to the widest, which adds FLOPs and may change the order of a sum; that is done on accelerators only,
where the FLOPs take less time than the launches they save.
"""

from dataclasses import dataclass
from typing import Sequence

from deepspeed.runtime.zero.muon.coefficients import flops, launches, padded, uses_gram
from deepspeed.runtime.zero.muon.plan import Batch

# What an accelerator computes while a kernel is launched: 5 us at 200 TFLOP/s.
LAUNCH_FLOPS = 10**9

# The most elements of a batch that is copied to go with others on a CPU. Measured, two batches: 8 of 32 x 64 each take
# 0.9 of the time when merged, 24 of 64 x 256 take 1.06.
MAX_CPU_COPY_NUMEL = 2**15

# The most elements of padding that a merge may add, of which the workspace does not know: 2 MiB in half precision.
MAX_PADDING_NUMEL = 2**20


@dataclass(frozen=True)
class Together:
    """Batches that are iterated as one, as matrices of `rows` x `cols`, rows <= cols, padding included."""
    batches: tuple[Batch, ...]
    rows: int
    cols: int
    gram: bool

    @property
    def count(self) -> int:
        return sum(batch.count for batch in self.batches)


def merge(batches: Sequence[Batch], *, method: str, steps: int, on_cpu: bool) -> tuple[Together, ...]:
    """The groups in which `batches` are iterated.

    On a CPU batches of equal work shapes are merged that have at most MAX_CPU_COPY_NUMEL elements each. Elsewhere all
    of these are, and narrower batches are padded to the columns of wider ones where that adds fewer FLOPs than the
    launches of an iteration (one for each product) are worth, and at most MAX_PADDING_NUMEL elements.
    """
    alike: dict[tuple[int, int, bool, int], list[Batch]] = {}
    for number, batch in enumerate(batches):
        short, long = sorted((batch.rows, batch.cols))
        alone = on_cpu and batch.count * short * long > MAX_CPU_COPY_NUMEL
        key = (padded(short), padded(long), uses_gram(method, short, long), number if alone else -1)
        alike.setdefault(key, []).append(batch)
    groups = [Together(tuple(found), rows, cols, gram) for (rows, cols, gram, _), found in alike.items()]
    if on_cpu:
        return tuple(groups)
    merged: list[Together] = []
    padding_numel = 0
    for group in sorted(groups, key=lambda group: (group.rows, group.gram, -group.cols)):
        wider = merged[-1] if merged else group
        work = flops(group.rows, wider.cols, method, steps) - flops(group.rows, group.cols, method, steps)
        padding_numel += group.count * group.rows * (wider.cols - group.cols)
        if ((wider.rows, wider.gram) == (group.rows, group.gram) and padding_numel <= MAX_PADDING_NUMEL
                and group.count * work <= launches(group.gram, steps) * LAUNCH_FLOPS and merged):
            merged[-1] = Together(wider.batches + group.batches, wider.rows, wider.cols, wider.gram)
        else:
            merged.append(group)
            padding_numel = 0
    return tuple(merged)
