# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What is said at start-up: who goes to Muon and who to Adam and by which rule, with which options, at what cost."""

import re
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from deepspeed.runtime.zero.muon.plan import PlanReport, max_over_mean

# Patterns shown for each rule; the rest are counted.
SHOWN_PATTERNS = 6
BY_GROUP = "param group"


def start_up_report(parameters: Iterable[tuple[str, int, bool, str]], groups: Sequence[Mapping[str, Any]],
                    adam_name: str, reports: Sequence[PlanReport], rank: int) -> str:
    """A few lines. `parameters`: (name, elements, use_muon, rule) of every trainable parameter; `groups`: the
    optimizer's param groups; `reports`: the plans of all bound partitions, as `rank` sees them."""
    lines = ["Muon:"]
    for use_muon, label in ((True, "Muon"), (False, "Adam")):
        own = [entry for entry in parameters if entry[2] is use_muon]
        lines.append(f"  {label}: {len(own)} parameters, {sum(entry[1] for entry in own):,} elements")
        for rule in dict.fromkeys(entry[3] for entry in own):
            names = [entry[0] for entry in own if entry[3] == rule]
            lines.append(f"    {rule}: {_folded(names)}")
    lines.extend("  " + _group_line(group, adam_name) for group in groups)
    lines.append("  " + _cost_line(reports, rank))
    return "\n".join(lines)


def folded(name: str) -> str:
    """The name of a parameter with layer numbers folded: `layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _folded(names: Sequence[str]) -> str:
    """Names with layer numbers folded: `layers.*.mlp.up_proj.weight (32)`."""
    patterns = Counter(map(folded, names))
    shown = [
        pattern if count == 1 else f"{pattern} ({count})" for pattern, count in list(patterns.items())[:SHOWN_PATTERNS]
    ]
    more = len(patterns) - len(shown)
    return ", ".join(shown) + (f" and {more} more patterns" if more else "")


def _group_line(group: Mapping[str, Any], adam_name: str) -> str:
    label = group.get("name", "group")
    common = f"lr {float(group['lr']):g}, weight decay {float(group['weight_decay']):g}"
    if not group["use_muon"]:
        return f"{label}: {adam_name}, {common}, betas {tuple(group['betas'])}"
    coefficients = group["ns_coefficients"] if isinstance(group["ns_coefficients"], str) else "the user's coefficients"
    return (
        f"{label}: {common}, momentum {float(group['momentum']):g}{'' if group['nesterov'] else ' without Nesterov'}"
        f", {group['ns_method']} x {group['ns_steps']} with {coefficients}, in {group['ns_dtype'] or 'the '}"
        f"{'' if group['ns_dtype'] else 'default dtype'}, scale {group['adjust_lr_fn']}")


def _cost_line(reports: Sequence[PlanReport], rank: int) -> str:
    received = sum(report.received_bytes[rank] for report in reports)
    workspace = max((report.workspace_bytes[rank] for report in reports), default=0)
    matrices = sum(sum(report.matrices) for report in reports)
    world_size = max((len(report.flops) for report in reports), default=1)
    flops = [0] * world_size
    for report in reports:
        for index, value in enumerate(report.flops):
            flops[index] += value
    return (f"{matrices} matrices over {world_size} ranks, work max/mean {max_over_mean(flops):.2f}; a step of rank "
            f"{rank} receives {_size(received)} and holds at most {_size(workspace)} beyond the momentum")


def _size(count: int) -> str:
    """Bytes in the unit that leaves a short number."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count} bytes"
