# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""FP16_UnfusedOptimizer: stage 0 with fp16 or bf16 weights and fp32 master weights."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/fp16/unfused_optimizer.py"
ENGINE = "FP16_UnfusedOptimizer"

_edit = partial(Edit, engine="stage 0, fp16 and bf16", drop_when="upstream has taken the package", series="stage_0")
_scale = partial(Edit,
                 engine="stage 0, fp16 and bf16",
                 drop_when="upstream unscales by the scale that the gradients carry",
                 series="stage_0")

EDITS = [
    _edit("insert_after",
          anchor="from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer",
          code="from deepspeed.runtime.zero.muon import engines as muon_engines",
          why="The one place that knows how engines hold their parameters."),
    _edit(
        "prepend",
        scope=f"{ENGINE}.initialize_optimizer_states",
        code="""
              if muon_engines.is_muon(self.optimizer):
                  # It makes its states when they are needed; a step with zero gradients would decay the weights.
                  return
          """,
        why="The step that made the states was a step: it applied the weight decay and counted in Adam's correction."),
    Edit("replace_expression",
         scope=f"{ENGINE}.step",
         anchor="get_global_norm(norm_list=norm_groups)",
         code="muon_engines.norm_with_experts(get_global_norm(norm_list=norm_groups), self.fp16_groups, self.mpu)",
         why="The norm, and so the clip, left out the experts, with any optimizer.",
         engine="stage 0, fp16 and bf16",
         drop_when="upstream's norm has the experts in it",
         series="stage_0"),
    _scale("remove",
           scope=f"{ENGINE}.step",
           anchor="self._update_scale(False)",
           why="On a step that changed the scale, gradients were divided by the new one."),
    _scale("insert_after",
           scope=f"{ENGINE}.step",
           anchor="self.unscale_and_clip_grads(self._global_grad_norm)",
           code="""
               self._global_grad_norm = self._global_grad_norm / self.loss_scale_config.cur_scale
               # Not before the gradients are unscaled: they carry the old scale.
               self._update_scale(False)
           """,
           why="The norm that users get was that of the scaled gradient."),
]
