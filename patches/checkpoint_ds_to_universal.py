# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The converter to universal checkpoints."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/checkpoint/ds_to_universal.py"

_any = partial(
    Edit,
    engine="all",
    drop_when="upstream converts the states that it finds",
    series="checkpoints",
    why="It knew Adam's two states by name, so that no checkpoint of Muon could change its number of ranks.")

_STATES = '("fp32", "exp_avg", "exp_avg_sq")'
_FOUND = "muon_checkpoint.saved_state_names(slice_base_path)"
_AFFINE = "from deepspeed.checkpoint.affine import ParamAffineMap, AFFINE_MAP_FORMAT_VERSION, SCALE_POWER_BY_STATE"

EDITS = [
    _any("insert_after", anchor=_AFFINE, code="from deepspeed.runtime.zero.muon import checkpoint as muon_checkpoint"),
    _any("replace_expression", scope="extract_zero_shards", anchor="len(state_groups)", code="len(fp32_groups)"),
    _any("replace",
         scope="extract_zero_shards",
         anchor="flat_state = dict($$$ARGS)",
         code="flat_state = muon_checkpoint.partition_states(optim_sd, param_group_id)"),
    _any("remove", scope="extract_zero_shards", anchor='if "step" in state_groups[param_group_id]:'),
    _any("remove", scope="extract_zero_shards", anchor='state_groups = optim_sd[BASE_OPTIMIZER_STATE]["state"]'),
    _any("replace",
         scope="extract_zero_shards_stage3",
         anchor="flat_state = dict($$$ARGS)",
         code="flat_state = muon_checkpoint.partition_states(optim_sd, idx)"),
    _any("replace",
         scope="_consolidate_zero3_autoep_expert_states",
         anchor="flat_state = $VALUE",
         code="flat_state = muon_checkpoint.partition_states(zero_optim_state, sub_group_id)"),
    _any("remove",
         scope="_consolidate_zero3_autoep_expert_states",
         anchor="optimizer_sub_state = zero_optim_state['optimizer_state_dict']['state'][sub_group_id]"),
    _any("replace_expression", scope="merge_tp_slices", anchor=_STATES, code=_FOUND),
    _any("replace_expression", scope="merge_zero3_slices", anchor=_STATES, code=_FOUND),
    _any("replace_expression",
         scope="merge_tp_slices",
         anchor="SCALE_POWER_BY_STATE[state]",
         code="SCALE_POWER_BY_STATE.get(state, -1)",
         why="A state whose scaling is not known is refused where pieces are scaled, and is any other state else."),
]
