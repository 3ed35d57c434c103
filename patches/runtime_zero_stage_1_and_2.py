# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-1 and ZeRO-2."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/zero/stage_1_and_2.py"
ENGINE = "DeepSpeedZeroOptimizer"

_edit = partial(Edit, engine="ZeRO-1/2", drop_when="upstream has taken the package", series="stage_1_and_2")
_out = partial(_edit, why="Muon runs inside optimizer.step(), on the partitions; the engine has no part in it.")
_slice = partial(_edit,
                 why="A rank needs its own slice of the gradient only: no copies for the other holders of a matrix.")
_link = partial(_edit,
                why="Linked after the first group's step, the other groups had no states yet and stayed without: "
                "safe_get_full_optimizer_state failed for them, with any optimizer.")
_scale = partial(Edit,
                 engine="ZeRO-1/2",
                 drop_when="upstream unscales by the scale that the gradients carry",
                 series="loss_scale")
_unused = partial(Edit,
                  engine="ZeRO-1/2, CPU offload",
                  drop_when="upstream clears the gradients of unused parameters",
                  series="unused_gradients",
                  why="A parameter without a gradient was stepped with that of an earlier step, with any optimizer.")
_saved = partial(Edit, engine="ZeRO-1/2", drop_when="upstream has taken the package", series="checkpoints")
_elastic = partial(_saved,
                   why="Elastic checkpoints took the states and the steps of the first group for those of all.")

EDITS = [
    _edit("insert_after",
          anchor="from deepspeed.runtime.base_optimizer import ZeROOptimizer",
          code="from deepspeed.runtime.zero.muon import engines as muon_engines",
          why="The one place that knows how this engine cuts its parameters."),
    _edit("insert_before",
          scope=f"{ENGINE}.__init__",
          anchor="self.offloaded_states: $TYPE = set()",
          code="muon_engines.bind_stage_1_and_2(self)",
          why="Muon is told once where the slices of each matrix lie."),
    _edit("replace_expression",
          scope=f"{ENGINE}._link_all_hp_params",
          anchor="any(self.round_robin_bit16_padding[i])",
          code="self.round_robin_gradients or any(self.round_robin_bit16_padding[i])",
          why="With round robin, parameters were linked to slices of others: safe_get_full_optimizer_state, universal "
          "checkpoints read and wrote the wrong momentum, of any optimizer."),
    _link("remove", scope=f"{ENGINE}._optimizer_step", anchor="self._lazy_init_hp_params_optimizer_state()"),
    _link("insert_before",
          scope=f"{ENGINE}.step",
          anchor="see_memory_usage('After optimizer before all-gather')",
          code="self._lazy_init_hp_params_optimizer_state()"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self.groups_lacking_loss_scale = set()"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_allgather_buffers = OrderedDict()"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_allgather_buffer_bytes = 0"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_allgather_max_cached_bytes = $VALUE"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_allgather_max_buffer_bytes = $VALUE"),
    _out("remove", scope=f"{ENGINE}.__init__", anchor="self._muon_pending_momentum = {}"),
    _out("remove", scope=f"{ENGINE}.destroy", anchor="self._clear_muon_allgather_buffers()"),
    *(_out("remove_definition", scope=f"{ENGINE}.{name}")
      for name in ("_muon_all_gather_partitions", "_muon_param_batches", "_clear_muon_allgather_buffers",
                   "_apply_muon_updates_cpu_offload", "_is_muon_group", "_muon_update_lacks_loss_scale",
                   "_muon_momentum_buffer", "_muon_staging_momentum", "_commit_muon_momentum")),
    # The accumulator that every other optimizer has serves Muon as well, so it is not excepted any more.
    _out("remove",
         scope=f"{ENGINE}._use_compact_grad_partition_buffer",
         anchor="params_in_partition = self.params_in_partition[group_idx]"),
    _out("remove",
         scope=f"{ENGINE}._use_compact_grad_partition_buffer",
         anchor="if len(params_in_partition) > 0 and self._is_muon_group(params_in_partition):"),
    _slice("replace_import",
           scope=f"{ENGINE}.average_tensor",
           anchor="from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam"),
    _slice("remove", scope=f"{ENGINE}.average_tensor", anchor="muon_copy_ranks = $VALUE"),
    _slice("replace",
           scope=f"{ENGINE}.average_tensor",
           anchor="copy_ranks = muon_copy_ranks or $OWN",
           code="copy_ranks = frozenset((partition_id, ))"),
    _slice("replace",
           scope=f"{ENGINE}.average_tensor",
           anchor="if self.use_multi_rank_bucket_allreduce or len(copy_ranks) > 1:",
           code="""
               if self.use_multi_rank_bucket_allreduce:
                   bucket_key = ("allreduce", process_group)
               else:
                   bucket_key = ("reduce", dst, process_group)
           """),
    *(_out(op, scope=f"{ENGINE}.{name}", anchor=anchor)
      for name in ("get_flat_partition", "_get_flat_partition_unpadded")
      for op, anchor in (("remove", "flatten_copy = $VALUE"), ("remove", "staged_momentum = None"),
                         ("remove", "if self._is_muon_group(tensor_list):"), ("remove", "buffer_idx = 0"),
                         ("replace_import", "from deepspeed.runtime.zero.muon.original_muon import muon_update"),
                         ("remove", "if getattr(tensor, 'use_muon', False) and $REST:"),
                         ("remove", "buffer_idx += $NUMEL"))),
    _out("remove", scope=f"{ENGINE}.scaled_global_norm", anchor="if self._muon_update_lacks_loss_scale(i):"),
    _edit("remove",
          scope=f"{ENGINE}.step",
          within="if self.compute_grad_norm and not self.overflow:",
          anchor="if self.cpu_offload:",
          why="The norm and the clip are those of the raw gradient, as for every other optimizer."),
    _out("remove", scope=f"{ENGINE}.step", anchor="if not self.overflow:"),
    _out("remove", scope=f"{ENGINE}.step", anchor="if self._muon_update_lacks_loss_scale(i):"),
    _scale("remove",
           scope=f"{ENGINE}.step",
           anchor="self._update_scale(self.overflow)",
           why="On a step that changed the scale, gradients were divided by the new one."),
    _scale("prepend",
           scope=f"{ENGINE}.step",
           within="if self.overflow:",
           code="self._update_scale(True)",
           why="A discarded step lowers the scale at once."),
    _scale("insert_before",
           scope=f"{ENGINE}.step",
           anchor="see_memory_usage('After optimizer before all-gather')",
           code="""
               # Not before the groups have unscaled: their gradients carry the old scale.
               self._update_scale(False)
           """,
           why="On a step that changed the scale, gradients were divided by the new one."),
    _scale("insert_after",
           scope=f"{ENGINE}.__init__",
           anchor="self.torch_autocast_gradscaler = torch.amp.GradScaler($$$ARGS)",
           code="self.check_grad_overflow = True",
           why="The scaler skipped a rank's step on that rank's own gradients; all ranks have to skip together."),
    _scale("replace",
           scope=f"{ENGINE}._optimizer_step",
           anchor="if self.torch_autocast_gradscaler:",
           code="""
               if self.zenflow:
                   self.zenflow_cpu_optimizer_step(group_no)
               else:
                   self.optimizer.step()
           """,
           why="Under torch autocast the scaler divided after clipping, so norm and clip were those of the scaled "
           "gradient, and its scale could change between the groups of a step."),
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
    _saved(
        "replace_expression",
        scope=f"{ENGINE}._load_legacy_checkpoint",
        anchor="self.optimizer.load_state_dict(optimizer_state)",
        code="self.optimizer.load_state_dict(muon_checkpoint.import_states(self, optimizer_state, current_rank_sd))",
        why="Stock DeepSpeed saved the momenta of whole matrices."),
    _saved("insert_after",
           scope=f"{ENGINE}._load_legacy_checkpoint",
           anchor="self._link_all_hp_params()",
           code="muon_checkpoint.link_loaded_states(self)",
           why="After a load, safe_get_full_optimizer_state found no states until the next step, or ever, with any "
           "optimizer."),
    _elastic("replace",
             scope=f"{ENGINE}.state_dict",
             anchor='if "step" in self.optimizer.param_groups[0]:',
             code="""
                 step = muon_checkpoint.group_step(self.optimizer.param_groups)
                 if step is not None:
                     state_dict[BASE_OPTIMIZER_STATE_STEP] = step
             """),
    _elastic("prepend",
             scope=f"{ENGINE}._restore_step_from_elastic_checkpoint",
             code="""
                 if BASE_OPTIMIZER_STATE_STEP not in all_state_dict[0]:
                     return None
             """),
    _elastic("replace_expression",
             scope=f"{ENGINE}._load_legacy_checkpoint",
             anchor="current_rank_sd[BASE_OPTIMIZER_STATE_STEP]",
             code="current_rank_sd.get(BASE_OPTIMIZER_STATE_STEP)"),
    _elastic("remove",
             scope=f"{ENGINE}._restore_base_optimizer_state",
             anchor="saved_keys = base_optimizer_group_states[0].keys()"),
    _elastic("replace_expression",
             scope=f"{ENGINE}._restore_base_optimizer_state",
             anchor="saved_keys",
             code="base_optimizer_group_states[i]"),
    _elastic("replace_expression",
             scope=f"{ENGINE}._restore_base_optimizer_state",
             anchor="torch.is_tensor(saved)",
             code="torch.is_tensor(saved) and saved.dim() > 0",
             why="torch's Adam counts steps in a tensor without dimensions, which is not padded."),
    _elastic("replace",
             scope=f"{ENGINE}._restore_base_optimizer_state",
             anchor="for param_group in self.optimizer.param_groups:",
             code="muon_checkpoint.set_group_step(self.optimizer.param_groups, base_optimizer_state_step)"),
    _unused("insert_after",
            anchor="from deepspeed.runtime.base_optimizer import ZeROOptimizer",
            code="from deepspeed.runtime.zero import unused_gradients"),
    _unused("insert_before",
            scope=f"{ENGINE}.independent_gradient_partition_epilogue",
            anchor="if self.cpu_offload is False:",
            code="unused_gradients.finish_backward_stage_1_and_2(self)"),
    _unused("prepend",
            scope=f"{ENGINE}.finalize_gradient_accumulation_boundary",
            within="if self.cpu_offload:",
            code="unused_gradients.clear_offloaded(self)"),
    _unused("replace_expression",
            scope=f"{ENGINE}._finalize_cpu_offload_gradient_accumulation",
            anchor="self.get_param_id(param) not in self._offload_accumulated_param_ids",
            code="(self.get_param_id(param) not in self._offload_accumulated_param_ids\n"
            "                        or self.get_param_id(param) in self.norm_for_param_grads)"),
    _unused("replace_expression",
            scope=f"{ENGINE}.async_accumulate_grad_in_cpu_via_gpu",
            anchor="self.micro_step_id > 0",
            code="self.micro_step_id > 0 and param_id in self._offload_accumulated_param_ids",
            why="A gradient of an earlier step was added to one that the first micro-batch did not have."),
]
