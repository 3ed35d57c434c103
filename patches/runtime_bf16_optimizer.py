# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""BF16_Optimizer: bf16 weights, fp32 master weights and accumulation, stage 1."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/bf16_optimizer.py"

_edit = partial(Edit, engine="BF16_Optimizer", drop_when="upstream has taken the package", series="bf16_optimizer")
_out = partial(_edit, why="Muon runs inside optimizer.step(), on the partitions; the engine has no part in it.")
_saved = partial(Edit, engine="BF16_Optimizer", drop_when="upstream has taken the package", series="checkpoints")

EDITS = [
    _edit("insert_after",
          anchor="from deepspeed.runtime.base_optimizer import ZeROOptimizer",
          code="from deepspeed.runtime.zero.muon import engines as muon_engines",
          why="The one place that knows how this engine cuts its parameters."),
    _out("replace_import",
         scope="BF16_Optimizer.__init__",
         anchor="from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam"),
    _out("remove", scope="BF16_Optimizer.__init__", anchor="self._uses_muon = $VALUE"),
    _out("remove", scope="BF16_Optimizer.__init__", anchor="if self._uses_muon:"),
    _out("remove", scope="BF16_Optimizer.__init__", anchor="self._muon_exchange_layouts = []"),
    _out("remove",
         scope="BF16_Optimizer._setup_for_real_optimizer",
         anchor="self._muon_exchange_layouts.append($VALUE)"),
    _out("remove_definition", scope="BF16_Optimizer._build_muon_exchange_layout"),
    _out("remove", scope="BF16_Optimizer.step", anchor="if self._uses_muon:"),
    _out("remove_definition", scope="BF16_Optimizer._prepare_muon_updates"),
    _edit("append",
          scope="BF16_Optimizer._setup_for_real_optimizer",
          code="muon_engines.bind_bf16_optimizer(self)",
          why="Muon is told once where the slices of each matrix lie."),
    Edit("remove",
         scope="BF16_Optimizer.get_grads_for_norm",
         anchor="if not self.fp32_groups_has_gradients[i][j]:",
         why="A rank that had not used a parameter left out its gradient: ranks clipped by other norms, and did not "
         "agree on which step to discard. What no rank has used is zero.",
         engine="BF16_Optimizer",
         drop_when="upstream's norm is the same on all ranks",
         series="bf16_optimizer"),
    _saved("insert_after",
           anchor="from deepspeed.runtime.base_optimizer import ZeROOptimizer",
           code="from deepspeed.runtime.zero.muon import checkpoint as muon_checkpoint",
           why="What Muon's checkpoints need."),
    _saved("insert_after",
           scope="BF16_Optimizer._load_legacy_checkpoint",
           anchor="self._link_all_hp_params()",
           code="muon_checkpoint.link_loaded_states(self)",
           why="After a load, safe_get_full_optimizer_state found no states until the next step, or ever, with any "
           "optimizer."),
    _saved("insert_after",
           scope="BF16_Optimizer.state_dict",
           anchor="state_dict[DS_VERSION] = version",
           code="state_dict['zero_stage'] = 1",
           why="zero_to_fp32.py did not take these files for checkpoints of ZeRO, with any optimizer."),
    Edit("replace",
         scope="BF16_Optimizer.__init__",
         anchor="self.mpu = mpu",
         code="""
             # Ranks of a sequence hold whole parameters: to the norm they are data-parallel, not tensor-parallel.
             self.mpu = None if hasattr(mpu, "initialize_sequence_parallel") else mpu
         """,
         why="With sequence parallelism it took the ranks of a sequence for tensor ranks and failed in the norm, with "
         "any optimizer.",
         engine="BF16_Optimizer",
         drop_when="upstream has this fix",
         series="bf16_optimizer"),
]
