# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""AutoTP: what it keeps of a parameter that it replaces."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/module_inject/auto_tp.py"

_edit = partial(Edit, engine="AutoTP with zero.Init", drop_when="upstream has taken the package", series="selection")

EDITS = [
    _edit("insert_after",
          anchor="from deepspeed.runtime.zero.utils import is_zero_param",
          code="from deepspeed.runtime.zero.muon.selection import MARKS",
          why="The names of Muon's marks."),
    _edit("replace_expression",
          scope="AutoTP._gather_zero3_params",
          anchor='("use_muon", "muon_num_heads")',
          code="MARKS",
          why="The head's width and what a projection is made of were lost: a shard kept the whole model's number of "
          "heads, and fused parts stayed together."),
]
