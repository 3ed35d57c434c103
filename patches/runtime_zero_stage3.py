# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/zero/stage3.py"
ENGINE = "DeepSpeedZeroOptimizer_Stage3"

_edit = partial(Edit, engine="ZeRO-3", drop_when="upstream has taken the package", series="stage3")
_out = partial(_edit, why="Muon runs inside optimizer.step(), on the partitions; the engine has no part in it.")
_swap = partial(_edit, why="The momentum is made at the first step and swapped like the states of Adam.")
_scale = partial(Edit,
                 engine="ZeRO-3",
                 drop_when="upstream unscales by the scale that the gradients carry",
                 series="loss_scale")

_NOT_SWAPPED = "for i, tensor in enumerate(self.fp16_partitioned_groups_flat): > else:"
_SAME_STORAGE = ("elif self.fp16_partitioned_groups_flat[i].dtype == self.master_weights_and_grads_dtype and "
                 "self.fp16_partitioned_groups_flat[i].device == self.device:")
_saved = partial(Edit, engine="ZeRO-3", drop_when="upstream has taken the package", series="checkpoints")
_unused = partial(Edit,
                  engine="ZeRO-3",
                  drop_when="upstream clears the gradients of unused parameters",
                  series="unused_gradients",
                  why="A parameter without a gradient was stepped with that of an earlier step, with any optimizer.")
_universal = partial(
    _saved,
    scope=f"{ENGINE}.load_hp_checkpoint_state_from_checkpoint_dir_stage3",
    why="It knew Adam's two states by name, had all sub-groups count steps in one tensor, and gave the "
    "values of the first param group to all.")

EDITS = [
    _edit("insert_after",
          anchor="from deepspeed.runtime.base_optimizer import ZeROOptimizer",
          code="from deepspeed.runtime.zero.muon import engines as muon_engines",
          why="The one place that knows how this engine cuts its parameters."),
    _edit("insert_before",
          scope=f"{ENGINE}.__init__",
          anchor="self.offloaded_states: $TYPE = set()",
          code="""
              # Without it, tensor-parallel shards would pass for whole matrices.
              self.mpu = mpu
              muon_engines.bind_stage3(self)
          """,
          why="Muon is told once where the slices of each matrix lie."),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_allgather_buffers = collections.OrderedDict()"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_allgather_buffer_bytes = 0"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_allgather_max_cached_bytes = $VALUE"),
    _out("replace_import",
         scope=f"{ENGINE}.__init__",
         anchor="from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self.use_muon = $VALUE"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self.sub_groups_lacking_loss_scale = set()"),
    _edit("remove",
          scope=f"{ENGINE}.__init__",
          anchor="if self.use_muon and self.reduce_scatter:",
          why="A rank needs its own slice of the gradient only, which is what reduce-scatter gives."),
    _edit("remove",
          scope=f"{ENGINE}.__init__",
          anchor="if self.use_muon and self.all2all_process_group is not None:",
          why="The quantized reduction gives a rank its slice as well."),
    _out("remove", scope=f"{ENGINE}.__init__",
         anchor="if self.use_muon and self.save_muon_momentum_buffer_in_memory:"),
    _out("remove", scope=f"{ENGINE}.destroy", anchor="self._clear_muon_allgather_buffers()"),
    _out("remove", scope=f"{ENGINE}._create_fp16_partitions_with_defragmentation", anchor="if self.use_muon:"),
    *(_out("remove_definition", scope=f"{ENGINE}.{name}")
      for name in ("_create_momentum_buffer", "_muon_update_sub_group", "_apply_muon_to_accumulated_grads",
                   "_partitioned_buffers_all_gather", "_clear_muon_allgather_buffers", "_muon_update_lacks_loss_scale",
                   "_apply_muon_updates_cpu_offload")),
    _swap("remove", scope=f"{ENGINE}._create_fp32_partitions", anchor="if not ($CONDITION):"),
    *(_swap("remove",
            scope=f"{ENGINE}._create_fp32_partitions",
            within=within,
            anchor="self._create_momentum_buffer(num_elements, i, ds_id)")
      for within in (f"{_NOT_SWAPPED} > if self.params_in_nvme_and_cpu and tensor is None:",
                     f"{_NOT_SWAPPED} > elif self.offload_optimizer:", f"{_NOT_SWAPPED} > {_SAME_STORAGE}",
                     f"{_NOT_SWAPPED} > else:")),
    _swap(
        "remove",
        scope=f"{ENGINE}.initialize_optimizer_states",
        anchor="if self.use_muon and self.sub_groups_using_muon[i] and not self.save_muon_momentum_buffer_in_memory:"),
    _edit("replace_expression",
          scope=f"{ENGINE}._optimizer_step",
          anchor="cur_device == 'cpu' or (self.use_muon and self.sub_groups_using_muon[sub_group_id])",
          code="cur_device == 'cpu' or muon_engines.is_muon_group(self.optimizer, param_group_id)",
          why="With a partial offload, the sub-groups that stay on the accelerator go to an Adam that is not Muon."),
    _edit(
        "replace_expression",
        scope=f"{ENGINE}.__init__",
        anchor="self.offload_optimizer and self.partial_offload != 1.0",
        code="self.offload_optimizer and self.partial_offload != 1.0 and not muon_engines.is_muon(self.optimizer)",
        why="It refuses every optimizer but DeepSpeedCPUAdam, and takes the options of Adam out of the first group."),
    _edit(
        "insert_before",
        scope=f"{ENGINE}.__init__",
        anchor="self._initialize_zenflow_stage3_epilogue(zenflow_config, overlap_comm)",
        code="""
              if self.offload_optimizer and self.partial_offload != 1.0 and muon_engines.is_muon(self.optimizer):
                  self.backup_optimizer = muon_engines.AdamOnAccelerator(self.optimizer)
          """,
        why="With a partial offload, auxiliary sub-groups that stay on the accelerator cannot go to DeepSpeedCPUAdam."
    ),
    _out("remove", scope=f"{ENGINE}._get_norm_groups", anchor="if self._muon_update_lacks_loss_scale(i):"),
    _edit("remove",
          scope=f"{ENGINE}.step",
          anchor="self._apply_muon_to_accumulated_grads()",
          why="The norm and the clip are those of the raw gradient, as for every other optimizer."),
    _out("remove", scope=f"{ENGINE}.step", anchor="if self._muon_update_lacks_loss_scale(sub_group_id):"),
    _out("replace",
         scope=f"{ENGINE}.step",
         anchor="self._overflow_check_and_loss_scale_update(update_scale=False)",
         code="""
             # An invalid norm discards the step as well, and shares this update of the loss scale.
             self._overflow_check_and_loss_scale_update(update_scale=False)
         """),
    _scale("replace_expression",
           scope=f"{ENGINE}.step",
           anchor="self._loss_scale_update_and_overflow_cleanup()",
           code="self.overflow and self._loss_scale_update_and_overflow_cleanup()",
           why="On a step that changed the scale, gradients were divided by the new one."),
    _scale("insert_before",
           scope=f"{ENGINE}.step",
           anchor="self._post_step(timer_names)",
           code="""
               # Not before the sub-groups have unscaled: their gradients carry the old scale.
               self._update_scale(False)
           """,
           why="On a step that changed the scale, gradients were divided by the new one."),
    _scale("replace",
           scope=f"{ENGINE}._optimizer_step.step_with_gradscaler",
           anchor="if self.torch_autocast_gradscaler:",
           code="""
               if self.zenflow:
                   self.zenflow_cpu_optimizer_step()
               else:
                   optimizer.step()
           """,
           why="Under torch autocast the scaler divided after clipping, so norm and clip were those of the scaled "
           "gradient, and its scale could change between the sub-groups of a step."),
    _scale("prepend",
           scope=f"{ENGINE}._get_loss_scale",
           code="""
               if self.torch_autocast_gradscaler is not None:
                   return self.torch_autocast_gradscaler.get_scale()
           """,
           why="What the gradients carry is the autocast scaler's scale; norm, clip and unscaling have to know it."),
    _scale(
        "prepend",
        scope=f"{ENGINE}._update_scale",
        code="""
               if self.torch_autocast_gradscaler is not None:
                   muon_engines.update_gradscaler(self.torch_autocast_gradscaler, has_overflow)
                   return
           """,
        why="One update a step, with what all ranks found. An overflow used to leave the scale as it was for good."),
    _saved("insert_after",
           anchor="from deepspeed.runtime.base_optimizer import ZeROOptimizer",
           code="from deepspeed.runtime.zero.muon import checkpoint as muon_checkpoint",
           why="What Muon's checkpoints need."),
    _saved("replace_expression",
           scope=f"{ENGINE}._rigid_load_state_dict",
           anchor="state_dict[OPTIMIZER_STATE_DICT]",
           code="muon_checkpoint.import_states(self, state_dict[OPTIMIZER_STATE_DICT], state_dict)",
           why="Stock DeepSpeed saved, with fp16, the momenta of scaled gradients."),
    _universal("remove", anchor="state_step = optim_sd[OPTIMIZER_STATE_DICT]['state'][0]['step']"),
    _universal("replace",
               anchor="for key in $KEYS:",
               code="muon_checkpoint.load_universal_stage3(self, checkpoint_dir, optim_sd[OPTIMIZER_STATE_DICT])"),
    _universal("replace",
               anchor="for param_group in self.optimizer.param_groups:",
               code="""
                   muon_checkpoint.load_param_groups(self.optimizer.param_groups,
                                                     optim_sd[OPTIMIZER_STATE_DICT]["param_groups"])
               """),
    _saved("replace_expression",
           scope=f"{ENGINE}.offload_states",
           anchor="self.optimizer.__class__ == deepspeed.ops.adam.fused_adam.FusedAdam",
           code="(self.optimizer.__class__ == deepspeed.ops.adam.fused_adam.FusedAdam\n"
           "                    or muon_engines.is_muon(self.optimizer))",
           why="Muon's states can be moved like Adam's."),
    _saved(
        "replace",
        scope=f"{ENGINE}.set_full_hp_param",
        anchor="value_partition = value.flatten().narrow($$$ARGS)",
        code="value_partition = muon_checkpoint.shard_of(value, fp32_opt_state_partition.numel(), my_rank)",
        why="safe_set_full_optimizer_state failed where the ranks do not divide the parameter, with any optimizer."),
    _unused("insert_after",
            anchor="from deepspeed.runtime.base_optimizer import ZeROOptimizer",
            code="from deepspeed.runtime.zero import unused_gradients"),
    _unused("insert_after",
            scope=f"{ENGINE}.__init__",
            anchor="self._offload_boundary_param_ids = set()",
            code="self.stale_gradient_ids = set()"),
    _unused("replace",
            scope=f"{ENGINE}._pre_step",
            anchor="self._offload_boundary_param_ids = set()",
            code="unused_gradients.start_window_stage3(self)"),
    _unused("prepend", scope=f"{ENGINE}.zero_grad",
            code="unused_gradients.start_window_stage3(self, keep_stale=True)"),
    _unused("insert_before",
            scope=f"{ENGINE}.independent_gradient_partition_epilogue",
            anchor="for param_id in self.params_already_reduced.keys():",
            code="unused_gradients.finish_backward_stage3(self, self.__param_id_to_grad_partition)"),
    _unused("replace_expression",
            scope=f"{ENGINE}._finalize_offload_gradient_accumulation",
            anchor="param.ds_id not in self._offload_boundary_param_ids",
            code="unused_gradients.is_moved_stage3(self, param)"),
]
