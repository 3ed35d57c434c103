# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What ZeRO-1/2 and BF16_Optimizer have in common."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/base_optimizer.py"

_any = partial(Edit, engine="ZeRO-1/2, BF16_Optimizer", drop_when="upstream has this fix", series="checkpoints")

EDITS = [
    _any("replace_expression",
         scope="ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir",
         anchor="steps[0] is not None",
         code="steps and steps[0] is not None",
         why="A small group can leave a rank nothing but padding: no parameter, so no step either, with any optimizer."
         ),
]
