# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Prefetching parameters, here from NVMe."""

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/zero/partitioned_param_coordinator.py"

EDITS = [
    Edit("replace_expression",
         scope="PartitionedParameterCoordinator.__prefetch_nvme_param_partitions",
         anchor="param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE",
         code="""(param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
         and all(param is not other for other in swap_in_params))""",
         why="A parameter that comes twice in what is prefetched, as in a small model or a tied one, ended the run.",
         engine="ZeRO-3, NVMe offload of parameters",
         drop_when="upstream asks for each parameter once",
         series="nvme_offload"),
]
