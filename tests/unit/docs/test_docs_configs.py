# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every ds_config that the documents show is one that deepspeed.initialize takes."""

import json
from typing import Any

import pytest
from unit.common import DistributedTest
from unit.docs.documents import Block, blocks
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel

# What transformers' Trainer puts in the place of "auto". Another key with "auto" fails.
AUTO = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "lr": 3e-4,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "warmup_min_lr": 0,
    "warmup_max_lr": 3e-4,
    "warmup_num_steps": 2,
    "total_num_steps": 20,
    "enabled": True,
    "reduce_bucket_size": 1024,
}


def filled(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: filled(part, name) for name, part in value.items()}
    return AUTO[key] if value == "auto" else value


def complete(block: Block) -> dict[str, Any]:
    """A part of a ds_config is laid over a whole one."""
    config = {**contract.ds_config("zero2"), "gradient_accumulation_steps": 2, **filled(json.loads(block.text))}
    if config.get("train_batch_size") is None:
        config.pop("train_batch_size", None)
    # Else the first test would compile FusedAdam.
    config["optimizer"]["params"].setdefault("torch_adam", True)
    return config


class TestConfigs(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("block", blocks("json"), ids=str)
    def test_trains_a_step(self, block):
        config = complete(block)
        engine = contract.initialize(ProductModel(SHAPES), config)
        contract.train_step(engine, Gradients(SHAPES, 1, gas=config["gradient_accumulation_steps"]), 0)
        assert engine.global_steps == 1
        engine.destroy()
