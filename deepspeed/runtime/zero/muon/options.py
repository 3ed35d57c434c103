# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The keys of `"optimizer": {"type": "Muon", "params": {...}}` in ds_config.json, and of the param groups."""

import difflib
import math
from functools import partial
from typing import Any, Callable, Dict, Iterable, Mapping

from deepspeed.runtime.zero.muon.coefficients import METHODS, resolve
from deepspeed.runtime.zero.muon.fused import FUSED_KEY, check_fused

ADJUST_LR_FNS = ("original", "match_rms_adamw")
NS_DTYPES = ("float32", "float16", "bfloat16")
TENSOR_PARALLEL = ("exact", "shard")
DEFAULT_WORKSPACE_MB = 256

# What the engine reads, by what it is for. A key that is not here is refused.
OPTIONS: Dict[str, str] = {
    "lr": "learning rate of both halves",
    "muon_lr": "learning rate of the Muon half, before lr",
    "adam_lr": "learning rate of the Adam half, before lr",
    "weight_decay": "decoupled weight decay of both halves",
    "momentum": "momentum of the Muon half",
    "ns_method": "Newton-Schulz iteration of the Muon half, gram or standard",
    "nesterov": "Nesterov blend in the Muon half",
    "ns_steps": "Newton-Schulz steps",
    "ns_coefficients": "jordan, you, polar_express, cans, or a list of (a, b, c) triples",
    "ns_dtype": "dtype of the iteration and of the wire, float32, float16 or bfloat16",
    "adjust_lr_fn": "scale of the Muon update, original or match_rms_adamw",
    "workspace_mb": "bound in MiB on what a step holds beyond the momentum",
    "adam_params": "list of regular expressions: parameters whose name one of them is found in go to Adam",
    "muon_params": "the same for Muon, where the rules by module would say Adam",
    "fused_params":
    "projections to take apart: known, or regular expressions with the number or the sizes of the parts",
    "tensor_parallel": "exact exchanges the blocks of tensor-parallel ranks, shard orthogonalizes each on its own",
    "muon_report": "false silences the start-up report",
    "muon_selftest": "false leaves out the check of the first step with a learning rate above 0",
    "muon_stats_every": "statistics of the Muon half after every so many steps, 0 for none",
    "per_head_muon": "orthogonalize attention projections head by head",
    "betas": "betas of the Adam half",
    "eps": "eps of the Adam half",
    "adam_w_mode": "decoupled weight decay in the Adam half",
    "torch_adam": "take torch's Adam for the Adam half",
    "foreach": "torch_adam only: torch's argument of that name",
    "fp32_optimizer_states": "CPU offload only: keep the Adam half's state in fp32",
}

# Defaults of the two kinds of param groups: those of stock DeepSpeed 0.19.8, so that a ds_config keeps its meaning.
MUON_GROUP_DEFAULTS: Dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "nesterov": True,
    "ns_method": "gram",
    "ns_steps": 5,
    "ns_coefficients": "jordan",
    "ns_dtype": None,
    "adjust_lr_fn": "original",
}
ADAM_GROUP_DEFAULTS: Dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}

# Options that a param group may set for itself. The other options count for the whole optimizer.
MUON_GROUP_OPTIONS = tuple(MUON_GROUP_DEFAULTS)
GROUP_OPTIONS = tuple({**MUON_GROUP_DEFAULTS, **ADAM_GROUP_DEFAULTS})
# What else a group may hold: DeepSpeed's engine reads it.
GROUP_KEYS = ("params", "name", "use_muon", "moe")


def check_optimizer_params(optimizer_params: Mapping[str, Any], model_parameters: Iterable[Any] = ()) -> None:
    """Refuses keys of the Muon optimizer that nothing reads. Changes nothing.

    Args:
        optimizer_params: "params" of the optimizer in ds_config.json, complete.
        model_parameters: what deepspeed.initialize got as model_parameters, as a list. Its dicts are param groups.

    Raises:
        ValueError: names the key and lists the valid ones, or the valid values of an option of the whole optimizer, or
            says that "auto" has not been replaced.
    """
    unknown = [key for key in optimizer_params if key not in OPTIONS]
    if unknown:
        found = ", ".join(repr(key) + _suggestion(key) for key in unknown)
        raise ValueError(f"The Muon optimizer does not know {found}. Valid keys of \"optimizer\": {{\"params\": ...}} "
                         f"are {', '.join(sorted(OPTIONS))}.")
    left = [key for key, value in optimizer_params.items() if isinstance(value, str) and value == "auto"]
    if left:
        raise ValueError(
            f"Muon: the value of {', '.join(left)} is \"auto\", which nothing has replaced. transformers' "
            "Trainer replaces it for lr, weight_decay, betas and eps, accelerate for lr and weight_decay. "
            "Set the value.")
    for key, check in _CHECKS.items():
        if key in optimizer_params:
            check(optimizer_params[key])
    groups = [item for item in model_parameters if isinstance(item, dict)]
    for index, group in enumerate(groups):
        _check_group_keys(repr(group.get("name", index)), group)


def _check_group_keys(name: str, group: Mapping[str, Any]) -> None:
    """The engine keeps of a group only what it knows, so that any other key would be dropped without a word."""
    own = {True: MUON_GROUP_OPTIONS, False: tuple(ADAM_GROUP_DEFAULTS)}.get(group.get("use_muon"), GROUP_OPTIONS)
    for key in group:
        if key in own or key in GROUP_KEYS:
            continue
        hint = _suggestion(key)
        if key in GROUP_OPTIONS:
            hint = f", whose use_muon is {group['use_muon']}"
        elif key in OPTIONS:
            hint = " (it counts for the whole optimizer: set it in ds_config.json)"
        raise ValueError(f"The Muon optimizer does not read the key {key!r} of param group {name}{hint}. A "
                         f"group may set use_muon, name, {', '.join(own)}.")


def _suggestion(key: str) -> str:
    near = difflib.get_close_matches(key, OPTIONS, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_muon_group(label: str, group: Mapping[str, Any]) -> None:
    """Raises ValueError, naming `label` and the key, where an option of a Muon param group is out of range.

    `group` holds every key of MUON_GROUP_DEFAULTS; numbers may be 0-dim tensors.
    """
    for key, (valid, expected) in _MUON_RANGES.items():
        if not valid(group[key]):
            raise ValueError(f"Muon: {key} of {label} must be {expected}, got {group[key]!r}")
    if group["ns_method"] == "gram" and str(group["ns_dtype"]).endswith("bfloat16"):
        raise ValueError(f"Muon: ns_dtype of {label} is bfloat16, in which ns_method 'gram' loses the small singular "
                         "values; use float16, float32 or null with it, or ns_method 'standard'")
    resolve(group["ns_coefficients"], group["ns_steps"])


def check_adam_group(label: str, group: Mapping[str, Any]) -> None:
    """The same for a group of the Adam half, which holds every key of ADAM_GROUP_DEFAULTS."""
    for key, (valid, expected) in _ADAM_RANGES.items():
        if not valid(group[key]):
            raise ValueError(f"Muon: {key} of {label} must be {expected}, got {group[key]!r}")


def check_workspace_mb(value: Any) -> float:
    """`value` as a number of MiB. Raises ValueError where it is none above 0."""
    if not _number(0)(value) or float(value) == 0:
        raise ValueError(f"Muon: workspace_mb must be a number above 0, got {value!r}")
    return float(value)


def check_tensor_parallel(value: Any) -> str:
    """`value`, one of TENSOR_PARALLEL. Raises ValueError where it is not."""
    if value not in TENSOR_PARALLEL:
        raise ValueError(f"Muon: tensor_parallel must be one of {', '.join(TENSOR_PARALLEL)}, got {value!r}")
    return value


def check_flag(key: str, value: Any) -> bool:
    """`value`, true or false. Raises ValueError, naming `key`, where it is neither."""
    if not isinstance(value, bool):
        raise ValueError(f"Muon: {key} must be true or false, got {value!r}")
    return value


def check_stats_every(value: Any) -> int:
    """`value`, a number of steps or 0 for never. Raises ValueError where it is not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"Muon: muon_stats_every must be a number of steps, or 0 for no statistics, got {value!r}")
    return value


def _number(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    """Whether a value is a number in [low, high)."""

    def valid(value: Any) -> bool:
        try:
            return not isinstance(value, (bool, str)) and low <= float(value) < high
        except (TypeError, ValueError, RuntimeError):
            return False

    return valid


_MUON_RANGES: Dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_number(0), "a number of at least 0"),
    "momentum": (_number(0, 1), "a number from 0 up to, but not including, 1"),
    "weight_decay": (_number(0), "a number of at least 0"),
    "nesterov": (lambda value: isinstance(value, bool), "true or false"),
    "ns_method": (lambda value: value in METHODS, f"one of {', '.join(METHODS)}"),
    "ns_dtype": (lambda value: value is None or str(value).replace("torch.", "") in NS_DTYPES,
                 f"one of {', '.join(NS_DTYPES)}, or null"),
    "adjust_lr_fn": (lambda value: value in ADJUST_LR_FNS, f"one of {', '.join(ADJUST_LR_FNS)}"),
}


def _betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_number(0, 1), value))


_ADAM_RANGES: Dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": _MUON_RANGES["lr"],
    "weight_decay": _MUON_RANGES["weight_decay"],
    "eps": _MUON_RANGES["lr"],
    "betas": (_betas, "two numbers from 0 up to, but not including, 1"),
}

# Options of the whole optimizer; those of groups are checked when the groups are complete, patterns with the model.
_FLAGS = ("muon_report", "muon_selftest", "per_head_muon", "adam_w_mode", "torch_adam", "fp32_optimizer_states")
_CHECKS: Dict[str, Callable[[Any], Any]] = {
    **{
        key: partial(check_flag, key)
        for key in _FLAGS
    },
    "foreach": lambda value: value is None or check_flag("foreach", value),
    "workspace_mb": check_workspace_mb,
    "tensor_parallel": check_tensor_parallel,
    "muon_stats_every": check_stats_every,
    FUSED_KEY: check_fused,
}
