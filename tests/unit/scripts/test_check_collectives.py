# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest

PATH = "deepspeed/runtime/zero/muon/optimizer.py"

BAD = {
    "alias": "import deepspeed.comm as dist\n\n\ndef f(x):\n    dist.all_reduce(x)\n",
    "from deepspeed": "from deepspeed import comm\n\ncomm.all_to_all_single(1, 2)\n",
    "name": "from deepspeed.comm import all_reduce\n",
    "renamed": "from deepspeed.comm import all_reduce as quiet\n",
    "inner module": "from deepspeed.comm.comm import broadcast\n",
    "star": "from deepspeed.comm import *\n",
    "full name": "import deepspeed\n\ndeepspeed.comm.barrier()\n",
    "relative": "from ....comm import barrier\n",
    "handed on": "import deepspeed.comm as dist\n\nreducers = {'sum': dist.all_reduce}\n",
    "by getattr": "import deepspeed.comm as dist\n\ngetattr(dist, 'all_gather')(1, 2)\n",
    "new group": "import deepspeed.comm as dist\n\ndist.new_group([0])\n",
    "unknown to this check": "import deepspeed.comm as dist\n\ndist.all_new_collective(1)\n",
    "helpers of DeepSpeed": "from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced\n",
}
GOOD = {
    "local questions":
    "import deepspeed.comm as dist\n\nif dist.is_initialized():\n    print(dist.get_rank(), dist.get_world_size())\n",
    "types": "import deepspeed.comm as dist\n\n\ndef f(group: dist.ProcessGroup):\n    return dist.ReduceOp.SUM\n",
    "through exchange.py": "from .exchange import Exchange\n\n\ndef f(exchange: Exchange):\n    exchange.forward(1)\n",
    "no communication": "import torch\n\ntorch.add(1, 2)\n",
}


@pytest.mark.parametrize("case", BAD)
def test_collective_is_found(check_file, case):
    found = check_file("check_collectives", BAD[case], PATH)
    assert len(found) == 1 and "exchange.py" in found[0] and "deepspeed." in found[0]


@pytest.mark.parametrize("case", GOOD)
def test_what_is_local_to_a_rank_is_not_found(check_file, case):
    assert check_file("check_collectives", GOOD[case], PATH) == []


def test_exchange_may_use_them(check_file):
    assert check_file("check_collectives", BAD["alias"], "deepspeed/runtime/zero/muon/exchange.py") == []
