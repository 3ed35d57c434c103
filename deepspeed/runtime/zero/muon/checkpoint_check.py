# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Looks at a checkpoint before any of it is loaded: what does not fit is refused on all ranks, and nothing is changed.

Files are mapped, not read: their tables of tensors are enough. Like engines.py and checkpoint.py, and no other file,
this one knows engines' attributes.
"""

import os
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import (BASE_OPTIMIZER_STATE, FP32_FLAT_GROUPS, GROUP_PADDINGS,
                                            OPTIMIZER_STATE_DICT, PARAM, PARAM_ALIGNMENT_PADDINGS, PARAM_GROUPS,
                                            PARAM_SHAPES, SINGLE_PARTITION_OF_FP32_GROUPS, ZERO_STAGE)
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero.muon.checkpoint import (FP32, WITHOUT_STATES, is_swapped_state, universal_state_names,
                                                    whole_matrix_spans)
from deepspeed.runtime.zero.muon.exchange import Exchange
from deepspeed.runtime.zero.muon.optimizer import MOMENTUM_KEY, MuonWithAuxAdam

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Request:
    """What `engine.load_checkpoint` was asked for. `names_matter` unless the user loads weights by other means."""
    load_dir: str
    tag: str
    states: bool
    names_matter: bool

    @property
    def folder(self) -> str:
        return os.path.join(self.load_dir, self.tag)


@dataclass(frozen=True)
class Partition:
    """A flat partition as this engine has it: the param group, the shapes of its whole parameters, its size here."""
    group: int
    use_muon: bool
    shapes: Shapes
    numel: int


def check_before_load(engine: Any, request: Request) -> None:
    """Raises ValueError, on every rank, where the checkpoint does not fit this engine, and names file and parameter.

    A collective over all ranks; for another optimizer than Muon nothing is done. Mutates only what `import_states`
    wants to know of the checkpoint: `engine.optimizer.muon_saved_with_offload`.
    """
    if not isinstance(engine.basic_optimizer, MuonWithAuxAdam):
        return
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        return  # files of another format
    problem: Optional[str] = None
    try:
        _check(engine, request)
    except _Problem as found:
        problem = str(found)
    found_by_rank = Exchange(dist.get_world_group()).gather_objects(problem)
    for rank, found in enumerate(found_by_rank):
        if found is not None:
            raise ValueError(f"rank {rank} cannot load the checkpoint: {found} Nothing was loaded.")


class _Problem(Exception):
    """What is wrong, as one or more sentences."""


def _check(engine: Any, request: Request) -> None:
    if not os.path.isdir(request.folder):
        raise _Problem(f"{request.folder} is not a folder.")
    if engine.zero_nvme_offload_optimizer() and (engine.load_universal_checkpoint() or not request.states):
        raise _Problem("With NVMe offload DeepSpeed loads swap files, weights and states together, and universal "
                       "checkpoints do not have these. Load what was saved with NVMe offload, with its states.")
    if engine.load_universal_checkpoint():
        _check_universal(engine, request)
        return
    model_path = engine._get_ckpt_name(request.load_dir, request.tag)
    model = _read(model_path)
    if request.states:
        _check_rank_count(engine, model_path, model)
    if request.names_matter and not engine.zero_optimization_partition_weights():
        _check_module(engine, model_path, model)
    if request.states and engine.zero_optimization():
        _check_zero(engine, request, model_path, model)
    elif request.states:
        _check_whole(engine, model_path, model)


def _read(path: str) -> Any:
    """The file's content, its tensors mapped into memory."""
    if not os.path.isfile(path):
        beside = sorted(file for file in os.listdir(os.path.dirname(path)) if file.endswith("_states.pt"))
        raise _Problem(f"{path} is missing; beside it are {', '.join(beside[:8]) or 'no such files'}"
                       f"{', ...' if len(beside) > 8 else ''}.")
    try:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except RuntimeError:  # also the old format, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever unpickling raises
        raise _Problem(f"{path} ({os.path.getsize(path)} bytes) cannot be read: {type(error).__name__}: "
                       f"{str(error).splitlines()[0] if str(error) else 'no reason given'}. Copy it again, or load an "
                       "earlier tag.") from error


def _check_rank_count(engine: Any, path: str, model: Mapping[str, Any]) -> None:
    saved = model.get("dp_world_size", engine.seq_dp_world_size)
    if engine.zero_optimization() and saved != engine.seq_dp_world_size:
        raise _Problem(
            f"{path} was saved with {saved} data-parallel ranks, here are {engine.seq_dp_world_size}. Convert "
            "it with ds_to_universal.py and load that with \"checkpoint\": {\"load_universal\": true}.")


def _check_module(engine: Any, path: str, model: Mapping[str, Any]) -> None:
    saved = model.get("module")
    if not isinstance(saved, dict):
        return  # pipelines keep their layers in files of their own
    for name, own in engine.module.state_dict().items():
        tensor = saved.get(name)
        if torch.is_tensor(tensor) and torch.is_tensor(own) and tensor.shape != own.shape:
            raise _Problem(f"{path} has {name} in the shape {tuple(tensor.shape)}, the model in {tuple(own.shape)}.")


def _partitions(engine: Any) -> list[Partition]:
    optimizer, groups = engine.optimizer, engine.basic_optimizer.param_groups
    shapes = engine._get_zero_param_shapes()
    if engine.zero_optimization_partition_weights():
        indices, numels = optimizer.sub_group_to_group_id, optimizer.fp16_partitioned_groups_flat_numel
    else:
        flat = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
        indices, numels = range(len(flat)), [partition.numel() for partition in flat]
    return [
        Partition(indices[i], groups[indices[i]]["use_muon"], shapes[i], int(numels[i])) for i in range(len(shapes))
    ]


def _check_zero(engine: Any, request: Request, model_path: str, model: Mapping[str, Any]) -> None:
    path = engine._get_zero_ckpt_name(request.load_dir, request.tag)
    saved = _read(path).get(OPTIMIZER_STATE_DICT) or {}
    is_stage3 = engine.zero_optimization_partition_weights()
    if (FP32_FLAT_GROUPS in saved) != is_stage3:
        raise _Problem(f"{path} was saved by ZeRO stage {int(saved.get(ZERO_STAGE, 1))}, this engine is stage "
                       f"{int(engine.zero_optimization_stage())}.")
    base = saved[OPTIMIZER_STATE_DICT if is_stage3 else BASE_OPTIMIZER_STATE]
    partitions = _partitions(engine)
    if isinstance(base, dict):
        groups = base["param_groups"]
        _check_groups(path, groups, base["state"], engine.basic_optimizer.param_groups)
        states = [base["state"].get(key, {}) for group in groups for key in group["params"]]
    else:
        states = base  # an elastic checkpoint has no groups
    _check_shapes(model_path, model.get(PARAM_SHAPES) or [], partitions)
    config = model.get("ds_config") or {}
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    engine.optimizer.muon_saved_with_offload = offload.get("device", "none") != "none"
    if engine.zero_nvme_offload_optimizer():
        _check_swapped(engine, request, path, saved)
        return
    weights = saved[FP32_FLAT_GROUPS if is_stage3 else SINGLE_PARTITION_OF_FP32_GROUPS]
    paddings = saved.get(GROUP_PADDINGS) or [0] * len(weights)
    if len(states) != len(partitions) or len(weights) != len(partitions):
        raise _Problem(
            f"{path} has {len(weights)} partitions with {len(states)} states, this engine {len(partitions)}.")
    realigned = not is_stage3 and PARAM_ALIGNMENT_PADDINGS not in saved  # older files, which the engine may realign
    for index, partition in enumerate(partitions):
        numel, padding = weights[index].numel(), int(paddings[index])
        where = f"{path}: param group {partition.group} ({_some(partition.shapes)})"
        if partition.numel not in (numel, numel + padding) and not realigned:
            raise _Problem(f"{where} has a partition of {numel} elements and {padding} of padding, here it has "
                           f"{partition.numel}. Load with the zero_optimization settings that it was saved with.")
        sizes = {numel, numel + padding}
        if isinstance(base, dict) and hasattr(engine.optimizer, "params_in_partition"):
            sizes.add(sum(whole for _, _, _, whole in whole_matrix_spans(engine.optimizer, index)))
        _check_state(where, partition.use_muon, states[index], sizes)


def _check_swapped(engine: Any, request: Request, path: str, saved: Mapping[str, Any]) -> None:
    """The same sub-groups and states have to be in files as here, and the files have to be there."""
    zero, here = engine.optimizer, "Load with the zero_optimization settings that it was saved with."
    found = [weight.numel() for weight in saved[FP32_FLAT_GROUPS]]
    numels = [int(numel) for numel in zero.fp16_partitioned_groups_flat_numel]
    swapped = [zero._swappable_optimizer_subgroup(index) for index in range(len(numels))]
    if len(found) != len(numels) or any(numel not in ({0, own} if in_file else {own})
                                        for numel, own, in_file in zip(found, numels, swapped)):
        raise _Problem(f"{path} has sub-groups of {found} elements, here they are of {numels}. {here}")
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    files = os.path.join(request.folder, "offloaded_tensors", f"rank{dp_index_to_str(rank)}")
    for index in (index for index, in_file in enumerate(swapped) if in_file):
        partition, state = zero.fp32_partitioned_groups_flat[index], saved[OPTIMIZER_STATE_DICT]["state"].get(
            index, {})
        names = [f"{key}-{partition.ds_id}" for key, value in state.items() if is_swapped_state(zero, key, value)]
        for name in [partition.ds_id, *names]:
            file = os.path.join(files, f"{name}.tensor.swp")
            if not os.path.isfile(file):
                raise _Problem(
                    f"{file} is missing. {here} Files carry the numbers that parameters get as they are made, "
                    "so this model has to be the first of its process.")
        if MOMENTUM_KEY in state and f"{MOMENTUM_KEY}-{partition.ds_id}" not in names and not state[
                MOMENTUM_KEY].numel():
            raise _Problem(f"{path} was saved without save_muon_momentum_buffer_in_memory. {here}")


def _check_state(where: str, use_muon: bool, state: Mapping[str, Any], sizes: set[int]) -> None:
    cut = {key: value.numel() for key, value in state.items() if torch.is_tensor(value) and value.dim() > 0}
    foreign = [key for key in cut if (key == MOMENTUM_KEY) != use_muon]
    if foreign:
        raise _Problem(f"{where} is a group of {'Muon' if use_muon else 'Adam'} here, but its states are "
                       f"{', '.join(sorted(cut))}. {WITHOUT_STATES}.")
    for key, numel in cut.items():
        if numel not in sizes:
            raise _Problem(f"{where} has {key} of {numel} elements, expected {' or '.join(map(str, sorted(sizes)))}. "
                           f"{WITHOUT_STATES}.")


def _check_groups(path: str, saved: Sequence[Mapping[str, Any]], states: Mapping[int, Mapping[str, Any]],
                  own: Sequence[Mapping[str, Any]]) -> None:
    if not any("use_muon" in group for group in saved):
        keys = sorted({key for state in states.values() for key in state})
        raise _Problem(
            f"{path} was saved with another optimizer than Muon: its states are {', '.join(keys) or 'empty'}. "
            f"{WITHOUT_STATES}.")
    kinds = [["Muon" if group.get("use_muon") else "Adam" for group in groups] for groups in (saved, own)]
    if kinds[0] != kinds[1]:
        raise _Problem(
            f"{path} has the param groups {', '.join(kinds[0])}, this engine {', '.join(kinds[1])}. Group the "
            f"parameters as they were, or load less. {WITHOUT_STATES}.")


def _check_shapes(path: str, saved: Sequence[Shapes], partitions: Sequence[Partition]) -> None:
    """The parameters of each group, in their order: flat partitions have no names."""
    if not saved:
        return
    here = {name: partition for partition in partitions for name in partition.shapes}
    there = {name: index for index, shapes in enumerate(saved) for name in shapes}
    for index, shapes in enumerate(saved):
        for name, shape in shapes.items():
            if name not in here:
                raise _Problem(f"{path} has {name}, which this model does not train.")
            if tuple(here[name].shapes[name]) != tuple(shape):
                raise _Problem(f"{path} has {name} in the shape {tuple(shape)}, the model in "
                               f"{tuple(here[name].shapes[name])}.")
    for partition in partitions:
        for name in partition.shapes:
            if name not in there:
                raise _Problem(f"{path} does not have {name}, which this model trains.")
    for index, (shapes, partition) in enumerate(zip(saved, partitions)):
        for theirs, ours in zip([*shapes, None], [*partition.shapes, None]):
            if theirs != ours:
                name = theirs if theirs is not None else ours
                raise _Problem(
                    f"{path} groups the parameters in another way: {name} is in partition {there[name]} there "
                    f"and in group {here[name].group} ({'Muon' if here[name].use_muon else 'Adam'}) here, or "
                    "they are in another order. Use the muon_params, adam_params and zero_optimization settings "
                    f"that it was saved with, or load less. {WITHOUT_STATES}.")


def _check_whole(engine: Any, path: str, model: Mapping[str, Any]) -> None:
    """Stage 0: states of whole parameters. Those of experts are in files of their own."""
    saved = model.get("optimizer")
    if engine.has_moe_layers or not isinstance(saved, dict):
        return
    saved = saved.get(OPTIMIZER_STATE_DICT, saved)
    own = engine.basic_optimizer.param_groups
    _check_groups(path, saved["param_groups"], saved["state"], own)
    for index, (group, here) in enumerate(zip(saved["param_groups"], own)):
        if len(group["params"]) != len(here["params"]):
            raise _Problem(
                f"{path}: param group {index} has {len(group['params'])} parameters, here {len(here['params'])}"
                f". {WITHOUT_STATES}.")
        for key, name, param in zip(group["params"], _names(engine, index), here["params"]):
            _check_state(f"{path}: {name} in param group {index}", here["use_muon"], saved["state"].get(key, {}),
                         {param.numel()})


def _names(engine: Any, index: int) -> Iterator[str]:
    group = engine.basic_optimizer.param_groups[index]["params"]
    if hasattr(engine.optimizer, "fp32_groups"):
        group = engine.optimizer.fp16_groups[index]
    return (engine.param_names.get(param, "a parameter without a name") for param in group)


def _check_universal(engine: Any, request: Request) -> None:
    """Each rank looks at its share of the parameters: every file is opened once."""
    folder = os.path.join(request.folder, "zero")
    path = os.path.join(folder, "optimizer_state.pt")
    saved = _read(path)
    if request.states:
        _check_groups(path, saved[PARAM_GROUPS],
                      saved.get(OPTIMIZER_STATE_DICT, {}).get("state", {}), engine.basic_optimizer.param_groups)
    partitions = _partitions(engine)
    parameters = [(name, shape, partition) for partition in partitions for name, shape in partition.shapes.items()]
    # What one parameter of a group has, all of it have.
    firsts = {partition.group: next(iter(partition.shapes)) for partition in reversed(partitions) if partition.shapes}
    # Tensor and expert parallelism cut a parameter in ways of their own.
    sizes_known = engine.mpu is None and not engine.has_moe_layers
    for name, shape, partition in parameters[dist.get_rank()::dist.get_world_size()]:
        keys = _check_universal_parameter(os.path.join(folder, name), name,
                                          torch.Size(shape).numel() if sizes_known else None, partition,
                                          request.states)
        first = firsts[partition.group]
        of_first = universal_state_names(os.path.join(folder, first))
        if keys != of_first:
            raise _Problem(
                f"{folder} has {', '.join(keys)} of {name}, but {', '.join(of_first)} of {first}: a file is "
                "missing.")


def _check_universal_parameter(folder: str, name: str, numel: Optional[int], partition: Partition,
                               states: bool) -> tuple[str, ...]:
    """The states of the parameter in the checkpoint."""
    if not os.path.isdir(folder):
        raise _Problem(f"{folder} is missing: the checkpoint does not have {name}, which this model trains.")
    keys = universal_state_names(folder)
    if FP32 not in keys:
        raise _Problem(f"{os.path.join(folder, FP32)}.pt is missing: the checkpoint has no weights of {name}.")
    foreign = [key for key in keys if key != FP32 and (key == MOMENTUM_KEY) != partition.use_muon]
    if states and foreign:
        raise _Problem(
            f"{folder}: {name} is in a group of {'Muon' if partition.use_muon else 'Adam'} here, but its states "
            f"are {', '.join(foreign)}. Group the parameters as they were.")
    for key in keys if states else [FP32]:
        content = _read(os.path.join(folder, f"{key}.pt"))
        tensor = content[PARAM] if isinstance(content, dict) else content
        if numel is not None and tensor.numel() != numel:
            raise _Problem(
                f"{os.path.join(folder, key)}.pt has {tensor.numel()} elements of {name}, the model {numel}.")
    return keys


def _some(shapes: Shapes) -> str:
    names = list(shapes)
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")


def write_latest(folder: str, tag: str) -> None:
    """Let the file `latest` of `folder` name the checkpoint `tag`, or leave it as it was: never something between."""
    path = os.path.join(folder, "latest")
    with open(f"{path}.new", "w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
