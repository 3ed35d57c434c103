# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest

PATH = "deepspeed/runtime/zero/muon/optimizer.py"

BAD = {
    "attribute": "def f(engine):\n    return engine._partition_numel\n",
    "method": "def f(engine):\n    engine._release()\n",
    "set": "def f(engine):\n    engine._partition_numel = 1\n",
    "behind self": "class A:\n\n    def f(self):\n        return self.engine._partition_numel\n",
    "getattr": "def f(engine):\n    return getattr(engine, '_partition_numel', 0)\n",
    "hasattr": "def f(engine):\n    return hasattr(engine, '_partition_numel')\n",
    "import": "from deepspeed.runtime.utils import _helper\n",
    "private module": "from deepspeed._private import helper\n",
    "module attribute": "from deepspeed.runtime import utils\n\nutils._helper()\n",
    "relative": "from ...utils import _helper\n",
}
GOOD = {
    "own attribute": "class A:\n\n    def f(self):\n        self._seen = 1\n        return self._seen\n",
    "inherited": "class A(Base):\n\n    def f(self):\n        return self._step_supports_amp_scaling\n",
    "defined in the file": "class A:\n\n    def _key(self):\n        pass\n\n\ndef f(a: A):\n    a._key()\n",
    "torch": "import torch\n\ntorch._foreach_add_([], 1)\ntorch._C._nn.gelu\n",
    "own package": "from .plan import _derive\n",
    "dunder": "def f(x):\n    return x.__class__.__name__\n",
    "public": "def f(engine):\n    return engine.partition_count\n",
}


@pytest.mark.parametrize("case", BAD)
def test_private_name_is_found(check_file, case):
    found = check_file("check_private", BAD[case], PATH)
    assert len(found) == 1 and "engines.py" in found[0]


@pytest.mark.parametrize("case", GOOD)
def test_other_names_are_not_found(check_file, case):
    assert check_file("check_private", GOOD[case], PATH) == []


def test_adapter_to_the_engines_may_use_them(check_file):
    for adapter in ("engines", "checkpoint", "checkpoint_check"):
        assert check_file("check_private", BAD["attribute"], f"deepspeed/runtime/zero/muon/{adapter}.py") == []
