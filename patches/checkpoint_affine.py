# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Affine maps of universal checkpoints."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/checkpoint/affine.py"

_any = partial(Edit, engine="all", drop_when="upstream has taken the package", series="checkpoints")

EDITS = [
    _any("insert_after",
         anchor="SCALE_POWER_BY_STATE = $VALUE",
         code="SCALE_POWER_BY_STATE['momentum_buffer'] = -1",
         why="Muon's momentum is a mean of gradients, like exp_avg."),
]
