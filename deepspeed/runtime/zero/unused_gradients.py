# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A parameter that has no gradient in a step has a zero one, not that of an earlier step.

The engines keep reduced gradients in buffers that live as long as they do and write into them what arrives. What does
not arrive has to be cleared. Where every parameter has its gradient, which is nearly always, nothing here touches
memory: only ids are compared. A window is the micro-batches of one optimizer step.
"""

from typing import Any, Mapping, Set

import torch


def start_window_stage3(engine: Any, keep_stale: bool = False) -> None:
    """ZeRO-3: what has been reduced since the last call is of an earlier window from now on.

    With `keep_stale`, within a window whose gradients are dropped, what was stale before stays so.
    """
    reduced: Set[int] = engine._offload_boundary_param_ids
    engine.stale_gradient_ids = engine.stale_gradient_ids | reduced if keep_stale else reduced
    engine._offload_boundary_param_ids = set()


def finish_backward_stage3(engine: Any, slots: Mapping[int, torch.Tensor]) -> None:
    """ZeRO-3, after each backward: clear the slots, by ds_id and [partition_numel], that still hold an earlier
    window's gradient. With offload, at the boundary, move the gradients of parameters that the last micro-batch did
    not use."""
    for ds_id in engine.stale_gradient_ids - engine._offload_boundary_param_ids:
        slots[ds_id].zero_()
    if engine.offload_optimizer and not engine.zenflow and engine.is_gradient_accumulation_boundary():
        engine._finalize_offload_gradient_accumulation()


def is_moved_stage3(engine: Any, param: torch.nn.Parameter) -> bool:
    """ZeRO-3 with offload, at the boundary: whether the optimizer's gradient of `param` is that of this window.

    A sub-group on NVMe is read into a buffer that other tensors have used, so each of its parameters has to come.
    """
    param_id = engine.get_param_id(param)
    if param_id in engine.norm_for_param_grads:
        return True
    used = param.ds_id in engine._offload_boundary_param_ids or param.ds_id in engine.stale_gradient_ids
    return not used and not engine._swappable_optimizer_subgroup(engine.grad_position[param_id][0])


def finish_backward_stage_1_and_2(engine: Any) -> None:
    """ZeRO-1 and ZeRO-2, after each backward: with offload, at the boundary, see to what did not come with it."""
    if engine.cpu_offload and not engine.zenflow and engine.is_gradient_accumulation_boundary():
        clear_offloaded(engine)
        engine._finalize_cpu_offload_gradient_accumulation()


def clear_offloaded(engine: Any) -> None:
    """ZeRO-1 and ZeRO-2 with offload: clear the fp32 gradients of parameters that had none in this window."""
    for params in engine.params_in_partition:
        for param in params:
            param_id = engine.get_param_id(param)
            if param_id in engine.norm_for_param_grads or param_id in engine._offload_accumulated_param_ids:
                continue
            group, _, offset_in_partition, numel = engine.grad_position[param_id]
            engine.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset_in_partition, numel).zero_()
