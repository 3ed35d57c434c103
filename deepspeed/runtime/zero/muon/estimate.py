# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a step will cost on a machine that is not there: plans for any number of ranks, and arithmetic on them.

Bytes, FLOPs, workspace and momentum are those of the plan that the optimizer itself would make, so they are exact.
Seconds are a model, which `Machine` and `step_seconds` state. Plain integers and floats: no torch, no process group.
"""

import dataclasses
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Iterable, Sequence

from deepspeed.runtime.zero.muon.coefficients import flops
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import Matrix
from deepspeed.runtime.zero.muon.plan import Plan, build_plan, max_over_mean

FP32_BYTES = 4

# Engines pad a flat group to a multiple of this many elements for each rank (4 bytes in half precision, for NCCL).
FLAT_ALIGNMENT_NUMEL = 2


@dataclass(frozen=True)
class Parameter:
    """A trainable parameter in the order of the model; `matrices` is empty where Adam has it."""
    name: str
    shape: tuple[int, ...]
    matrices: tuple[Matrix, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Engine:
    """What a ds_config says of how parameters are cut. `element_bytes` is the size of what the engine itself sends."""
    name: str
    stage: int
    element_bytes: int = 2
    accumulation_steps: int = 1
    offload: bool = False
    flat_bf16: bool = False
    sub_group_numel: int = 10**9
    bucket_numel: int = 5 * 10**8
    round_robin: bool = False
    parameter_alignment_numel: int = 1


@dataclass(frozen=True)
class Iteration:
    """Newton-Schulz and the wire: `itemsize` bytes an element, `round_numel` elements an owner handles at a time."""
    method: str
    steps: int
    itemsize: int
    round_numel: int


@dataclass(frozen=True)
class Machine:
    """What seconds are derived from. A rank computes `flops_per_second`; it sends and receives, at the same time, at
    `intra_bytes_per_second` where the group fits a node of `node_ranks` ranks, else all of its bytes at
    `inter_bytes_per_second`, as if none stayed in the node. Latency, and passes over memory (about Adam's), are left
    out."""
    node_ranks: int
    flops_per_second: float
    intra_bytes_per_second: float
    inter_bytes_per_second: float

    def link(self, world_size: int) -> float:
        """Bytes per second of the slower of the links that a group of this size uses."""
        if world_size <= self.node_ranks:
            return self.intra_bytes_per_second
        return min(self.intra_bytes_per_second, self.inter_bytes_per_second)


@dataclass(frozen=True)
class Cost:
    """Bytes received by the rank that receives most, the most FLOPs of a rank, and the seconds of the step."""
    received_bytes: int
    flops: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """A step at one world size. Bytes and FLOPs are per rank and step; `stock` is the scheme of DeepSpeed 0.19.8 in
    the same engine, `adam_bytes` and `adam_seconds` what the engine itself sends with any optimizer, gradients and
    parameters."""
    world_size: int
    received_bytes_max: int
    received_bytes_mean: float
    norm_bytes: int
    exchanges: int
    flops_mean: float
    flops_max: int
    balance: float
    workspace_bytes: int
    momentum_bytes: int
    seconds: float
    compute_seconds: float
    stock: Cost
    adam_bytes: float
    adam_seconds: float


@dataclass(frozen=True)
class Limit:
    """Matrices of a kind that one rank cannot orthogonalize within its share once there are `from_ranks` ranks."""
    pattern: str
    count: int
    rows: int
    cols: int
    from_ranks: int
    advice: str


def step_groups(parameters: Sequence[Parameter], engine: Engine, world_size: int) -> list[list[Parameter]]:
    """The Muon parameters that the engine hands over together, in its order: sub-groups in ZeRO-3, else all of them.

    `parameters` come in the order of the param group. A ZeRO-3 sub-group is closed when its partition has reached
    sub_group_size elements.
    """
    own = [parameter for parameter in parameters if parameter.matrices]
    shards = [-(-parameter.numel // world_size) for parameter in own]
    if engine.stage != 3 or engine.sub_group_numel >= sum(shards):
        return [own] if own else []
    groups: list[list[Parameter]] = [[]]
    filled = 0
    for parameter, shard_numel in zip(own, shards):
        if groups[-1] and filled >= engine.sub_group_numel:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += shard_numel
    return groups


def layouts_of(group: Sequence[Parameter], engine: Engine, world_size: int) -> list[GroupLayout]:
    """How the engine cuts what it hands over together: one layout for each partition tensor."""
    if engine.stage == 3:
        return [
            GroupLayout.sharded(parameters=[parameter.matrices for parameter in group],
                                parameter_numels=[parameter.numel for parameter in group],
                                world_size=world_size)
        ]
    if engine.stage == 0:
        return [
            GroupLayout.replicate(matrices=parameter.matrices,
                                  offsets_in_partition=[matrix.offset_in_parameter for matrix in parameter.matrices],
                                  world_size=world_size,
                                  partition_numel=parameter.numel) for parameter in group
        ]
    if engine.round_robin:
        group = [parameter for first in range(world_size) for parameter in group[first::world_size]]
    matrices: list[Matrix] = []
    offsets: list[int] = []
    end = 0
    for parameter in group:
        start = -(-end // engine.parameter_alignment_numel) * engine.parameter_alignment_numel
        matrices.extend(parameter.matrices)
        offsets.extend(start + matrix.offset_in_parameter for matrix in parameter.matrices)
        end = start + parameter.numel
    alignment = FLAT_ALIGNMENT_NUMEL * world_size
    return [
        GroupLayout.flat(matrices=matrices,
                         flat_offsets=offsets,
                         world_size=world_size,
                         partition_numel=-(-end // alignment) * FLAT_ALIGNMENT_NUMEL)
    ]


def matrix_flops(matrix: Matrix, iteration: Iteration) -> int:
    """Newton-Schulz FLOPs of one matrix."""
    return flops(matrix.rows, matrix.cols, iteration.method, iteration.steps)


def plan_of(layouts: Sequence[GroupLayout], iteration: Iteration) -> Plan:
    """The plan that the optimizer makes of these layouts."""
    costs = [matrix_flops(matrix, iteration) for layout in layouts for matrix in layout.matrices]
    return build_plan(layouts, costs=costs, itemsize=iteration.itemsize, round_numel=iteration.round_numel)


def step_seconds(plan: Plan, machine: Machine) -> tuple[float, float]:
    """(seconds of the whole, of the orthogonalization alone) of one plan.

    Each round takes as long as its slowest rank. As exchange.run_rounds orders them, a round travels to its owners
    while the one before is orthogonalized and the update of the one before that travels back. Norms count as one ring
    all-reduce.
    """
    link = machine.link(plan.world_size)
    compute: list[float] = []
    there: list[float] = []
    back: list[float] = []
    for found in plan.rounds:
        report = dataclasses.replace(plan, rounds=(found, )).report()
        compute.append(max(report.flops) / machine.flops_per_second)
        if not found.exchanged:
            there.append(0.0)
            back.append(0.0)
            continue
        there.append(max(*report.forward_sent_bytes, *report.forward_received_bytes) / link)
        back.append(max(*report.back_sent_bytes, *report.back_received_bytes) / link)
    if not compute:
        return 0.0, 0.0
    norms = 2 * 8 * len(plan.straddling) / link if plan.world_size > 1 else 0.0
    in_flight = (following + returning for following, returning in zip([*there[1:], 0.0], [0.0, *back]))
    overlapped = sum(map(max, compute, in_flight))
    return norms + there[0] + overlapped + back[-1], sum(compute)


def estimate(parameters: Sequence[Parameter],
             engine: Engine,
             iteration: Iteration,
             machine: Machine,
             world_size: int,
             progress: Callable[[], object] = lambda: None) -> Estimate:
    """The cost of a step on `world_size` ranks. `progress` is called after each of its `step_groups`."""
    loads, received = [0] * world_size, [0] * world_size
    norm_bytes = exchanges = workspace_bytes = partition_numel = 0
    seconds = compute_seconds = 0.0
    stock_costs: list[Cost] = []
    for group in step_groups(parameters, engine, world_size):
        layouts = layouts_of(group, engine, world_size)
        plan = plan_of(layouts, iteration)
        report = plan.report()
        loads = [load + added for load, added in zip(loads, report.flops)]
        received = [total + added for total, added in zip(received, report.received_bytes)]
        norm_bytes += report.norm_bytes
        exchanges += report.exchanges
        workspace_bytes = max(workspace_bytes, *report.workspace_bytes)
        partition_numel += sum(layout.partition_numel for layout in layouts)
        whole, compute = step_seconds(plan, machine)
        seconds, compute_seconds = seconds + whole, compute_seconds + compute
        stock_costs.append(stock_cost(group, plan, engine, iteration, machine))
        progress()
    adam_bytes = adam_traffic_bytes(sum(parameter.numel for parameter in parameters), engine, world_size)
    return Estimate(world_size=world_size,
                    received_bytes_max=max(received),
                    received_bytes_mean=sum(received) / world_size,
                    norm_bytes=norm_bytes,
                    exchanges=exchanges,
                    flops_mean=sum(loads) / world_size,
                    flops_max=max(loads),
                    balance=max_over_mean(loads),
                    workspace_bytes=workspace_bytes,
                    momentum_bytes=FP32_BYTES * partition_numel,
                    seconds=seconds,
                    compute_seconds=compute_seconds,
                    stock=Cost(received_bytes=sum(cost.received_bytes for cost in stock_costs),
                               flops=sum(cost.flops for cost in stock_costs),
                               seconds=sum(cost.seconds for cost in stock_costs)),
                    adam_bytes=adam_bytes,
                    adam_seconds=adam_bytes / machine.link(world_size))


def adam_traffic_bytes(numel: int, engine: Engine, world_size: int) -> float:
    """Bytes a rank receives for gradients and parameters of `numel` elements in one step, whatever the optimizer.

    With f = 1 - 1/W and k micro-batches, in elements: ZeRO-3 3kNf (two gathers and a reduce-scatter a micro-batch),
    ZeRO-2 (k + 1)Nf, ZeRO-1 and BF16_Optimizer 2Nf, stage 0 2Nf (a ring all-reduce): the least of each (S. Rajbhandari
    et al., ZeRO, 2020, arXiv:1910.02054, section 7).
    """
    k = engine.accumulation_steps
    passes = {0: 2, 1: 2, 2: k + 1, 3: 3 * k}[engine.stage]
    return passes * numel * engine.element_bytes * (1 - 1 / world_size)


def stock_cost(group: Sequence[Parameter], plan: Plan, engine: Engine, iteration: Iteration, machine: Machine) -> Cost:
    """What DeepSpeed 0.19.8's own Muon receives and computes beyond Adam, with the iteration's FLOPs as ours.

    ZeRO-3 gathers gradient, momentum, update and new momentum whole on every rank, 4Nf elements, and deals the
    parameters of each bucket of reduce_bucket_size elements to ranks 0, 1, ... in turn, waiting for each turn
    (DeepSpeedZeroOptimizer_Stage3._muon_update_sub_group). BF16_Optimizer sends the fp32 momentum of a cut matrix to
    each of its holders (_prepare_muon_updates). There and in ZeRO-1/2 (get_flat_partition) each holder orthogonalizes
    the matrix. In stage 0 and with offload (_apply_muon_updates_cpu_offload) each rank orthogonalizes all; offload
    gathers gradients and momenta in fp32.
    """
    world_size = plan.world_size
    f = 1 - 1 / world_size
    numel = sum(parameter.numel for parameter in group)
    if engine.offload:
        received, work = int(2 * numel * FP32_BYTES * f), sum(plan.costs)
    elif engine.stage == 3:
        received = int(4 * numel * engine.element_bytes * f)
        work = _dealt_in_turn(group, engine, iteration, world_size)
    elif engine.stage == 0:
        received, work = 0, sum(plan.costs)
    else:
        work = max(_of_holders(plan, lambda index, run_numel: plan.costs[index]))
        missing = _of_holders(plan, lambda index, run_numel: plan.matrices[index].numel - run_numel)
        received = FP32_BYTES * max(missing) if engine.flat_bf16 else 0
    return Cost(received, work, work / machine.flops_per_second + received / machine.link(world_size))


def _of_holders(plan: Plan, amount: Callable[[int, int], int]) -> list[int]:
    """Sum over the matrices that each rank holds a part of; `amount` gets the matrix and the elements held."""
    change = [0] * (plan.world_size + 1)
    for index, placement in enumerate(plan.placements):
        for run in placement.runs():
            change[run.first_rank] += amount(index, run.numel)
            change[run.last_rank + 1] -= amount(index, run.numel)
    total, found = 0, []
    for difference in change[:-1]:
        total += difference
        found.append(total)
    return found


def _dealt_in_turn(group: Sequence[Parameter], engine: Engine, iteration: Iteration, world_size: int) -> int:
    """FLOPs on the critical path of stock ZeRO-3: the costliest parameter of each turn."""
    work = filled = 0
    turn: list[int] = []
    for parameter in group:
        cost = sum(matrix_flops(matrix, iteration) for matrix in parameter.matrices)
        closes_bucket = filled > 0 and filled + parameter.numel > engine.bucket_numel
        if closes_bucket or len(turn) == world_size:
            work += max(turn)
            turn = []
        filled = parameter.numel if closes_bucket else filled + parameter.numel
        turn.append(cost)
    return work + max(turn, default=0)


def limits(parameters: Iterable[Parameter], iteration: Iteration, world_size: int) -> list[Limit]:
    """Kinds of matrices that cost more than the mean of a rank at `world_size`, the costliest first."""
    kinds: dict[tuple[str, int, int, bool], int] = defaultdict(int)
    total = 0
    for parameter in parameters:
        whole = len(parameter.matrices) == 1
        for matrix in parameter.matrices:
            kinds[(_folded(parameter.name), matrix.rows, matrix.cols, whole)] += 1
            total += matrix_flops(matrix, iteration)
    found = []
    for (pattern, rows, cols, whole), count in kinds.items():
        cost = flops(rows, cols, iteration.method, iteration.steps)
        if cost * world_size > total:
            found.append(Limit(pattern, count, rows, cols, total // cost + 1, _advice(pattern, whole)))
    return sorted(found, key=lambda limit: (limit.from_ranks, limit.pattern))


def _folded(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _advice(pattern: str, whole: bool) -> str:
    """How a matrix may be made of smaller ones. Each of them is then orthogonal on its own: another optimizer step."""
    if not whole:
        return "is a part already; more ranks do not shorten the step"
    if re.search(r"experts\b.*(gate_up|down|up|w[123])", pattern):
        return "experts: mark the stack with is_expert_group, so that each expert is a matrix"
    if re.search(r"\b(q_proj|k_proj|v_proj|query|key|value|q_b_proj|kv_b_proj)\b", pattern):
        return "heads: \"per_head_muon\": true"
    if re.search(r"qkv|c_attn|query_key_value|gate_up|in_proj|gate_and_up", pattern, re.IGNORECASE):
        return "parts: separate projections, or row counts of its parts"
    return "no rule splits it; more ranks do not shorten the step"
