# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fragments of parameters in flat partitions."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/utils/tensor_fragment.py"

_any = partial(Edit,
               engine="ZeRO-1/2, BF16_Optimizer",
               drop_when="upstream has taken the package",
               series="checkpoints")

EDITS = [
    _any("replace",
         scope="map_to_flat_opt_states",
         anchor="buffer = torch.zeros_like(hp_param)",
         code="""
             # Muon's momentum is fp32, also where master weights are not.
             dtype = torch.float32 if key == "momentum_buffer" else hp_param.dtype
             buffer = torch.zeros_like(hp_param, dtype=dtype)
         """,
         why="With master weights in bf16, a universal checkpoint's momentum was rounded to them."),
]
