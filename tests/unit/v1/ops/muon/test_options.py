# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Unknown keys of the Muon optimizer: which are refused, and with which words."""

import pytest

from deepspeed.runtime.zero.muon.options import OPTIONS, check_optimizer_params


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


@pytest.mark.parametrize("key", ["params", "name", "use_muon", "moe", "initial_lr", "layer_id", "lr_mult", "max_lr"])
def test_other_keys_of_param_groups_pass(key):
    check_optimizer_params({}, [{key: 1}])


@pytest.mark.parametrize("key, hint", [("wieght_decay", "(did you mean 'weight_decay'?)"),
                                       ("muon_lr", "(it counts for the whole optimizer: set it in ds_config.json)")])
def test_a_key_of_a_group_that_is_meant_for_muon_and_not_read(key, hint):
    with pytest.raises(ValueError) as caught:
        check_optimizer_params({}, [{"params": [], "name": "decay", key: 1}])
    assert f"does not read the key {key!r} of param group 'decay' {hint}. A group may set lr," in str(caught.value)
