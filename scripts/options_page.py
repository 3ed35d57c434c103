# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Writes docs/options.md from the table of options: `make` an environment, then `python scripts/options_page.py`.

What a key means, its default and where it may stand are taken from the package. Only what the package has as code, the
values that a key takes, is written down here.
"""

import json
from pathlib import Path
from typing import Any, Dict, List

from deepspeed.runtime.zero.muon.coefficients import COEFFICIENT_SETS, METHODS
from deepspeed.runtime.zero.muon.options import (ADAM_GROUP_DEFAULTS, ADJUST_LR_FNS, DEFAULT_WORKSPACE_MB,
                                                 GROUP_OPTIONS, MUON_GROUP_DEFAULTS, NS_DTYPES, OPTIONS,
                                                 TENSOR_PARALLEL)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"

AT_LEAST_0, ABOVE_0, FLAG = "number >= 0", "number > 0", "true, false"
PATTERNS = "list of regular expressions, each of which is found in a name"


def _one_of(values: Any) -> str:
    return ", ".join(f"`{value}`" for value in values)


VALUES: Dict[str, str] = {
    "lr": AT_LEAST_0,
    "muon_lr": AT_LEAST_0,
    "adam_lr": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "momentum": "number >= 0 and < 1",
    "ns_method": _one_of(METHODS),
    "nesterov": FLAG,
    "ns_steps": "integer >= 1",
    "ns_coefficients": f"{_one_of(COEFFICIENT_SETS)}, or a list of [a, b, c]",
    "ns_dtype": f"{_one_of(NS_DTYPES)}, null; `gram` not with `bfloat16`",
    "adjust_lr_fn": _one_of(ADJUST_LR_FNS),
    "workspace_mb": ABOVE_0,
    "adam_params": PATTERNS,
    "muon_params": PATTERNS,
    "fused_params":
    "`known`, or an object: regular expression to a number of equal parts or a list of numbers of outputs",
    "tensor_parallel": _one_of(TENSOR_PARALLEL),
    "muon_report": FLAG,
    "muon_selftest": FLAG,
    "muon_stats_every": "integer >= 0",
    "per_head_muon": FLAG,
    "betas": "two numbers >= 0 and < 1",
    "eps": AT_LEAST_0,
    "adam_w_mode": FLAG,
    "torch_adam": FLAG,
    "foreach": f"{FLAG}, null",
    "fp32_optimizer_states": FLAG,
}

# Defaults that no table of the package has.
DEFAULTS: Dict[str, Any] = {
    "muon_lr": "`lr`",
    "adam_lr": "`lr`",
    "ns_dtype": "what the accelerator has for the method: `gram` float16, `standard` bfloat16, else float32",
    "workspace_mb": DEFAULT_WORKSPACE_MB,
    "adam_params": [],
    "muon_params": [],
    "fused_params": {},
    "tensor_parallel": TENSOR_PARALLEL[0],
    "muon_report": True,
    "muon_selftest": True,
    "muon_stats_every": 0,
    "per_head_muon": False,
    "adam_w_mode": True,
    "torch_adam": False,
    "foreach": None,
    "fp32_optimizer_states": True,
}

HEAD = """\
# Options

Made by `scripts/options_page.py` from the package's own table; a test compares them. All keys stand in ds_config.json
under `"optimizer": {"type": "Muon", "params": {...}}`. Those with "yes" in the last column may also stand in a param
group that is given to `deepspeed.initialize` as `model_parameters`, where they win. Every key and value is checked by
`deepspeed.initialize` before memory is allocated; an unknown key is an error that lists the valid ones.

| key | meaning | values | default | in a group |
|---|---|---|---|---|
"""

TAIL = """
## Param groups

Besides these a group has `params`, and may have `name`, which messages use, and `use_muon`. `"use_muon": false` gives
all of its parameters to Adam, `true` to Muon; then only the keys of that half may stand in it. Without it the group is
divided. What counts for a parameter, in this order: `param.use_muon` set before `deepspeed.initialize`, `use_muon` of
its group, the patterns, the rules by module.

## The self-test

The first step with a learning rate above 0 is judged at the beginning of the next one, when its values have long been
computed; after that it costs nothing. Each rank looks at what it owns and holds:

- how many matrices it has orthogonalized, against its plan;
- that each had norm 1 before, and after it an RMS and a spectrum within what the coefficients allow, whatever the
  gradient's rank is. A gradient of all zeros passes; one with a NaN is not judged;
- that the rows it holds fit the update that came back for them;
- that sampled weights have moved by lr * scale * update, and, at the next step, that nothing has scaled or undone that
  move. Weights that were set to something else in between, as by a checkpoint, are not judged.

What fails is a RuntimeError that names the group and the matrix, what was found, and what was expected.

## Statistics

With `"muon_stats_every": n` each n-th step takes figures of the first and the last matrix of each family, that is of
parameters whose names differ in layer numbers only. They stay on the device until they are asked for, by
`engine.basic_optimizer.muon_stats()`, which all ranks have to call after the same step and which is one sum over the
ranks, or by DeepSpeed's monitor, if one is on (TensorBoard, W&B, Comet, CSV), as `Train/Muon/FAMILY/FIGURE` with `N`
for layer numbers. Steps count from the start of the process. Under pipeline parallelism the monitor gets the families
of the first stage.

| figure | what it is, the mean over the matrices looked at |
|---|---|
| `orthogonality_error` | norm(O O^T - I) / sqrt(short side): RMS of s^2 - 1 over the singular values s of O |
| `update_rms` | RMS of an element of scale * O: the update without the learning rate |
| `momentum_norm` | Frobenius norm of the momentum after the step |
| `update_to_weight` | norm(lr * scale * O) / norm(W), with W before the step, without weight decay |
"""


def page() -> str:
    """The text of docs/options.md. Raises ValueError where an option has no values here, or one here is no option."""
    if set(VALUES) != set(OPTIONS):
        raise ValueError(f"scripts/options_page.py: VALUES and the package's OPTIONS differ in "
                         f"{sorted(set(VALUES) ^ set(OPTIONS))}")
    return HEAD + "\n".join(map(_row, OPTIONS)) + "\n" + TAIL


def _row(key: str) -> str:
    cells: List[str] = [f"`{key}`", OPTIONS[key], VALUES[key], _default(key), "yes" if key in GROUP_OPTIONS else ""]
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def _default(key: str) -> str:
    if key in DEFAULTS:
        return DEFAULTS[key] if isinstance(DEFAULTS[key], str) and " " in DEFAULTS[key] or key.endswith("_lr") \
            else _written(DEFAULTS[key])
    muon, adam = MUON_GROUP_DEFAULTS.get(key), ADAM_GROUP_DEFAULTS.get(key)
    if key in MUON_GROUP_DEFAULTS and key in ADAM_GROUP_DEFAULTS and muon != adam:
        return f"{_written(muon)} for Muon, {_written(adam)} for Adam"
    return _written(muon if key in MUON_GROUP_DEFAULTS else adam)


def _written(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    PAGE.write_text(page())
