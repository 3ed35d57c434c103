# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The example's results: the table of losses survives its CSV file, and the pictures are drawn."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from loss_table import LossRow, common_steps, read_loss_csv, step_reaching, write_loss_csv  # noqa: E402
from plot import STATS_PANELS, plot_comparison, plot_run  # noqa: E402
from results import Settings, compare, write_run, write_stats  # noqa: E402
from stats_table import FIGURES, StatsRow, read_stats_csv, stats_rows  # noqa: E402
from deepspeed.runtime.zero.muon.stats import FamilyStats, MatrixStats  # noqa: E402

SETTINGS = Settings(steps=100,
                    seed=1,
                    world_size=2,
                    sequences_per_step=32,
                    hidden_size=192,
                    layers=4,
                    heads=6,
                    sequence_length=128)


def falling_losses(floor: float, last_step: int = 100) -> list[LossRow]:
    """Evaluations every 10 steps with a validation loss of floor + 4 * exp(-step / 20), as a run writes them."""
    rows = []
    for step in range(0, last_step + 1, 10):
        val_loss = floor + 4 * math.exp(-step / 20)
        rows.append(LossRow(step, 4096 * step, 0.5 * step, val_loss - 0.1 if step else math.nan, val_loss))
    return rows


def test_csv_returns_what_was_written(tmp_path: Path):
    rows = falling_losses(1.5)
    write_loss_csv(rows, tmp_path / "loss.csv")
    lines = (tmp_path / "loss.csv").read_text().splitlines()
    assert lines[0] == "step,tokens,seconds,train_loss,val_loss"
    assert lines[1] == "0,0,0,,5.5"
    read = read_loss_csv(tmp_path / "loss.csv")
    assert math.isnan(read[0].train_loss)
    assert [(row.step, row.tokens) for row in read] == [(row.step, row.tokens) for row in rows]
    assert [row.val_loss for row in read] == pytest.approx([row.val_loss for row in rows], rel=1e-7)
    assert [row.train_loss for row in read[1:]] == pytest.approx([row.train_loss for row in rows[1:]], rel=1e-7)


def test_large_counts_are_written_exactly(tmp_path: Path):
    row = LossRow(step=1, tokens=12_345_678_901, seconds=1.0, train_loss=2.0, val_loss=2.0)
    write_loss_csv([row], tmp_path / "loss.csv")
    assert read_loss_csv(tmp_path / "loss.csv") == [row]


def test_foreign_csv_is_refused_with_its_columns(tmp_path: Path):
    (tmp_path / "loss.csv").write_text("step,loss\n1,2.0\n")
    with pytest.raises(ValueError, match="loss.csv has the columns.*'loss'"):
        read_loss_csv(tmp_path / "loss.csv")


def test_step_reaching_is_linear_between_evaluations():
    rows = [LossRow(0, 0, 0.0, math.nan, 5.0), LossRow(10, 0, 1.0, 4.0, 3.0), LossRow(20, 0, 2.0, 3.0, 2.0)]
    assert step_reaching(rows, 4.0) == 5.0
    assert step_reaching(rows, 2.25) == 17.5
    assert step_reaching(rows, 2.0) == 20.0
    assert step_reaching(rows, 1.9) is None


def test_common_steps_end_where_the_shorter_run_ends():
    long, short = common_steps(falling_losses(1.5), falling_losses(1.6, last_step=60))
    assert [row.step for row in long] == [row.step for row in short] == list(range(0, 61, 10))


@pytest.mark.parametrize("adamw_floor", [1.3, 1.8], ids=["adamw ahead", "muon ahead"])
def test_pictures_are_png_files_of_modest_size(tmp_path: Path, adamw_floor: float):
    muon, adamw = falling_losses(1.5), falling_losses(adamw_floor)
    plot_run(muon, "a run", "its details", tmp_path / "loss.png")
    plot_comparison(muon, adamw, "two runs", "their details", tmp_path / "comparison.png")
    for name in ("loss.png", "comparison.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert 10_000 < len(content) < 100_000


def test_a_run_writes_its_files(tmp_path: Path):
    write_run(tmp_path / "zero2-offload-adamw", falling_losses(1.5), ["def f(", "cla\ufffd"], SETTINGS)
    written = {path.name for path in (tmp_path / "zero2-offload-adamw").iterdir()}
    assert written == {"loss.csv", "loss.png", "samples.txt", "settings.json"}
    assert (tmp_path / "zero2-offload-adamw" / "samples.txt").read_text(encoding="utf-8").startswith("def f(\n---")


def test_comparison_waits_for_the_other_optimizer(tmp_path: Path):
    write_run(tmp_path / "zero1-muon", falling_losses(1.5), ["def"], SETTINGS)
    assert "--opt adamw" in compare(tmp_path, "zero1")
    write_run(tmp_path / "zero1-adamw", falling_losses(1.6, last_step=60), ["def"], SETTINGS)
    assert compare(tmp_path, "zero1") == f"comparison: {tmp_path / 'zero1-muon-vs-adamw.png'}"
    assert (tmp_path / "zero1-muon-vs-adamw.png").read_bytes().startswith(b"\x89PNG")


def test_runs_with_other_settings_are_not_compared(tmp_path: Path):
    write_run(tmp_path / "zero1-muon", falling_losses(1.5), ["def"], SETTINGS)
    write_run(tmp_path / "zero1-adamw", falling_losses(1.6), ["def"], replace(SETTINGS, seed=2, layers=5))
    assert compare(tmp_path, "zero1").endswith("differ in seed, layers")
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("steps", [1, 4])
def test_statistics_are_written_as_they_were_and_drawn(tmp_path: Path, steps: int):
    rows = []
    for step in range(1, steps + 1):
        found = {
            "model.layers.*.mlp.up_proj.weight": FamilyStats(step, 2, MatrixStats(0.25, 0.04 / step, 1e-3, 0.02)),
            "row": FamilyStats(step, 1, MatrixStats(0.3, 0.1, 2e-3, 0.0)),
        }
        rows += stats_rows(found)
    assert rows[0] == StatsRow(1, "model.layers.*.mlp.up_proj.weight", 0.25, 0.04, 1e-3, 0.02)
    write_stats(tmp_path / "zero2-muon", rows, SETTINGS)
    read = read_stats_csv(tmp_path / "zero2-muon" / "muon_stats.csv")
    assert [(row.step, row.family) for row in read] == [(row.step, row.family) for row in rows]
    for name in FIGURES:
        assert [getattr(row, name) for row in read] == pytest.approx([getattr(row, name) for row in rows], rel=1e-5)
    assert (tmp_path / "zero2-muon" / "muon_stats.png").read_bytes().startswith(b"\x89PNG")


def test_every_figure_of_the_optimizer_has_a_column_and_a_panel():
    assert FIGURES == tuple(MatrixStats.__dataclass_fields__) == tuple(panel[0] for panel in STATS_PANELS)
