# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checkpoints: states in universal checkpoints, momenta that stock DeepSpeed has written, links after a load.

The momentum is an ordinary state of a flat partition, so saving and loading it at the same number of ranks needs
nothing from here. Like engines.py and checkpoint_check.py, and no other file, this one knows engines' attributes.
"""

import os
from typing import Any, Mapping, Optional, Sequence

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import (BASE_OPTIMIZER_STATE, FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT,
                                            PARAM_SLICE_MAPPINGS, SINGLE_PARTITION_OF_FP32_GROUPS, ZERO_STAGE)
from deepspeed.runtime.zero.muon.optimizer import MOMENTUM_KEY, MuonWithAuxAdam
from deepspeed.utils import logger

FP32 = "fp32"
STEP = "step"
WITHOUT_STATES = "Load the weights alone with load_optimizer_states=False"

# Stock DeepSpeed's Muon groups do not have it, ours always do.
OWN_GROUP_KEY = "nesterov"
OFFLOAD_BUFFER = "_offload_buffer"


def partition_states(zero_state: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What a universal checkpoint takes of the flat partition `index` of a rank's saved ZeRO state: `fp32` [numel],
    the states of that size, and, except for ZeRO-3, `step`, a number of any kind.

    A partition that was never stepped has no states. States of other sizes are not cut like the parameters and stay
    out, as they always did. Raises ValueError for a momentum that has to be imported first (see `import_states`).
    """
    is_stage3 = FP32_FLAT_GROUPS in zero_state
    base = zero_state[OPTIMIZER_STATE_DICT if is_stage3 else BASE_OPTIMIZER_STATE]
    partition = zero_state[FP32_FLAT_GROUPS if is_stage3 else SINGLE_PARTITION_OF_FP32_GROUPS][index]
    state = base["state"].get(index, {})
    taken = {FP32: partition}
    for key, value in state.items():
        if key == STEP:
            if not is_stage3:
                taken[key] = value
        elif torch.is_tensor(value) and value.dim() > 0 and not key.endswith(OFFLOAD_BUFFER):
            # Paddings are cut off the states by now, but BF16_Optimizer's weights still have theirs.
            if value.numel() == partition.numel() or value.numel() == _numel_in_use(zero_state, index):
                taken[key] = value
    if MOMENTUM_KEY in state and (MOMENTUM_KEY not in taken or _needs_import(zero_state, base, index)):
        raise ValueError(
            f"Muon: the momentum of param group {index} was saved by stock DeepSpeed as whole matrices or of "
            "scaled gradients. Load the checkpoint once with as many ranks as it was saved with, save it "
            "again, and convert that.")
    return taken


def _numel_in_use(zero_state: Mapping[str, Any], index: int) -> int:
    """Up to where parameters reach in the partition; 0 for ZeRO-3, which has no such table."""
    fragments = zero_state[PARAM_SLICE_MAPPINGS][index].values() if PARAM_SLICE_MAPPINGS in zero_state else ()
    return max((fragment.start + fragment.numel for fragment in fragments), default=0)


def _needs_import(zero_state: Mapping[str, Any], base: Mapping[str, Any], index: int) -> bool:
    """Whether stock DeepSpeed wrote a momentum that may not be that of the partition. BF16_Optimizer's always is."""
    group = next(group for group in base["param_groups"] if index in group["params"])
    if OWN_GROUP_KEY in group or not group.get("use_muon", False) or ZERO_STAGE not in zero_state:
        return False
    return FP32_FLAT_GROUPS not in zero_state or _loss_scale(zero_state) != 1.0


def _loss_scale(zero_state: Mapping[str, Any]) -> float:
    return float(getattr(zero_state.get(LOSS_SCALER), "cur_scale", 1.0))


def saved_state_names(slice_folder: str) -> tuple[str, ...]:
    """The states of a parameter that a converter has written fragments of, `<slice_folder>/<tp>/<state>.<dp>`.

    fp32 comes first; `step` is left out: it is a number and merged apart.
    """
    names = {file.rpartition(".")[0] for folder, _, files in os.walk(slice_folder) for file in files}
    return (FP32, *sorted(names - {FP32, STEP, ""}))


def universal_state_names(folder: str) -> tuple[str, ...]:
    """The states of a parameter that a universal checkpoint has as `<folder>/<state>.pt`, sorted, `step` left out."""
    files = os.listdir(folder) if os.path.isdir(folder) else []
    names = {file[:-len(".pt")] for file in files if file.endswith(".pt")}
    return tuple(sorted(names - {STEP}))


def state_dtype(key: str, partition: torch.Tensor) -> torch.dtype:
    """The momentum is fp32 whatever the master weights are; other states are of their dtype."""
    return torch.float32 if key == MOMENTUM_KEY else partition.dtype


def load_universal_stage3(engine: Any, folder: str, saved: Mapping[str, Any]) -> None:
    """ZeRO-3: fill fp32 partitions and states of all sub-groups from `<folder>/<parameter>/<state>.pt`.

    `saved` is the optimizer's state_dict in the checkpoint: it has the number of steps. Mutates
    `fp32_partitioned_groups_ flat` and `optimizer.state`. A state that a parameter has no file of is zero. Raises
    ValueError for a parameter without a name.
    """
    step = _saved_step(saved["state"])
    for partition, params in zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups):
        folders = [os.path.join(folder, _name_of(engine, param)) for param in params]
        names = [universal_state_names(one) for one in folders]
        state = engine.optimizer.state[partition]
        for key in sorted({key for own in names for key in own}):
            flat = torch.zeros_like(partition, dtype=state_dtype(key, partition))
            offset = 0
            for param, one, own in zip(params, folders, names):
                numel = param.partition_numel()
                if key in own:
                    flat.narrow(0, offset, numel).copy_(engine.load_hp_checkpoint_state(one, key, param=param))
                offset += numel
            if key == FP32:
                partition.data.copy_(flat)
            else:
                state[key] = flat
        if step is not None and set(state) - {MOMENTUM_KEY}:
            # torch's Adam counts in place: one tensor for all sub-groups would be counted by each of them.
            state[STEP] = step.clone() if torch.is_tensor(step) else step


def _saved_step(states: Mapping[int, Mapping[str, Any]]) -> Any:
    """The number of steps, from the first state that counts them: Muon's do not."""
    return next((state[STEP] for state in states.values() if STEP in state), None)


def _name_of(engine: Any, param: torch.Tensor) -> str:
    if param not in engine.param_names:
        raise ValueError(
            f"a parameter of shape {tuple(getattr(param, 'ds_shape', param.shape))} that is trained has no "
            "name in the model")
    return engine.param_names[param]


def shard_of(value: torch.Tensor, shard_numel: int, rank: int) -> torch.Tensor:
    """ZeRO-3: what `rank` holds [shard_numel] of a whole parameter's `value`, with zeros for padding."""
    shard = value.flatten()[rank * shard_numel:(rank + 1) * shard_numel]
    return torch.nn.functional.pad(shard, (0, shard_numel - shard.numel()))


def load_param_groups(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each param group the values of its saved one, and none of the parameters: engines fill these in."""
    for group, values in zip(groups, saved):
        group.update({key: value for key, value in values.items() if key != "params"})
        group["params"] = []


def group_step(groups: Sequence[Mapping[str, Any]]) -> Optional[int]:
    """The number of steps that fused optimizers keep in their param groups; None where none does.

    Raises RuntimeError where groups differ.
    """
    steps = {group[STEP] for group in groups if STEP in group}
    if len(steps) > 1:
        raise RuntimeError(f"the param groups have made {sorted(steps)} steps; an elastic checkpoint keeps one number")
    return steps.pop() if steps else None


def set_group_step(groups: Sequence[dict[str, Any]], step: Optional[int]) -> None:
    """Restore what `group_step` has returned; Muon groups do not count."""
    for group in groups:
        if step is not None and not group.get("use_muon", False):
            group[STEP] = step


def link_loaded_states(engine: Any) -> None:
    """ZeRO-1/2 and BF16_Optimizer: let safe_get_full_optimizer_state find the states that were just loaded.

    Where the checkpoint was saved before the first step there is nothing yet: the first step links.
    """
    engine._hp_optimizer_states_linked = False
    if all(engine.optimizer.state.get(group["params"][0]) for group in engine.optimizer.param_groups):
        engine._lazy_init_hp_params_optimizer_state()


def import_states(engine: Any, saved: Mapping[str, Any], zero_state: Mapping[str, Any]) -> Mapping[str, Any]:
    """ZeRO: the optimizer's state_dict `saved` as this package has it, where stock DeepSpeed 0.19.6 to 0.19.8 wrote
    it.

    There ZeRO-1/2 keep each matrix that touches the partition whole, one after another, perhaps in bf16, and with fp16
    the momentum is that of scaled gradients, except with offload. `zero_state` has the loss scaler. Returns `saved`
    itself where nothing is to be changed; mutates nothing.

    Raises ValueError for a momentum of a size that is neither the partition's nor that of its whole matrices.
    """
    if not isinstance(engine.optimizer, MuonWithAuxAdam):
        return saved
    states = dict(saved["state"])
    for index, group in enumerate(saved["param_groups"]):
        if not group.get("use_muon", False) or OWN_GROUP_KEY in group:
            continue
        for key in group["params"]:
            momentum = states.get(key, {}).get(MOMENTUM_KEY)
            if momentum is not None:
                momentum, whole = _cut_to_partition(engine, index, momentum.float())
                states[key] = {**states[key], MOMENTUM_KEY: _unscale(engine, momentum, whole, zero_state)}
    return {**saved, "state": states}


def _cut_to_partition(engine: Any, index: int, momentum: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The momentum [partition_numel], and whether it was saved as whole matrices. ZeRO-3's always is of that size."""
    if not hasattr(engine, "params_in_partition"):
        return momentum, False
    spans = whole_matrix_spans(engine, index)
    partition_numel = engine.single_partition_of_fp32_groups[index].numel()
    if momentum.numel() not in (partition_numel, sum(whole for _, _, _, whole in spans)):
        raise ValueError(f"Muon: the momentum of param group {index} has {momentum.numel()} elements, its partition "
                         f"{partition_numel} and the matrices in it {sum(whole for _, _, _, whole in spans)}. "
                         f"{WITHOUT_STATES}.")
    partition, used = torch.zeros(partition_numel), torch.zeros(partition_numel, dtype=torch.bool)
    for _, offset_in_partition, numel, _ in spans:
        used[offset_in_partition:offset_in_partition + numel] = True
    # Both sizes can be the same by chance. A partition's momentum is zero in the padding, where whole matrices go on.
    if momentum.numel() == partition_numel and not momentum[~used].any():
        return momentum, False
    start = 0
    for offset_in_matrix, offset_in_partition, numel, whole in spans:
        first = start + offset_in_matrix
        partition[offset_in_partition:offset_in_partition + numel] = momentum[first:first + numel]
        start += whole
    return partition, True


def whole_matrix_spans(engine: Any, index: int) -> list[tuple[int, int, int, int]]:
    """ZeRO-1/2: (offset_in_matrix, offset_in_partition, numel, numel of the whole) of each parameter that touches this
    rank's partition of group `index`, in the order in which stock DeepSpeed lined their momenta up."""
    offsets = {
        id(param): offset
        for param, offset in zip(engine.round_robin_bit16_groups[index], engine.round_robin_bit16_offsets[index])
    }
    partition_numel = engine.single_partition_of_fp32_groups[index].numel()
    begin = dist.get_rank(group=engine.real_dp_process_group[index]) * partition_numel
    spans = []
    for param in engine.params_in_partition[index]:
        offset = offsets[id(param)]
        first, last = max(offset, begin), min(offset + param.numel(), begin + partition_numel)
        spans.append((first - offset, first - begin, last - first, param.numel()))
    return spans


def _unscale(engine: Any, momentum: torch.Tensor, whole: bool, zero_state: Mapping[str, Any]) -> torch.Tensor:
    scale = _loss_scale(zero_state)
    offloaded = getattr(engine, "muon_saved_with_offload", None)
    if scale == 1.0 or (offloaded and not whole):
        return momentum
    if zero_state.get("dynamic_loss_scale", False):
        logger.warning(
            f"Muon: the momentum in this checkpoint is that of gradients times the loss scale of their step; it "
            f"is divided by the last one, {scale:g}, which is exact as far as the scale has not changed.")
    return momentum / scale


def load_beside_swap_files(engine: Any, folder: str, states: bool) -> None:
    """With NVMe offload, before the swap files of a checkpoint take the place of the engine's: load what is in none
    of them, and let the swapper know which files of states are about to come.

    For any optimizer. `folder` is the checkpoint's with its tag, `states` whether the optimizer's are wanted.
    Sub-groups that are too small to be swapped have their weights and states in the ZeRO file.
    """
    zero = engine.optimizer
    path = engine._get_zero_ckpt_name(os.path.dirname(folder), os.path.basename(folder))
    saved = torch.load(path, map_location="cpu", weights_only=False)[OPTIMIZER_STATE_DICT]
    if states:
        zero.loss_scaler = saved[LOSS_SCALER]
        zero._set_fp32_optimizer_param_groups()
        zero.optimizer.load_state_dict(saved[OPTIMIZER_STATE_DICT])
        zero._clear_fp32_optimizer_param_groups()
        zero.optimizer_swapper.purge_state()
    for index, partition in enumerate(zero.fp32_partitioned_groups_flat):
        if not zero._swappable_optimizer_subgroup(index):
            partition.data.copy_(saved[FP32_FLAT_GROUPS][index])
        elif states and partition in zero.optimizer.state:
            _announce_swapped_states(zero, partition)


def _announce_swapped_states(zero: Any, partition: torch.Tensor) -> None:
    """What the swapper itself does after a first step, which is when it sees states. What was saved of them beside the
    files is nothing, or what a buffer held."""
    swapped = []
    for key, value in zero.optimizer.state[partition].items():
        if is_swapped_state(zero, key, value):
            value.data = torch.empty(0, dtype=value.dtype)
            value.ds_id = f"{key}-{partition.ds_id}"
            swapped.append(value)
        elif key == MOMENTUM_KEY:
            value.swappable = False
    if swapped:
        zero.optimizer_swapper.swap_params_info[partition.ds_id].add_state_tensors(swapped)


def is_swapped_state(zero: Any, key: str, state: Any) -> bool:
    """Whether ZeRO-3 keeps this state of a swapped sub-group in a file."""
    in_memory = key == MOMENTUM_KEY and zero.save_muon_momentum_buffer_in_memory
    return torch.is_tensor(state) and state.dim() > 0 and not in_memory
