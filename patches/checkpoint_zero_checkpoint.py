# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the converter reads of ZeRO-1, ZeRO-2 and BF16_Optimizer."""

from forkbuild.edit import Edit

FILE = "deepspeed/checkpoint/zero_checkpoint.py"

EDITS = [
    Edit("replace_expression",
         scope="ZeROCheckpoint._strip_tensor_paddings",
         anchor="state_value.numel() - group_paddings[key]",
         code="max(0, state_value.numel() - group_paddings[key])",
         why="Of a small group, the last rank of BF16_Optimizer counts the padding of other ranks as well, with any "
         "optimizer.",
         engine="BF16_Optimizer",
         drop_when="upstream has this fix",
         series="checkpoints"),
]
