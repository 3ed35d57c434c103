# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""deepspeed.initialize: which parameters Muon takes."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/__init__.py"

_edit = partial(Edit,
                scope="set_optimizer_flags",
                engine="all",
                drop_when="upstream has taken the package",
                series="selection")

EDITS = [
    Edit("insert_after",
         anchor="from .runtime.engine import MUON_OPTIMIZER",
         code="from .runtime.zero.muon.selection import mark_groups, tag_parameters",
         why="The rules by module.",
         engine="all",
         drop_when="upstream has taken the package",
         series="selection"),
    Edit("insert_before",
         scope="initialize",
         anchor="if not isinstance(model, PipelineModule):",
         code="model_parameters = mark_groups(model_parameters)",
         why="A param group's own use_muon was dropped without a word.",
         engine="all",
         drop_when="upstream has taken the package",
         series="selection"),
    _edit("prepend",
          within="if config_class.optimizer_name == MUON_OPTIMIZER:",
          code="tag_parameters(model, getattr(config_class, 'optimizer_params', None) or {})",
          why="A user's own choice was overwritten, and tables, heads and routers were orthogonalized."),
    _edit("remove", anchor="if len(_layer_shape(p)) >= 2 and $NAMES:", why="The choice was made by name alone."),
]
