# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ready ds_configs of this example and the AdamW variant of each."""

import copy
import json
from pathlib import Path
from typing import Any

CONFIG_FOLDER = Path(__file__).resolve().parent / "configs"
ENGINES = ("bf16", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "zero2-fp32")
OPTIMIZERS = ("muon", "adamw")

# The best of a sweep over learning rate and weight decay; see README.md.
ADAMW_PARAMS = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def load_ds_config(engine: str, opt: str, steps: int | None = None) -> dict[str, Any]:
    """Returns the ds_config of ``engine``, with AdamW in place of Muon where ``opt`` is "adamw".

    ``steps`` (optimizer steps) replaces the length of the learning-rate schedule.
    Raises ValueError for an engine or optimizer that is not in ENGINES or OPTIMIZERS.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    if opt not in OPTIMIZERS:
        raise ValueError(f"optimizer {opt!r} is not one of {', '.join(OPTIMIZERS)}")
    config = json.loads((CONFIG_FOLDER / f"{engine}.json").read_text())
    if opt == "adamw":
        config["optimizer"] = _adamw_for(config["optimizer"])
    if steps is not None:
        schedule = config["scheduler"]["params"]
        schedule["warmup_num_steps"] = max(2, schedule["warmup_num_steps"] * steps // schedule["total_num_steps"])
        schedule["total_num_steps"] = steps
    return config


def schedule_steps(config: dict[str, Any]) -> int:
    """The number of optimizer steps that the config's learning-rate schedule spans."""
    return config["scheduler"]["params"]["total_num_steps"]


def _adamw_for(muon: dict[str, Any]) -> dict[str, Any]:
    params = copy.deepcopy(ADAMW_PARAMS)
    # Which Adam kernel runs belongs to the engine, not to the optimizer, so both optimizers use the same.
    if "torch_adam" in muon["params"]:
        params["torch_adam"] = muon["params"]["torch_adam"]
    return {"type": "AdamW", "params": params}
