# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The statistics of Muon's updates in a run, as records and as a CSV file."""

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Mapping, Sequence


@dataclass(frozen=True)
class StatsRow:
    """Figures of one family of matrices in one optimizer step; docs/options.md says what they are."""
    step: int
    family: str
    orthogonality_error: float
    update_rms: float
    momentum_norm: float
    update_to_weight: float


FIGURES = tuple(field.name for field in fields(StatsRow))[2:]


def stats_rows(found: Mapping[str, Any]) -> list[StatsRow]:
    """What ``muon_stats()`` returned, as rows."""
    return [
        StatsRow(stats.step, family, *(getattr(stats.mean, name) for name in FIGURES))
        for family, stats in found.items()
    ]


def write_stats_csv(rows: Sequence[StatsRow], path: Path) -> None:
    """Writes ``rows`` to ``path`` with a header, figures with six digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(StatsRow))
        for row in rows:
            writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in astuple(row))


def read_stats_csv(path: Path) -> list[StatsRow]:
    """Reads what ``write_stats_csv`` wrote."""
    with path.open(newline="") as file:
        return [
            StatsRow(int(line["step"]), line["family"], *(float(line[name]) for name in FIGURES))
            for line in csv.DictReader(file)
        ]
