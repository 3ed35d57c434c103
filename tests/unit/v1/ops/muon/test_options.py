# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Unknown keys of the Muon optimizer: which are refused, and with which words."""

import pytest
import torch

from deepspeed.runtime.zero.muon.options import GROUP_KEYS, GROUP_OPTIONS, OPTIONS, check_optimizer_params
from deepspeed.runtime.zero.muon.optimizer import MuonWithAuxAdam


def test_every_known_key_passes_and_nothing_is_changed():
    params = {key: None for key in OPTIONS}
    check_optimizer_params(params, [{"params": [], "lr": 1e-3}, object()])
    assert params == {key: None for key in OPTIONS}


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
])
def test_a_bad_value_of_an_option_of_the_whole_optimizer(key, value, expected):
    optimizer = MuonWithAuxAdam([dict(params=[torch.nn.Parameter(torch.zeros(4, 4))], use_muon=True)])
    with pytest.raises(ValueError, match=expected):
        optimizer.configure({key: value})
