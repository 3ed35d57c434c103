# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The losses of a run, as records and as a CSV file."""

import csv
import math
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Sequence


@dataclass(frozen=True)
class LossRow:
    """One evaluation. Losses are nats per byte; ``train_loss`` is the mean since the row before, nan in the first."""
    step: int
    tokens: int
    seconds: float
    train_loss: float
    val_loss: float


def write_loss_csv(rows: Sequence[LossRow], path: Path) -> None:
    """Writes ``rows`` to ``path`` with a header; a loss that does not exist is an empty field."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(LossRow))
        for row in rows:
            writer.writerow(_field_text(value) for value in astuple(row))


def _field_text(value: int | float) -> str:
    if isinstance(value, int):
        return str(value)
    return "" if math.isnan(value) else f"{value:.8g}"


def read_loss_csv(path: Path) -> list[LossRow]:
    """Reads what ``write_loss_csv`` wrote. Raises ValueError where the columns are others."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        expected = [field.name for field in fields(LossRow)]
        if reader.fieldnames != expected:
            raise ValueError(
                f"{path} has the columns {reader.fieldnames}, expected {expected}: delete it and run again")
        return [
            LossRow(step=int(line["step"]),
                    tokens=int(line["tokens"]),
                    seconds=float(line["seconds"]),
                    train_loss=float(line["train_loss"] or "nan"),
                    val_loss=float(line["val_loss"] or "nan")) for line in reader
        ]


def step_reaching(rows: Sequence[LossRow], val_loss: float) -> float | None:
    """The step at which the validation loss first falls to ``val_loss``, linear between rows, or None."""
    for before, after in zip(rows, rows[1:]):
        if after.val_loss <= val_loss < before.val_loss:
            share = (before.val_loss - val_loss) / (before.val_loss - after.val_loss)
            return before.step + share * (after.step - before.step)
    return None


def common_steps(first: Sequence[LossRow], second: Sequence[LossRow]) -> tuple[list[LossRow], list[LossRow]]:
    """Both tables up to the step where the shorter one ends: one run may have been stopped early."""
    last = min(first[-1].step, second[-1].step)
    return [row for row in first if row.step <= last], [row for row in second if row.step <= last]
