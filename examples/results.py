# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a run leaves behind: its files, and the comparison with the other optimizer's run."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Sequence

from ds_config import OPTIMIZERS
from loss_table import LossRow, common_steps, read_loss_csv, write_loss_csv
from plot import ADAMW_COLOR, MUON_COLOR, plot_comparison, plot_run, plot_stats
from stats_table import StatsRow, write_stats_csv

NAMES = {"muon": "Muon", "adamw": "AdamW"}
COLORS = {"muon": MUON_COLOR, "adamw": ADAMW_COLOR}


@dataclass(frozen=True)
class Settings:
    """What must be equal for two runs to be compared. Sizes are in elements, lengths in bytes of text."""
    steps: int
    seed: int
    world_size: int
    sequences_per_step: int
    hidden_size: int
    layers: int
    heads: int
    sequence_length: int

    def describe(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return (f"Llama with {self.layers} layers of width {self.hidden_size}, {ranks}, "
                f"{self.sequences_per_step * self.sequence_length:,} bytes of Python source a step")


def write_run(folder: Path, rows: Sequence[LossRow], samples: Sequence[str], settings: Settings) -> None:
    """Writes loss.csv, loss.png, samples.txt and settings.json into ``folder``, which is named ENGINE-OPT."""
    engine, _, opt = folder.name.rpartition("-")
    folder.mkdir(parents=True, exist_ok=True)
    write_loss_csv(rows, folder / "loss.csv")
    plot_run(rows, f"{NAMES[opt]} under {engine}", settings.describe(), folder / "loss.png", COLORS[opt])
    (folder / "samples.txt").write_text(("\n" + "-" * 80 + "\n").join(samples) + "\n", encoding="utf-8")
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")


def write_stats(folder: Path, rows: Sequence[StatsRow], settings: Settings) -> None:
    """Writes muon_stats.csv and muon_stats.png into ``folder``, which is named ENGINE-OPT."""
    folder.mkdir(parents=True, exist_ok=True)
    write_stats_csv(rows, folder / "muon_stats.csv")
    engine = folder.name.rpartition("-")[0]
    plot_stats(rows, f"Muon's updates under {engine}", settings.describe(), folder / "muon_stats.png")


def compare(out: Path, engine: str) -> str:
    """Draws Muon against AdamW if both runs of ``engine`` are in ``out`` with equal settings; returns what it did."""
    folders = [out / f"{engine}-{opt}" for opt in OPTIMIZERS]
    path = out / f"{engine}-muon-vs-adamw.png"
    missing = [opt for opt, folder in zip(OPTIMIZERS, folders) if not (folder / "settings.json").exists()]
    if missing:
        return f"comparison: run with --opt {missing[0]} as well to get {path}"
    muon, adamw = (Settings(**json.loads((folder / "settings.json").read_text())) for folder in folders)
    different = [name for name, value in asdict(muon).items() if getattr(adamw, name) != value]
    if different:
        return f"comparison: not drawn, {folders[0]} and {folders[1]} differ in {', '.join(different)}"
    plot_comparison(*common_steps(*(read_loss_csv(folder / "loss.csv") for folder in folders)),
                    title=f"Muon and AdamW under {engine}: validation loss at equal steps",
                    details=muon.describe(),
                    path=path)
    return f"comparison: {path}"
