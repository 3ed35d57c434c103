# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The example's ds_configs: each is complete, and two engines differ in nothing but the engine."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from ds_config import CONFIG_FOLDER, ENGINES, OPTIMIZERS, load_ds_config, schedule_steps  # noqa: E402

# What makes an engine, and what depends on it. Everything else must be equal in all files.
ENGINE_KEYS = {"zero_optimization", "data_types"}
STAGES = {"bf16": 1, "zero1": 1, "zero2": 2, "zero3": 3, "zero2-offload": 2, "zero3-offload": 3, "zero2-fp32": 2}


def common_part(config: dict) -> dict:
    part = {key: value for key, value in config.items() if key not in ENGINE_KEYS}
    part.pop("bf16", None)
    part["optimizer"]["params"].pop("torch_adam", None)
    return part


def test_every_file_is_an_engine_and_every_engine_has_a_file():
    assert {path.stem for path in CONFIG_FOLDER.glob("*.json")} == set(ENGINES) == set(STAGES)


@pytest.mark.parametrize("engine", ENGINES)
def test_file_is_muon_with_the_stage_of_its_name(engine: str):
    config = json.loads((CONFIG_FOLDER / f"{engine}.json").read_text())
    zero = config["zero_optimization"]
    assert config["optimizer"]["type"] == "Muon"
    assert zero["stage"] == STAGES[engine]
    assert ("offload_optimizer" in zero) == engine.endswith("-offload")
    # This is what makes DeepSpeed choose BF16_Optimizer.
    assert (config.get("data_types") == {"grad_accum_dtype": "fp32"}) == (engine == "bf16")
    assert config.get("bf16") == (None if engine.endswith("-fp32") else {"enabled": True})
    # DeepSpeed refuses torch's Adam for an optimizer state on the CPU; elsewhere it saves compiling a kernel.
    assert config["optimizer"]["params"].get("torch_adam", False) != engine.endswith("-offload")


@pytest.mark.parametrize("opt", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_differ_only_in_the_engine(engine: str, opt: str):
    assert common_part(load_ds_config(engine, opt)) == common_part(load_ds_config("bf16", opt))


@pytest.mark.parametrize("engine", ENGINES)
def test_adamw_changes_only_the_optimizer_and_keeps_the_adam_kernel(engine: str):
    muon, adamw = (load_ds_config(engine, opt) for opt in OPTIMIZERS)
    muon_optimizer, adamw_optimizer = muon.pop("optimizer"), adamw.pop("optimizer")
    assert muon == adamw
    assert (muon_optimizer["type"], adamw_optimizer["type"]) == ("Muon", "AdamW")
    assert muon_optimizer["params"].get("torch_adam") == adamw_optimizer["params"].get("torch_adam")
    assert not {"muon_lr", "adam_lr", "momentum"} & set(adamw_optimizer["params"])


def test_steps_rescale_the_schedule_and_keep_the_share_of_warmup():
    full = load_ds_config("bf16", "muon")["scheduler"]["params"]
    halved = load_ds_config("bf16", "muon", steps=full["total_num_steps"] // 2)
    assert schedule_steps(halved) == full["total_num_steps"] // 2
    assert halved["scheduler"]["params"]["warmup_num_steps"] == full["warmup_num_steps"] // 2
    assert load_ds_config("bf16", "muon", steps=3)["scheduler"]["params"]["warmup_num_steps"] == 2


@pytest.mark.parametrize("engine, opt, found", [("zero4", "muon", "zero4"), ("bf16", "sgd", "sgd")])
def test_unknown_names_are_refused_with_the_known_ones(engine: str, opt: str, found: str):
    with pytest.raises(ValueError, match=f"{found}.*(zero1|adamw)"):
        load_ds_config(engine, opt)
