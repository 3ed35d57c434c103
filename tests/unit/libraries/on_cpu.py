# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Runs a script as `python SCRIPT ARGUMENTS` would, where accelerate and Lightning let DeepSpeed run on CPUs.

    torchrun ... on_cpu.py SCRIPT ARGUMENTS

accelerate knows a backend for DeepSpeed's ranks on accelerators only, transformers refuses bf16 there, and Lightning
refuses the strategy. Nothing else of theirs is changed, and with GPUs nothing at all.
"""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.accelerator import get_accelerator


def allow_accelerate() -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate.state import DistributedType, PartialState

    def gloo(self: Any, *_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = gloo


def allow_trainer() -> None:
    allow_accelerate()
    import transformers.training_args
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def allow_lightning() -> None:
    from lightning.pytorch.strategies import DDPStrategy, deepspeed
    deepspeed.DeepSpeedStrategy.setup_environment = DDPStrategy.setup_environment
    deepspeed._validate_device_index_selection = lambda devices: None
    # A CPU device has no index that could be handed on; DeepSpeed then takes the local rank.
    deepspeed.argparse = SimpleNamespace(Namespace=lambda device_rank: None)


ALLOW = {"accelerate": allow_accelerate, "trainer": allow_trainer, "lightning": allow_lightning}

if __name__ == "__main__":
    script = Path(sys.argv[1])
    if get_accelerator().device_name() == "cpu":
        ALLOW[script.stem.partition("_")[0]]()
    sys.path.insert(0, str(script.resolve().parent))
    del sys.argv[0]
    runpy.run_path(str(script), run_name="__main__")
