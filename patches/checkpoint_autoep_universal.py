# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Universal checkpoints of experts under ZeRO-1 and ZeRO-2."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/checkpoint/autoep_universal.py"

_any = partial(Edit,
               engine="ZeRO-1/2 with AutoEP",
               drop_when="upstream converts the states that it finds",
               series="checkpoints",
               why="It knew Adam's two states by name; Muon has another one and does not count steps.")
_SCOPE = "consolidate_autoep_zero12_expert_states"

EDITS = [
    _any("insert_after",
         anchor="from .autoep_affine import autoep_metadata_to_affine_map, validate_autoep_placement_descriptor",
         code="from deepspeed.runtime.zero.muon import checkpoint as muon_checkpoint"),
    _any("insert_before",
         scope=_SCOPE,
         anchor="for state_name in ('fp32', 'exp_avg', 'exp_avg_sq'):",
         code="state_names = muon_checkpoint.saved_state_names(os.path.join(temp_dir, param_name))"),
    _any("replace_expression", scope=_SCOPE, anchor="('fp32', 'exp_avg', 'exp_avg_sq')", code="state_names"),
    _any("insert_before",
         scope=_SCOPE,
         anchor="if not step_values:",
         code="""
             if not step_values and muon_checkpoint.MOMENTUM_KEY in state_names:
                 continue
         """),
]
