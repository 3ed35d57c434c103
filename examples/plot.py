# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pictures that are drawn from loss tables."""

import math
from pathlib import Path
from typing import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loss_table import LossRow, step_reaching
from stats_table import StatsRow

MUON_COLOR = "#1f6fb2"
ADAMW_COLOR = "#d1641e"
TRAIN_COLOR = "#9aa5b1"
# A run starts near ln(256) = 5.55 and half of its fall is over after a few steps. The axis is cut below that, so that
# the steps which tell runs apart get the room; the legend says where each curve starts.
LOSS_AXIS_TOP = 3.6
# Figure, how its panel is called, and whether its axis is logarithmic.
STATS_PANELS = (
    ("orthogonality_error", "orthogonality error: RMS of s² - 1", False),
    ("update_rms", "RMS of an element of the update, lr apart", False),
    ("momentum_norm", "norm of the momentum", True),
    ("update_to_weight", "update / weight, norms", True),
)


def plot_run(rows: Sequence[LossRow], title: str, details: str, path: Path, color: str = MUON_COLOR) -> None:
    """Draws the train and validation loss of one run as a PNG at ``path``."""
    figure, axes = _loss_axes(title, details, rows)
    # A train loss is the mean over the steps between two evaluations: it belongs in the middle of them.
    axes.plot([(before.step + after.step) / 2 for before, after in zip(rows, rows[1:])],
              [row.train_loss for row in rows[1:]],
              color=TRAIN_COLOR,
              linewidth=1.6,
              label=f"train: {rows[1].train_loss:.2f} to {rows[-1].train_loss:.3f}")
    _plot_validation(axes, rows, "validation (held-out files)", color)
    _save(figure, axes, path)


def plot_comparison(muon: Sequence[LossRow], adamw: Sequence[LossRow], title: str, details: str, path: Path) -> None:
    """Draws the validation losses of two runs at equal steps as a PNG at ``path``."""
    figure, axes = _loss_axes(title, details, [*muon, *adamw])
    _plot_validation(axes, adamw, "AdamW", ADAMW_COLOR)
    _plot_validation(axes, muon, "Muon", MUON_COLOR)
    if muon[-1].val_loss < adamw[-1].val_loss:
        _mark_lead(axes, muon, adamw[-1], "Muon reaches AdamW's final loss")
    else:
        _mark_lead(axes, adamw, muon[-1], "AdamW reaches Muon's final loss")
    _save(figure, axes, path)


def plot_stats(rows: Sequence[StatsRow], title: str, details: str, path: Path) -> None:
    """Draws the statistics of Muon's updates as a PNG at ``path``: a panel a figure, a line a family."""
    figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.012, 0.952, details, fontsize=9.5, color="0.35")
    families = list(dict.fromkeys(row.family for row in rows))
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, (name, words, logarithmic) in zip(panels, STATS_PANELS):
        for number, family in enumerate(families):
            own = [row for row in rows if row.family == family]
            # A learning rate of 0 moves nothing, which a logarithmic axis cannot show.
            axes.plot([row.step for row in own], [getattr(row, name) or math.nan for row in own],
                      color=f"C{number % 10}",
                      linewidth=1.6,
                      marker="o" if len(own) < 3 else None,
                      label=_short(family))
        axes.set_title(words, loc="left", fontsize=10.5)
        axes.grid(True, color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        if logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    for axes in figure.axes[2:]:
        axes.set_xlabel("optimizer step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(families)), frameon=False)
    figure.savefig(path)


def _short(family: str) -> str:
    """`model.layers.*.mlp.up_proj.weight` as `mlp.up_proj`."""
    return family.rpartition("*.")[2].removesuffix(".weight")


def _mark_lead(axes: Axes, faster: Sequence[LossRow], slower_end: LossRow, words: str) -> None:
    step = step_reaching(faster, slower_end.val_loss)
    if step is None:
        return
    axes.hlines(slower_end.val_loss, step, slower_end.step, color="0.35", linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(f"{words} at step {step:.0f} of {slower_end.step}",
                  xy=(step, slower_end.val_loss),
                  xytext=(0.97, 0.62),
                  textcoords="axes fraction",
                  ha="right",
                  color="0.2",
                  arrowprops={
                      "arrowstyle": "->",
                      "color": "0.35"
                  })


def _loss_axes(title: str, details: str, rows: Sequence[LossRow]) -> tuple[Figure, Axes]:
    # Not pyplot: a Figure of its own needs no screen and leaves nothing behind in the process.
    figure = Figure(figsize=(8, 4.8), dpi=110, layout="tight")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n", loc="left", fontsize=13, fontweight="bold")
    axes.text(0, 1.02, details, transform=axes.transAxes, fontsize=9.5, color="0.35")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per byte)")
    axes.set_xlim(0, max(row.step for row in rows) * 1.01)
    losses = [row.val_loss for row in rows] + [row.train_loss for row in rows if not math.isnan(row.train_loss)]
    axes.set_ylim(math.floor(min(losses) * 10 - 1) / 10, min(max(losses) + 0.1, LOSS_AXIS_TOP))
    axes.grid(True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot_validation(axes: Axes, rows: Sequence[LossRow], name: str, color: str) -> None:
    axes.plot([row.step for row in rows], [row.val_loss for row in rows],
              color=color,
              linewidth=2,
              marker="o",
              markersize=3.5,
              label=f"{name}: {rows[0].val_loss:.2f} to {rows[-1].val_loss:.3f}")


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path)
