# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long it takes to plan for thousands of ranks, and how evenly the work is dealt. Plain integers.

    python benchmarks/plan.py

Prints a Markdown table. The time is that of one rank: the plan of all and its own part of it, the digest included.
"""

import resource
import time

from deepspeed.runtime.zero.muon.coefficients import flops
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import matrices_of
from deepspeed.runtime.zero.muon.plan import Plan, build_plan, rank_plan

BF16_BYTES = 2
WORKSPACE_ELEMENTS = 256 * 2**20 // (8 * BF16_BYTES)

LLAMA_8B = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
LLAMA_70B = [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]
GPT2 = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]

CASES = (
    ("GPT-2 124M", GPT2 * 12, 8),
    ("Llama-3-8B", LLAMA_8B * 32, 64),
    ("Llama-3-8B", LLAMA_8B * 32, 128),
    ("Llama-3-70B", LLAMA_70B * 80, 256),
    ("1,000 matrices", (LLAMA_8B * 143)[:1000], 1024),
    ("10,000 matrices", (LLAMA_8B * 1429)[:10000], 16384),
)


def plan_sharded(shapes: list[tuple[int, int]], world_size: int) -> Plan:
    parameters = [matrices_of(f"matrix{index}", shape) for index, shape in enumerate(shapes)]
    layout = GroupLayout.sharded(parameters=parameters,
                                 parameter_numels=[rows * cols for rows, cols in shapes],
                                 world_size=world_size)
    costs = [flops(rows, cols, "gram", 5) for rows, cols in shapes]
    return build_plan([layout], costs=costs, itemsize=BF16_BYTES, round_numel=WORKSPACE_ELEMENTS)


def main() -> None:
    print("| model | ranks | matrices | seconds | FLOPs max/mean | bytes received, mean | 2N/W(1-1/W) | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, shapes, world_size in CASES:
        start = time.perf_counter()
        plan = plan_sharded(shapes, world_size)
        rank_plan(plan, 0)
        plan.digests()
        seconds = time.perf_counter() - start
        report = plan.report()
        received = sum(report.received_bytes) / world_size
        limit = 2 * sum(rows * cols for rows, cols in shapes) / world_size * (1 - 1 / world_size) * BF16_BYTES
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"| {name} | {world_size:,} | {len(shapes):,} | {seconds:.2f} | {report.flops_max_over_mean:.3f} | "
              f"{received:,.0f} | {limit:,.0f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
