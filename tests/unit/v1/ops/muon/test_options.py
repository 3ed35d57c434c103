# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Unknown keys of the Muon optimizer: which are refused, and with which words."""

import importlib
from pathlib import Path

import pytest
import torch

from deepspeed.runtime.zero.muon.options import (GROUP_KEYS, GROUP_OPTIONS, MUON_GROUP_DEFAULTS, OPTIONS,
                                                 check_muon_group, check_optimizer_params)
from deepspeed.runtime.zero.muon.optimizer import MuonWithAuxAdam


def test_every_known_key_passes_and_nothing_is_changed():
    values = {
        "workspace_mb": 1.5,
        "tensor_parallel": "shard",
        "muon_stats_every": 10,
        "foreach": None,
        "fused_params": {
            "c_attn": 3
        }
    }
    params = {key: values.get(key, True) for key in OPTIONS}
    given = dict(params)
    check_optimizer_params(given, [{"params": [], "lr": 1e-3}, object()])
    assert given == params


def test_an_unknown_key_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError) as caught:
        check_optimizer_params({"lr": 1e-3, "momentun": 0.9, "qqqq": 5})
    message = str(caught.value)
    assert "does not know 'momentun' (did you mean 'momentum'?), 'qqqq'. Valid keys of" in message
    assert all(key in message for key in OPTIONS)


@pytest.mark.parametrize("key", [*GROUP_KEYS, *GROUP_OPTIONS])
def test_what_a_param_group_may_hold(key):
    check_optimizer_params({}, [{key: 1}])


@pytest.mark.parametrize("key, hint", [("wieght_decay", " (did you mean 'weight_decay'?)"), ("lr_scale", ""),
                                       ("muon_lr", " (it counts for the whole optimizer: set it in ds_config.json)")])
def test_a_key_of_a_group_that_is_not_read(key, hint):
    with pytest.raises(ValueError) as caught:
        check_optimizer_params({}, [{"params": [], "name": "decay", key: 1}])
    assert f"does not read the key {key!r} of param group 'decay'{hint}. A group may set" in str(caught.value)


@pytest.mark.parametrize("use_muon, key", [(True, "betas"), (False, "momentum"), (False, "ns_steps")])
def test_a_group_that_says_its_half_may_not_set_what_the_other_half_reads(use_muon, key):
    with pytest.raises(ValueError, match=f"{key!r} of param group 1, whose use_muon is {use_muon}. A group may set"):
        check_optimizer_params({}, [{"params": []}, {"params": [], "use_muon": use_muon, key: 1}])


@pytest.mark.parametrize("key, value, expected", [
    ("muon_selftest", "no", "muon_selftest must be true or false, got 'no'"),
    ("muon_report", 0, "muon_report must be true or false, got 0"),
    ("muon_stats_every", -1, "muon_stats_every must be a number of steps, or 0 for no statistics, got -1"),
    ("muon_stats_every", 2.0, "muon_stats_every must be"),
    ("muon_stats_every", True, "muon_stats_every must be"),
    ("per_head_muon", None, "per_head_muon must be true or false"),
    ("adam_w_mode", 1, "adam_w_mode must be true or false"),
    ("torch_adam", "true", "torch_adam must be true or false"),
    ("fp32_optimizer_states", None, "fp32_optimizer_states must be true or false"),
    ("foreach", 1, "foreach must be true or false"),
    ("workspace_mb", 0, "workspace_mb must be a number above 0"),
    ("tensor_parallel", "on", "tensor_parallel must be one of exact, shard"),
])
def test_a_bad_value_of_an_option_of_the_whole_optimizer(key, value, expected):
    with pytest.raises(ValueError, match=expected):
        check_optimizer_params({key: value})


@pytest.mark.parametrize("key, value", [("lr", -1), ("betas", [0.9]), ("betas", [0.9, 1.0]), ("betas", 0.9),
                                        ("eps", "small"), ("weight_decay", None)])
def test_a_bad_value_of_an_adam_group(key, value):
    with pytest.raises(ValueError, match=f"Muon: {key} of param group 0 must be .*, got"):
        MuonWithAuxAdam([{"params": [torch.nn.Parameter(torch.zeros(4))], "use_muon": False, key: value}])


def test_the_page_of_options_is_up_to_date(monkeypatch):
    root = Path(__file__).resolve().parents[5]
    monkeypatch.syspath_prepend(str(root / "scripts"))
    options_page = importlib.import_module("options_page")
    assert options_page.PAGE.read_text() == options_page.page(), "run python scripts/options_page.py"
    assert all(f"| `{key}` |" in options_page.page() for key in OPTIONS)


@pytest.mark.parametrize("key", MUON_GROUP_DEFAULTS)
def test_the_defaults_are_values_that_are_taken(key):
    check_muon_group("a group", MUON_GROUP_DEFAULTS)
    with pytest.raises(ValueError, match="param group 0|ns_steps|ns_coefficients"):
        MuonWithAuxAdam([{"params": [torch.nn.Parameter(torch.zeros(4, 4))], "use_muon": True, key: "nonsense"}])
