# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Estimates as JSON, as a table with its legend, and as a picture."""

import dataclasses
import textwrap
from pathlib import Path
from typing import Any, Sequence

from deepspeed.runtime.zero.muon.estimate import Engine, Estimate, Iteration, Limit, Machine, Parameter

HEADINGS = ("ranks", "received MB, max", "mean", "norms KB", "exchanges", "NS TFLOP, mean", "max/mean",
            "workspace MiB", "momentum MiB", "step ms", "bytes / AdamW's", "time / AdamW's", "0.19.8 MB", "0.19.8 ms",
            "0.19.8 / step")

LEGEND = """\
Per rank and step. received, norms, exchanges: Muon's own collectives, exact. NS TFLOP: Newton-Schulz; max/mean: its
balance. step: the slowest rank of each round, at {tflops:g} TFLOP/s, sending and receiving all its bytes at
{intra:g} GB/s in a group of up to {node:g} ranks, else at {inter:g} GB/s; a round travels to its owners while the one
before is orthogonalized, the way back is waited for; latency, passes over memory and offload are left out. AdamW's:
what the engine sends for gradients and parameters with any optimizer, {adam} of all {numel:,} elements of {element}
bytes with f = 1 - 1/W{micro}; bytes are compared in the mean over ranks. 0.19.8: what DeepSpeed 0.19.8's own Muon
receives and takes beyond that, on the same machine: {stock}."""

ADAM_FORMULAS = {0: "2f", 1: "2f", 2: "(k + 1)f", 3: "3kf"}


def as_json(parameters: Sequence[Parameter], engine: Engine, iteration: Iteration, machine: Machine,
            estimates: Sequence[Estimate], found: Sequence[Limit]) -> dict[str, Any]:
    """All that was read and found, in bytes, FLOPs, elements and seconds."""
    muon = [parameter for parameter in parameters if parameter.matrices]
    return {
        "model": {
            "parameters": len(parameters),
            "elements": sum(parameter.numel for parameter in parameters),
            "muon_parameters": len(muon),
            "muon_elements": sum(parameter.numel for parameter in muon),
            "matrices": sum(len(parameter.matrices) for parameter in muon),
        },
        "engine": dataclasses.asdict(engine),
        "iteration": dataclasses.asdict(iteration),
        "machine": dataclasses.asdict(machine),
        "estimates": [dataclasses.asdict(entry) for entry in estimates],
        "limits": [dataclasses.asdict(entry) for entry in found],
    }


def as_text(parameters: Sequence[Parameter], engine: Engine, machine: Machine, estimates: Sequence[Estimate],
            found: Sequence[Limit]) -> str:
    """A Markdown table, what its columns mean, and which matrices stand in the way of more ranks."""
    muon = [parameter for parameter in parameters if parameter.matrices]
    numel = sum(parameter.numel for parameter in parameters)
    matrices = sum(len(parameter.matrices) for parameter in muon)
    lines = [
        f"{engine.name}{' with offload' if engine.offload else ''}: {matrices:,} matrices of "
        f"{sum(parameter.numel for parameter in muon):,} elements with Muon, "
        f"{len(parameters) - len(muon):,} parameters with Adam", "", f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS)
    ]
    lines += [f"| {' | '.join(_row(entry))} |" for entry in estimates]
    k = engine.accumulation_steps
    lines += [
        "",
        textwrap.fill(LEGEND.format(tflops=machine.flops_per_second / 1e12,
                                    intra=machine.intra_bytes_per_second / 1e9,
                                    inter=machine.inter_bytes_per_second / 1e9,
                                    node=machine.node_ranks,
                                    adam=ADAM_FORMULAS[engine.stage],
                                    numel=numel,
                                    element=engine.element_bytes,
                                    micro=f", k micro-batches, here {k}" if "k" in ADAM_FORMULAS[engine.stage] else "",
                                    stock=_stock_words(engine)),
                      width=119)
    ]
    if found:
        lines += ["", "Matrices that cost more than a rank's share, and from how many ranks on:"]
    else:
        lines += ["", f"With {estimates[-1].world_size:,} ranks no matrix costs more than a rank's share."]
    for entry in found:
        kind = f"{entry.pattern} ({entry.count:,} of {entry.rows} x {entry.cols})"
        lines.append(f"  {kind}: {entry.from_ranks:,} ranks; {entry.advice}")
    return "\n".join(lines)


def _row(entry: Estimate) -> list[str]:

    def ratio(above: float, below: float) -> str:
        return f"{above / below:.3g}" if below else "-"

    return [
        f"{entry.world_size:,}", f"{entry.received_bytes_max / 1e6:,.1f}", f"{entry.received_bytes_mean / 1e6:,.1f}",
        f"{entry.norm_bytes / 1e3:,.1f}", f"{entry.exchanges:,}", f"{entry.flops_mean / 1e12:,.4g}",
        f"{entry.balance:.3f}", f"{entry.workspace_bytes / 2**20:,.1f}", f"{entry.momentum_bytes / 2**20:,.1f}",
        f"{1e3 * entry.seconds:,.3g}",
        ratio(entry.received_bytes_mean, entry.adam_bytes),
        ratio(entry.seconds,
              entry.adam_seconds), f"{entry.stock.received_bytes / 1e6:,.0f}", f"{1e3 * entry.stock.seconds:,.4g}",
        ratio(entry.stock.seconds, entry.seconds)
    ]


def _stock_words(engine: Engine) -> str:
    if engine.offload:
        return "gradients and momenta gathered in fp32, every matrix orthogonalized on every rank"
    if engine.stage == 3:
        return "4f elements gathered for each of Muon's, the parameters of a bucket dealt to ranks in turn"
    if engine.stage == 0:
        return "every matrix orthogonalized on every rank"
    exchanged = ", the fp32 momentum of a cut one sent to each of them" if engine.flat_bf16 else ""
    return f"every matrix orthogonalized by each of its holders{exchanged}"


def plot(estimates: Sequence[Estimate], path: Path) -> None:
    """Bytes and seconds over the number of ranks, as a picture. Raises ValueError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    ranks = [entry.world_size for entry in estimates]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    left.plot(ranks, [entry.adam_bytes / 1e9 for entry in estimates], "k--", label="AdamW's traffic")
    left.plot(ranks, [entry.stock.received_bytes / 1e9 for entry in estimates],
              "o-",
              color="tab:red",
              label="0.19.8's Muon")
    left.plot(ranks, [entry.received_bytes_max / 1e9 for entry in estimates],
              "o-",
              color="tab:blue",
              label="Muon, largest")
    left.plot(ranks, [entry.received_bytes_mean / 1e9 for entry in estimates],
              "o:",
              color="tab:blue",
              label="Muon, mean")
    left.set(title="received by a rank in a step", ylabel="GB")
    right.plot(ranks, [1e3 * entry.adam_seconds for entry in estimates], "k--", label="AdamW's traffic")
    right.plot(ranks, [1e3 * entry.stock.seconds for entry in estimates], "o-", color="tab:red", label="0.19.8's Muon")
    right.plot(ranks, [1e3 * entry.seconds for entry in estimates], "o-", color="tab:blue", label="Muon")
    right.plot(ranks, [1e3 * entry.compute_seconds for entry in estimates],
               "o:",
               color="tab:blue",
               label="of it, orthogonalization")
    right.set(title="predicted time of a step", ylabel="ms")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="ranks")
        axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
