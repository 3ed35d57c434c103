# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""DeepSpeedEngine: the config of the Muon optimizer."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/engine.py"
ENGINE = "DeepSpeedEngine"

_options = partial(Edit, engine="all", drop_when="upstream has taken the package", series="options")
_package = partial(Edit, engine="all", drop_when="upstream has taken the package", series="engine")
_selection = partial(Edit, engine="all", drop_when="upstream has taken the package", series="selection")
_load = partial(Edit,
                drop_when="upstream has this fix",
                series="checkpoints",
                scope=f"{ENGINE}._load_checkpoint",
                engine="ZeRO-3")

_check = partial(Edit, drop_when="upstream checks a checkpoint before it loads it", series="checkpoints", engine="all")

_latest = partial(Edit, drop_when="upstream writes latest last", series="checkpoints", engine="all")

EDITS = [
    _options("insert_after",
             anchor="from deepspeed.runtime.bf16_optimizer import BF16_Optimizer",
             code="from deepspeed.runtime.zero.muon import options as muon_options",
             why="The table of options."),
    _options("prepend",
             scope=f"{ENGINE}._configure_basic_optimizer",
             within="elif self.optimizer_name() == MUON_OPTIMIZER:",
             code="""
                 # First in the branch: what follows takes keys out of the dict and drops those that it does not know.
                 muon_options.check_optimizer_params(optimizer_parameters, model_parameters)
                 muon_engines.refuse_features(self)
             """,
             why="A mistyped key of the Muon optimizer trained with the default value and nothing said so."),
    _selection("insert_after",
               anchor="from deepspeed.runtime.bf16_optimizer import BF16_Optimizer",
               code="from deepspeed.runtime.zero.muon.selection import check_groups",
               why="The groups' own choice."),
    _selection("prepend",
               scope=f"{ENGINE}._configure_basic_optimizer",
               within="elif self.optimizer_name() == MUON_OPTIMIZER:",
               code="check_groups(model_parameters)",
               why="A param group's own use_muon is known only where the groups are a list."),
    _package("insert_after",
             anchor="from deepspeed.runtime.bf16_optimizer import BF16_Optimizer",
             code="from deepspeed.runtime.zero.muon import engines as muon_engines",
             why="What engines have in common."),
    _package(
        "replace",
        scope=ENGINE,
        anchor="_MUON_HALF_KEYS = $VALUE",
        code="""
                 # Which of the optimizer's config keys each half of a Muon param group accepts.
                 _MUON_HALF_KEYS = muon_options.MUON_GROUP_OPTIONS
             """,
        why="The options that the optimizer reads from its groups: nesterov, the Newton-Schulz settings, the scale."),
    _package("insert_after",
             scope=f"{ENGINE}._configure_basic_optimizer",
             anchor="optimizer = MuonWithAuxAdam($$$ARGS)",
             code="""
                 optimizer.configure(optimizer_parameters, self.zero_reduce_bucket_size())
             """,
             why="Muon's buffers stay below the user's bound, and below the buckets that the engine itself makes."),
    _package("replace",
             scope=f"{ENGINE}._configure_basic_optimizer",
             anchor="if self.has_moe_layers:",
             code="""
                 if self.has_moe_layers:
                     param_groups = muon_engines.split_experts(param_groups)
             """,
             why="Experts of groups of one name were put together, with the options of the last."),
    Edit("replace_expression",
         scope=f"{ENGINE}._configure_optimizer",
         anchor="configure_moe_param_groups(model_parameters)",
         code="configure_moe_param_groups(muon_engines.with_names(model_parameters))",
         why="Param groups without a name were a KeyError where there are experts, with any optimizer.",
         engine="all",
         drop_when="upstream takes param groups without a name",
         series="engine"),
    Edit("insert_before",
         scope=f"{ENGINE}._configure_optimizer",
         anchor="self._configure_autoep_folding_optimizer_gradient_reduction()",
         code="muon_engines.bind_stage_0(self)",
         why="Without ZeRO every rank repeated every orthogonalization.",
         engine="stage 0",
         drop_when="upstream has taken the package",
         series="stage_0"),
    # After bind_stage_0: what is said about the cost comes from the layouts.
    _package("insert_after",
             scope=f"{ENGINE}._configure_optimizer",
             anchor="self._configure_autoep_folding_optimizer_gradient_reduction()",
             code="muon_engines.report_at_start(self)",
             why="Most reports of a Muon that does not work are of a Muon that was not on."),
    _package("append",
             scope=f"{ENGINE}._take_model_step",
             code="muon_engines.write_stats(self)",
             why="Whether the updates are orthogonal, and how large, is to be seen where loss and learning rate are."),
    _package("insert_before",
             scope=f"{ENGINE}.load_checkpoint",
             anchor="if self._optimizer_has_ckpt_event_prologue():",
             code="muon_engines.weights_are_set(self)",
             why="Muon's check of the first step looks at its weights at the second."),
    _package("prepend",
             scope=f"{ENGINE}._do_optimizer_sanity_check",
             code="muon_engines.refuse_unsupported(self, basic_optimizer)",
             why="torch.optim.Muon failed at the first step, on a flat partition, without saying what to use."),
    Edit("insert_after",
         scope=f"{ENGINE}.backward",
         anchor="gas_scaled_loss = loss",
         code="loss = muon_engines.scale_loss_of_stage_0(self.optimizer, loss)",
         why="Nothing scaled the loss in stage 0 with fp16, but step() divided the gradients by the scale.",
         engine="stage 0, fp16",
         drop_when="upstream's engine scales the loss of stage 0",
         series="stage_0"),
    Edit("prepend",
         scope=f"{ENGINE}.clip_fp32_gradients",
         code="""
             if self.has_moe_layers:
                 muon_engines.clip_with_experts(self)
                 return
         """,
         why="The norm was the mean of what ranks with different experts found, with any optimizer.",
         engine="stage 0, fp32",
         drop_when="upstream clips by the norm of all experts",
         series="stage_0"),
    _load("replace_expression",
          anchor="not load_optimizer_states",
          code="(not load_optimizer_states or (load_module_only and not self.load_universal_checkpoint()))",
          why="load_module_only loaded nothing, and did not say so."),
    _load("replace_expression",
          anchor="get_fp32_state_dict_from_zero_checkpoint(load_dir)",
          code="get_fp32_state_dict_from_zero_checkpoint(load_dir, tag)",
          why="The weights were those of the latest checkpoint, whatever tag was asked for."),
    _check("insert_after",
           anchor="from deepspeed.runtime.bf16_optimizer import BF16_Optimizer",
           code="from deepspeed.runtime.zero.muon import checkpoint_check as muon_checkpoint",
           why="The check."),
    _check(
        "insert_before",
        scope=f"{ENGINE}.load_checkpoint",
        anchor="if self._optimizer_has_ckpt_event_prologue():",
        code="""
               muon_checkpoint.check_before_load(
                   self,
                   muon_checkpoint.Request(load_dir=load_dir,
                                           tag=str(tag),
                                           states=load_optimizer_states and not load_module_only,
                                           names_matter=load_module_strict and custom_load_fn is None))
           """,
        why="A file that is cut short, of another model or of another optimizer failed when the weights were loaded "
        "already, on one rank alone, or was loaded."),
    *(_latest("insert_before",
              scope=f"{ENGINE}.{name}",
              anchor=anchor,
              code="dist.barrier()",
              why="latest named a checkpoint whose files other ranks had not written, or never wrote.")
      for name, anchor in (("save_checkpoint", "if save_latest and self.global_rank == 0:"),
                           ("_commit_decoupled_checkpoint", "if self.global_rank == 0 and commit_info.save_latest:"))),
    *(_latest("replace",
              scope=f"{ENGINE}.{name}",
              anchor=f"with open(os.path.join({prefix}save_dir, 'latest'), 'w') as fd:",
              code=f"muon_checkpoint.write_latest({prefix}save_dir, {prefix}tag)",
              why="A kill, or a full disk, between opening and writing left latest empty.")
      for name, prefix in (("save_checkpoint", ""), ("_commit_decoupled_checkpoint", "commit_info."))),
    Edit("insert_before",
         scope=f"{ENGINE}.load_checkpoint",
         anchor="copytree(offload_ckpt_dir, offload_dir, dirs_exist_ok=True)",
         code="""
             muon_states.load_beside_swap_files(self, os.path.join(load_dir, tag), load_optimizer_states
             and not load_module_only)
         """,
         why="With NVMe offload, no optimizer got its states back, and small sub-groups not even their weights.",
         engine="ZeRO-3, NVMe offload",
         drop_when="upstream loads what is not in swap files",
         series="checkpoints"),
    Edit("insert_after",
         anchor="from deepspeed.runtime.bf16_optimizer import BF16_Optimizer",
         code="from deepspeed.runtime.zero.muon import checkpoint as muon_states",
         why="The loader.",
         engine="ZeRO-3, NVMe offload",
         drop_when="upstream loads what is not in swap files",
         series="checkpoints"),
]
