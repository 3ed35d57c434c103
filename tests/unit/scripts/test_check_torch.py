# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""check_torchdist and check_torchcuda: every way to reach the module is found, and text about it is not."""

import pytest

WAYS = {
    "import": "import torch.{module}\n",
    "import as": "import torch.{module} as d\n",
    "from torch": "from torch import {module}\n",
    "from torch as": "from torch import nn, {module} as d\n",
    "from the module": "from torch.{module} import something\n",
    "attribute": "import torch\n\n\ndef f():\n    return torch.{module}.something()\n",
    "aliased torch": "import torch as t\n\nt.{module}.something()\n",
    "assigned": "import torch\n\nt = torch\nt.{module}.something()\n",
    "getattr": "import torch\n\ngetattr(torch, '{module}')\n",
    "import_module": "import importlib\n\nimportlib.import_module('torch.{module}')\n",
    "__import__": "__import__('torch.{module}')\n",
}
CLEAN = {
    "comment": "# torch.{module} is not used here\n",
    "docstring": '"""Replaces torch.{module}."""\n',
    "other module": "import torch\n\ntorch.optim.Adam\n",
    "longer name": "import torch\n\ntorch.{module}_tools.something()\n",
    "same name elsewhere": "import mine\n\nmine.{module}.something()\n",
}
SCRIPTS = {"check_torchdist": "distributed", "check_torchcuda": "cuda"}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("way", WAYS)
def test_use_is_found_once_with_its_line(check_file, script, way):
    text = WAYS[way].format(module=SCRIPTS[script])
    line = next(number for number, row in enumerate(text.splitlines(), 1) if SCRIPTS[script] in row)
    found = check_file(script, text)
    assert len(found) == 1
    assert found[0].startswith(f"deepspeed/module.py:{line}: torch.{SCRIPTS[script]}")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("case", CLEAN)
def test_text_and_other_names_are_not_found(check_file, script, case):
    assert check_file(script, CLEAN[case].format(module=SCRIPTS[script])) == []


def test_deepspeed_comm_is_the_way_to_communicate(check_file):
    assert check_file("check_torchdist", "import deepspeed.comm as dist\n\ndist.all_reduce(1)\n") == []


def test_cuda_call_on_a_tensor_is_found(check_file):
    assert len(check_file("check_torchcuda", "def f(tensor):\n    return tensor.cuda(1)\n")) == 1


def test_marked_line_is_left_alone(check_file):
    text = "import torch\n\ntorch.cuda.get_device_capability()  # ignore-cuda\ntorch.cuda.synchronize()\n"
    found = check_file("check_torchcuda", text)
    assert len(found) == 1 and found[0].startswith("deepspeed/module.py:4:")


def test_file_that_does_not_parse_is_reported(check_file):
    found = check_file("check_torchdist", "import torch\ndef f(:\n")
    assert len(found) == 1 and "cannot be parsed" in found[0] and found[0].startswith("deepspeed/module.py:2:")
