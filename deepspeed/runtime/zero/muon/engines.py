# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Reads each engine's own tables into layouts: the only file of the package that knows engines' attributes.

Each `bind_*` is called once, when its engine has cut its parameters, and does nothing for another optimizer than
Muon's. What the engine cannot do exactly is refused here, before the first step.
"""

from dataclasses import asdict
from typing import Any, Optional, Sequence

import torch

from deepspeed.accelerator import get_accelerator
import deepspeed.comm as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.utils import (clip_tensors_by_global_norm, get_global_norm_of_tensors, get_norm_with_moe_layers,
                                     is_invalid_grad_norm, is_model_parallel_parameter)
from deepspeed.runtime.zero.muon.exchange import Exchange
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import Matrix, matrices_of_parameter
from deepspeed.runtime.zero.muon.optimizer import MOMENTUM_KEY, MuonWithAuxAdam
from deepspeed.runtime.zero.muon.report import BY_GROUP, start_up_report
from deepspeed.runtime.zero.muon.tensor_parallel import TensorShard, join
from deepspeed.utils import groups, logger
from deepspeed.utils.bwc import (bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_rank,
                                 bwc_tensor_model_parallel_world_size)


def is_muon(optimizer: Any) -> bool:
    """Whether `optimizer` is DeepSpeed's Muon."""
    return isinstance(optimizer, MuonWithAuxAdam)


def is_muon_group(optimizer: torch.optim.Optimizer, index: int) -> bool:
    """Whether param group `index` of `optimizer` is stepped by Newton-Schulz."""
    return is_muon(optimizer) and optimizer.param_groups[index]["use_muon"]


def refuse_features(engine: Any) -> None:
    """Raises ValueError for a feature of the config under which Muon would be another optimizer, or none."""
    offload = engine.zero_offload_optimizer()
    found = {
        "zero_optimization.offload_optimizer.super_offload":
        (bool(getattr(offload, "super_offload", False)), "it steps in a process of its own, with Adam only"),
        "zero_optimization.zenflow": (engine.zenflow, "it steps chosen columns before the others, and Muon needs "
                                      "whole matrices"),
        "compile.deepcompile": (engine.is_deepcompile_enabled(), "what it does to gradients has not been checked with "
                                "Muon"),
    }
    for key, (enabled, reason) in found.items():
        if enabled:
            raise ValueError(f"Muon: {key} is on, but {reason}. Remove it from the config, or use another optimizer.")


def refuse_unsupported(engine: Any, optimizer: Any) -> None:
    """Raises ValueError for an optimizer that cannot work on partitions, and for Muon under what it cannot work with:
    torch's own Muon sees partitions as vectors."""
    if is_muon(optimizer):
        refuse_features(engine)
    if engine.zero_optimization() and any(base.__name__ == "Muon" and base.__module__.startswith("torch.optim")
                                          for base in type(optimizer).__mro__):
        raise ValueError(
            "torch.optim.Muon needs whole 2-D matrices and fails on the flat partitions of DeepSpeed's "
            "optimizers. Use \"optimizer\": {\"type\": \"Muon\", \"params\": {...}} in ds_config.json, or "
            "pass deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam to deepspeed.initialize.")


def with_names(model_parameters: list[Any]) -> list[Any]:
    """`model_parameters` with a name in each dict, which groups of experts are made by."""
    return [{
        "name": f"group{index}",
        **item
    } if isinstance(item, dict) else item for index, item in enumerate(model_parameters)]


def split_experts(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups without their experts, then the experts of each group in groups of their own, for each
    expert-parallel size, that keep the group's options."""
    shared, experts = [], []
    for group in param_groups:
        rest, *own = split_params_into_different_moe_groups_for_optimizer([group])
        shared.extend([rest] if rest["params"] else [])
        experts.extend(own)
    return shared + experts


def report_at_start(engine: Any) -> None:
    """Log on rank 0 what Muon is going to do, unless the config says `"muon_report": false`."""
    optimizer = engine.basic_optimizer
    options = engine.optimizer_params() or {}
    if not is_muon(optimizer) or dist.get_rank() != 0 or not options.get("muon_report", True):
        return
    parameters = []
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            use_muon = bool(getattr(param, "use_muon", False))
            parameters.append((name, getattr(param, "ds_numel",
                                             param.numel()), use_muon, getattr(param, "muon_rule", BY_GROUP)))
    # DeepSpeed shows warnings and above; a report that nobody sees would not tell that Muon is off.
    logger.warning(
        start_up_report(parameters, optimizer.param_groups,
                        type(optimizer.aux_optimizer).__name__, optimizer.bound_reports(), 0))


def write_stats(engine: Any) -> None:
    """Give the statistics of the Muon half to the engine's monitor, where the step has taken some. Collective then.

    Events are named Train/Muon/FAMILY/FIGURE, with layer numbers as N, over the samples that the engine counts. A
    pipeline writes those of the first stage, which has the monitor.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not is_muon(optimizer) or not optimizer.stats_every or not engine.monitor.enabled:
        return
    events = [(f"Train/Muon/{family.replace('*', 'N')}/{name}", value, engine.global_samples)
              for family, stats in optimizer.muon_stats(new_only=True).items()
              for name, value in asdict(stats.mean).items()]
    if events and dist.get_rank() == 0:
        engine.monitor.write_events(events)


def weights_are_set(engine: Any) -> None:
    """A checkpoint is about to be loaded over the weights that the last step has left."""
    optimizer = getattr(engine, "basic_optimizer", None)
    if is_muon(optimizer):
        optimizer.weights_were_set()


def bind_stage_0(engine: Any) -> None:
    """Without ZeRO: every rank holds every matrix, so the work is dealt over the ranks and the updates are sent."""
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    masters = getattr(wrapper, "fp32_groups", None)
    if engine.zero_optimization() or not (wrapper is optimizer or masters is not None):
        return
    for index, group in enumerate(optimizer.param_groups):
        if not is_muon_group(optimizer, index):
            continue
        # The model's parameters have names and marks, their fp32 masters are what is stepped.
        params = group["params"] if masters is None else wrapper.fp16_groups[index]
        for param, stepped in zip(params, group["params"]):
            if bwc_tensor_model_parallel_world_size(engine.mpu) > 1 and is_model_parallel_parameter(param):
                raise ValueError("Muon: stage 0 does not support tensor parallelism; use ZeRO stage 1, 2 or 3")
            process_group = _data_parallel_group(engine, param)
            matrices = _matrices(engine, param, param.shape)
            layout = GroupLayout.replicate(matrices=matrices,
                                           offsets_in_partition=[matrix.offset_in_parameter for matrix in matrices],
                                           world_size=dist.get_world_size(group=process_group),
                                           partition_numel=param.numel())
            optimizer.bind(stepped, layout, process_group, _compute_device())


def bind_bf16_optimizer(engine: Any) -> None:
    """BF16_Optimizer: each group is one flat buffer, cut into equal partitions, without gaps between parameters."""
    optimizer = engine.optimizer
    for index in range(len(optimizer.param_groups)):
        if not is_muon_group(optimizer, index):
            continue
        params = engine.bf16_groups[index]
        offsets, end = [], 0
        for param in params:
            offsets.append(end)
            end += param.numel()
        _bind_flat(engine, index, params, [param.shape for param in params], offsets,
                   engine.fp32_groups_flat_partition[index])


def bind_stage_1_and_2(engine: Any) -> None:
    """ZeRO-1 and ZeRO-2: the same, in the engine's order (round robin) and with its padding between parameters."""
    optimizer = engine.optimizer
    for index in range(len(optimizer.param_groups)):
        if not is_muon_group(optimizer, index):
            continue
        params = engine.round_robin_bit16_groups[index]
        _bind_flat(engine, index, params, [meta.shape for meta in engine.round_robin_bit16_meta[index]],
                   engine.round_robin_bit16_offsets[index], engine.single_partition_of_fp32_groups[index])


def bind_stage3(engine: Any) -> None:
    """ZeRO-3: each parameter is cut on its own, shards of a sub-group stand one after another in its partition."""
    optimizer = engine.optimizer
    if is_muon(optimizer) and engine.swap_optimizer:
        _refuse_swapping(engine)
    for index, params in enumerate(engine.fp16_groups):
        if not is_muon_group(optimizer, engine.sub_group_to_group_id[index]):
            continue
        process_group = engine.sub_group_process_groups[index]
        matrices = [_matrices(engine, param, param.ds_shape) for param in params]
        layout = GroupLayout.sharded(
            parameters=matrices,
            parameter_numels=[param.ds_numel for param in params],
            world_size=dist.get_world_size(group=process_group),
            shard_offsets=[engine.grad_position[engine.get_param_id(param)][1] for param in params],
            partition_numel=engine.fp16_partitioned_groups_flat_numel[index])
        partition = engine.fp32_partitioned_groups_flat[index]
        _bind(engine, partition, layout, process_group, [param for param, own in zip(params, matrices) for _ in own])
        if engine.save_muon_momentum_buffer_in_memory and engine._swappable_optimizer_subgroup(index):
            momentum = torch.zeros(layout.partition_numel, dtype=torch.float32, device=engine.device)
            # The swapper leaves such a tensor where it is.
            momentum.swappable = False
            optimizer.state[partition][MOMENTUM_KEY] = momentum


class AdamOnAccelerator:
    """Steps auxiliary sub-groups that a partial offload leaves on the accelerator, where DeepSpeedCPUAdam cannot.

    Torch's Adam with the groups and the state of the Muon optimizer itself: schedules and checkpoints reach it.
    """

    def __init__(self, optimizer: MuonWithAuxAdam):
        self.optimizer = optimizer
        aux = optimizer.aux_optimizer
        decoupled = getattr(aux, "adam_w_mode", isinstance(aux, torch.optim.AdamW))
        self.adam = (torch.optim.AdamW if decoupled else torch.optim.Adam)([{"params": []}])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the Muon optimizer, in which the engine puts the sub-group that is stepped."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Step the parameters that are in the auxiliary groups now."""
        self.adam.state = self.optimizer.state
        self.adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        for group in self.adam.param_groups:
            for key, value in self.adam.defaults.items():
                group.setdefault(key, value)
        self.adam.step()


def _refuse_swapping(engine: Any) -> None:
    """Raises ValueError for what NVMe offload of the optimizer does not do exactly."""
    offload = "zero_optimization.offload_optimizer"
    if engine.params_in_nvme_and_cpu and engine.offload_optimizer_fast_init:
        raise ValueError(f"Muon: {offload}.fast_init is on, but with parameters on NVMe it reads them to places that "
                         "direct I/O does not take, and weights are what was in memory. Remove it from the config.")
    if engine.master_weights_and_grads_dtype != torch.float32:
        raise ValueError(f"Muon: {offload}.device is nvme, but master weights are "
                         f"{engine.master_weights_and_grads_dtype}, and momenta of fp32 are swapped as such. Remove "
                         "*_master_weights_and_grads from the config, or offload to cpu.")


def _bind_flat(engine: Any, index: int, params: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]],
               offsets: Sequence[int], partition: torch.Tensor) -> None:
    process_group = engine.real_dp_process_group[index]
    matrices: list[Matrix] = []
    flat_offsets: list[int] = []
    params_of_matrices: list[torch.Tensor] = []
    for param, shape, offset in zip(params, shapes, offsets):
        own = _matrices(engine, param, shape)
        matrices.extend(own)
        params_of_matrices.extend(param for _ in own)
        flat_offsets.extend(offset + matrix.offset_in_parameter for matrix in own)
    layout = GroupLayout.flat(matrices=matrices,
                              flat_offsets=flat_offsets,
                              world_size=dist.get_world_size(group=process_group),
                              partition_numel=partition.numel())
    _bind(engine, partition, layout, process_group, params_of_matrices)


def _bind(engine: Any, partition: torch.Tensor, layout: GroupLayout, process_group: Any,
          params_of_matrices: Sequence[torch.Tensor]) -> None:
    """Bind a partition that is cut over `process_group`, and over the tensor-parallel ranks where its matrices are."""
    optimizer = engine.optimizer
    if bwc_tensor_model_parallel_world_size(engine.mpu) > 1 and any(
            map(is_model_parallel_parameter, params_of_matrices)):
        if optimizer.tensor_parallel == "exact":
            layout, process_group = _over_tensor_ranks(engine, layout, process_group, params_of_matrices)
        elif dist.get_rank() == 0:
            logger.warning_once(
                "Muon: \"tensor_parallel\": \"shard\" orthogonalizes each tensor-parallel shard on its "
                "own, which is another optimizer than on one rank; \"exact\" is not.")
    optimizer.bind(partition, layout, process_group, _compute_device())


def _over_tensor_ranks(engine: Any, layout: GroupLayout, process_group: Any,
                       params_of_matrices: Sequence[torch.Tensor]) -> tuple[GroupLayout, Any]:
    """The joint layout of data x tensor ranks, and their group. Collective over the tensor-parallel group."""
    cuts = tuple(_tensor_cut(engine, param) for param in params_of_matrices)
    data_ranks = tuple(dist.get_all_ranks_from_group(process_group))
    gathered = Exchange(bwc_tensor_model_parallel_group(engine.mpu)).gather_objects((data_ranks, layout, cuts))
    ranks = sorted(rank for data_ranks, _, _ in gathered for rank in data_ranks)
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"Muon: data x tensor ranks are {len(ranks)} of {dist.get_world_size()} ranks. Tensor "
            "parallelism together with pipeline or expert parallelism needs \"tensor_parallel\": \"shard\"")
    return join([TensorShard(*shard) for shard in gathered]), dist.get_world_group()


def _tensor_cut(engine: Any, param: torch.Tensor) -> Optional[int]:
    """The dimension of its matrices along which `param` is cut over tensor ranks; None where each is whole on one."""
    if not is_model_parallel_parameter(param):
        return None
    meta = getattr(param, DS_AUTOTP_UC_META, None)
    dim = meta.get("partition_dim") if meta else getattr(param, "partition_dim", None)
    experts = getattr(param, "is_expert_group", False)
    # Kernels are [out, rest]: a cut along a dimension of rest other than the first leaves no blocks of columns.
    if dim not in ((0, 1, 2) if experts else (0, 1)):
        raise ValueError(
            f"Muon: {_name(engine, param)} is cut over tensor-parallel ranks along dimension {dim}, which is not "
            "known to be one of a matrix. Set param.partition_dim as Megatron-LM does, \"tensor_parallel\": "
            "\"shard\", or param.use_muon = False.")
    if getattr(param, "muon_num_heads", None) and dim == 0:
        return None
    _refuse_cut_parts(engine, param, dim)
    if experts:
        return dim - 1 if dim > 0 else None
    return dim


def _refuse_cut_parts(engine: Any, param: torch.Tensor, dim: int) -> None:
    """A rank's share of the outputs may hold all of query and nothing of value, so its parts are not those meant."""
    parts = getattr(param, "muon_parts", None) or ()
    outputs_dim = 1 if getattr(param, "muon_transposed", False) else 0
    if len(parts) > 1 and dim == outputs_dim and not getattr(param, "is_expert_group", False):
        raise ValueError(f"Muon: {_name(engine, param)} is taken apart into "
                         f"{len(parts)} parts and cut over tensor-parallel ranks along the same dimension. Take it "
                         "out of fused_params, or set \"tensor_parallel\": \"shard\".")


def _matrices(engine: Any, param: torch.Tensor, shape: Sequence[int]) -> tuple[Matrix, ...]:
    return matrices_of_parameter(_name(engine, param), param, tuple(shape))


def _name(engine: Any, param: torch.Tensor) -> str:
    return engine.param_names.get(param, "a parameter without a name")


def _data_parallel_group(engine: Any, param: torch.Tensor) -> Any:
    if is_moe_param(param):
        return groups._get_expert_data_parallel_group(param.group_name)
    return engine.seq_data_parallel_group


def _compute_device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def scale_loss_of_stage_0(optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss, 0-dim, times the loss scale of stage 0's fp16 wrappers; of any other optimizer, `loss` itself.

    These wrappers divide the gradients by their scale in `step()`, and scale in a `backward()` of theirs that the
    engine of 0.19.8 does not call. Without this, gradients, norm and clip are too small by the factor of the scale.
    """
    scaling = getattr(optimizer, "loss_scale_config", None)
    if scaling is None or not scaling.use_grad_scaling:
        return loss
    return loss.float() * (optimizer.external_loss_scale if optimizer.custom_loss_scaler else scaling.cur_scale)


def norm_with_experts(norm: float, groups_of_params: Sequence[Sequence[torch.Tensor]], mpu: Any) -> float:
    """The norm of the gradients of the whole model, where `norm` is that of all but the experts.

    `groups_of_params` are this rank's parameters. Collective over the expert-parallel groups where there are experts.
    Infinite where a gradient is not finite.
    """
    experts: dict[str, list[torch.Tensor]] = {}
    for param in (param for params in groups_of_params for param in params):
        if is_moe_param(param) and param.grad is not None:
            experts.setdefault(param.group_name, []).append(param.grad)
    if experts:
        norm = get_norm_with_moe_layers(norm, mpu, experts)
    return float("inf") if is_invalid_grad_norm(norm) else float(norm)


def clip_with_experts(engine: Any) -> None:
    """Clip the gradients of a model with experts by the norm of all of them, in place. Stage 0 in fp32."""
    params = [param for param in engine.module.parameters() if param.grad is not None]
    tensor_rank = bwc_tensor_model_parallel_rank(engine.mpu)
    shared = [
        param.grad for param in params
        if not is_moe_param(param) and (tensor_rank == 0 or is_model_parallel_parameter(param))
    ]
    norm = get_global_norm_of_tensors(shared, mpu=engine.mpu) if shared else 0.0
    clip_tensors_by_global_norm([param.grad for param in params],
                                max_norm=engine.gradient_clipping(),
                                global_norm=norm_with_experts(float(norm), [params], engine.mpu))


def update_gradscaler(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    """Let torch's GradScaler grow or back off, once a step, by what all ranks found together.

    The scaler takes such news only from the gradients of an optimizer, so it is shown one made for that. `scaler` must
    have scaled a loss before.
    """
    flag = torch.zeros(1, device=_compute_device(), requires_grad=True)
    flag.grad = torch.full_like(flag, float("inf") if overflow else 0.0)
    scaler.unscale_(torch.optim.SGD([flag], lr=0.0))
    scaler.update()
