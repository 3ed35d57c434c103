# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Draws the tables of benchmarks/results/ as pictures beside them: engines.png, others.png.

    python benchmarks/plots.py [FOLDER]

What is drawn is read from engines.md and others.md in FOLDER, so a picture says what its table says.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
COLORS = ("#1f6fb2", "#d1641e", "#4b8b3b", "#7a5195")
Row = dict[str, str]


class Spread(NamedTuple):
    """A median and what it lies between."""
    median: float
    least: float
    most: float


def tables(page: str) -> list[list[Row]]:
    """The tables of a Markdown page, in order; a row by the titles of its columns."""
    found: list[list[Row]] = []
    titles: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            titles = []
        elif not titles:
            titles = cells
            found.append([])
        elif set("".join(cells)) != {"-"}:
            found[-1].append(dict(zip(titles, cells)))
    return found


def spread_of(cell: str) -> Spread:
    """Of `0.75 (0.74 to 0.77)`; a number without a spread is its own. Raises ValueError for anything else."""
    numbers = [float(number) for number in re.findall(r"\d+\.?\d*", cell)]
    if len(numbers) not in (1, 3):
        raise ValueError(f"not a median with its spread: {cell!r}")
    return Spread(*numbers) if len(numbers) == 3 else Spread(numbers[0], numbers[0], numbers[0])


def bars(axes: Axes,
         names: list[str],
         series: dict[str, dict[str, Spread]],
         title: str,
         label: str,
         ratios: bool = True) -> None:
    """Horizontal bars, one for each name and series, with their spread; where they are ratios, 1 is marked."""
    height = 0.8 / len(series)
    for number, (own, color) in enumerate(zip(series, COLORS)):
        for position, name in enumerate(names):
            if name not in series[own]:
                continue
            found, y = series[own][name], position + (number - (len(series) - 1) / 2) * height
            axes.barh(y, found.median, height * 0.9, color=color, label=own if position == 0 else None)
            axes.plot([found.least, found.most], [y, y], color="0.2", linewidth=1.2)
            axes.text(max(found.most, found.median) + 0.02, y, f"{found.median:.2f}", va="center", fontsize=9)
    if ratios:
        axes.axvline(1, color="0.4", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(series))


def draw_engines(folder: Path) -> None:
    """engines.png of engines.md: the fork's time over stock's, and its bytes beside stock's."""
    rows = tables((folder / "engines.md").read_text(encoding="utf-8"))[0]
    names = list(dict.fromkeys(row["engine"] for row in rows))
    column = "backward + step, fork/stock"
    series: dict[str, dict[str, Spread]] = {}
    for row in rows:
        series.setdefault(f"{row['ranks']} ranks", {})[row["engine"]] = spread_of(row[column])
    figure = Figure(figsize=(10, 4.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    bars(left, names, series, "Time", f"{column}: less is better")
    ranks = max(int(row["ranks"]) for row in rows)
    received = {
        "fork": {
            row["engine"]: spread_of(row["bytes beyond AdamW, fork"])
            for row in rows if int(row["ranks"]) == ranks
        },
        "stock": {
            row["engine"]: spread_of(row["bytes beyond AdamW, stock"])
            for row in rows if int(row["ranks"]) == ranks
        }
    }
    bars(right,
         names,
         received,
         f"Bytes, {ranks} ranks",
         "bytes beyond AdamW's, per element of a matrix",
         ratios=False)
    figure.savefig(folder / "engines.png")


def draw_others(folder: Path) -> None:
    """others.png of others.md: the step of the fork's ZeRO-3 over that of the other packages, all in fp32."""
    rows = [
        row for row in tables((folder / "others.md").read_text(encoding="utf-8"))[0]
        if row["dtype"] == "fp32" and row["contender"].startswith("FSDP2")
    ]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        series: dict[str, dict[str, Spread]] = {}
        for row in rows:
            if row["model"] == model:
                ratio = spread_of(row["fork's step / this one's"])
                series.setdefault(f"{row['ranks']} ranks", {})[row["contender"].removeprefix("FSDP2 ")] = ratio
        names = list(dict.fromkeys(name for own in series.values() for name in own))
        bars(axes, names, series, f"{model} (layers x width)", "the fork's step / this one's: less is better")
    figure.savefig(folder / "others.png")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    draw_engines(folder)
    draw_others(folder)


if __name__ == "__main__":
    main()
