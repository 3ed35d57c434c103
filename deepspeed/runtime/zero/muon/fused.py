# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What is fused in a projection: query, key and value, or gate and up, in one weight.

Orthogonalized as one matrix, the parts share one norm and one set of singular directions. `fused_params` in the
ds_config takes them apart; expert stacks are taken apart always, since their layout is written on them.
"""

import re
from typing import Any, Mapping, Optional, Sequence, Union

from torch import nn

FUSED_KEY = "fused_params"
KNOWN = "known"

Parts = tuple[int, ...]
# A number of equal parts, or numbers of outputs.
Spec = Union[int, Sequence[int]]

# Attention modules whose query_key_value holds query, key and value of one head after another.
_HEAD_BY_HEAD = ("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention")


def check_fused(value: Any) -> Mapping[str, Spec]:
    """The patterns of `fused_params`, empty where none are given or the value is "known".

    Raises ValueError for anything but null, "known", or an object whose values are integers of at least 1 (that many
    equal parts; 1 leaves the projection whole) or lists of them (numbers of outputs).
    """
    if value is None or value == KNOWN:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"Muon: {FUSED_KEY} must be \"known\" or an object of regular expressions and parts, such as "
                         f"{{\"c_attn\": 3}}, got {value!r}")
    for pattern, spec in value.items():
        numbers = spec if isinstance(spec, (list, tuple)) else [spec]
        if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
            raise ValueError(f"Muon: {FUSED_KEY} says {spec!r} for {pattern!r}; it takes a number of equal parts, or "
                             "a list of numbers of outputs")
    return value


def parts_by_spec(name: str, outputs: int, spec: Spec) -> Parts:
    """Numbers of outputs of each part. Raises ValueError, naming the parameter, where they do not fit `outputs`."""
    if isinstance(spec, int):
        if outputs % spec:
            raise ValueError(f"Muon: {FUSED_KEY} asks for {spec} equal parts of {name}, which has {outputs} outputs")
        return (outputs // spec, ) * spec
    if outputs % sum(spec):
        raise ValueError(f"Muon: {FUSED_KEY} asks for parts of {list(spec)} outputs in {name}, which has {outputs}")
    return tuple(spec)


def known_parts(model: nn.Module, path: str, attribute: str, outputs: int, inputs: int) -> Optional[Parts]:
    """The parts of a fused projection of transformers' or torch's own modules, None where `path` is none of these.

    Read off the modules' forward methods: transformers 5, torch 2.
    """
    module = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0])
    leaf, kind = path.rpartition(".")[2], type(parent).__name__
    if isinstance(module, nn.MultiheadAttention):
        return (outputs // 3, ) * 3 if attribute == "in_proj_weight" else None
    if leaf == "c_attn" and type(module).__name__ == "Conv1D" and outputs in (2 * inputs, 3 * inputs):
        return (inputs, ) * (outputs // inputs)
    if leaf == "query_key_value" and kind in _HEAD_BY_HEAD:
        head_dim = getattr(parent, "head_dim", None) or parent.head_size
        return (head_dim, ) * 3
    if leaf == "qkv_proj" and kind == "Phi3Attention":
        queries = parent.config.num_attention_heads * parent.head_dim
        return (queries, (outputs - queries) // 2, (outputs - queries) // 2)
    if leaf == "gate_up_proj" and isinstance(module, nn.Linear) and outputs % 2 == 0:
        return (outputs // 2, ) * 2
    return None


def parts_of_experts(attribute: str, shape: Sequence[int], module: nn.Module) -> tuple[bool, Optional[Parts]]:
    """Of an expert stack [experts, m, n]: whether its outputs are the columns, and the parts of a fused gate and up.

    transformers writes both on its modules (`is_transposed`, `is_concatenated`). Elsewhere the down projection, which
    takes what the gate lets through, tells the side on which gate and up are; without one, the rows are outputs.
    """
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        transposed = _looks_transposed(module)
    outputs = shape[2] if transposed else shape[1]
    if len(shape) != 3 or "gate_up" not in attribute or outputs % 2:
        return bool(transposed), None
    # Gate and up as halves, or each output of the gate beside one of up.
    return bool(transposed), (outputs // 2, ) * 2 if getattr(module, "is_concatenated", True) else (1, 1)


def _looks_transposed(module: nn.Module) -> bool:
    shapes = {}
    for name, param in module.named_parameters(recurse=False):
        for kind in ("gate_up", "down"):
            if kind in name and "bias" not in name:
                shapes[kind] = tuple(getattr(param, "ds_shape", param.shape))
    if set(map(len, shapes.values())) != {3} or len(shapes) != 2:
        return False
    _, m, n = shapes["gate_up"]
    return shapes["down"][1:] == (n // 2, m)


def matched(patterns: Mapping[str, Spec], names: Sequence[str]) -> dict[str, Spec]:
    """The spec of each name that a pattern is found in; the first pattern counts.

    Raises ValueError for a pattern that is no regular expression or matches nothing.
    """
    found: dict[str, Spec] = {}
    for pattern, spec in patterns.items():
        for name in names_matched(FUSED_KEY, pattern, names, "that goes to Muon"):
            found.setdefault(name, spec)
    return found


def names_matched(key: str, pattern: str, names: Sequence[str], which: str) -> list[str]:
    """The names that a regular expression of the option `key` is found in. `which` says of what kind they are.

    Raises ValueError for a pattern that is no regular expression or matches nothing.
    """
    try:
        found = [name for name in names if re.search(pattern, name)]
    except (re.error, TypeError) as error:
        raise ValueError(f"Muon: {key} holds {pattern!r}, which is no regular expression: {error}") from None
    if not found:
        raise ValueError(f"Muon: {key} holds {pattern!r}, which matches no parameter {which}. Names are, for example, "
                         f"{', '.join(sorted(names)[:3])}")
    return found


def take_apart(model: nn.Module, value: Any, sizes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[Parts, str]]:
    """(parts, what the start-up report says of them) of the projections that are, or could be, taken apart.

    `value` is that of `fused_params`, `sizes` (outputs, inputs) of each matrix parameter that goes to Muon. Parts of
    length 1 say that it stays whole. Raises ValueError as `check_fused`, `parts_by_spec` and `matched` do.
    """
    specs = matched(check_fused(value), list(sizes))
    found = {}
    for name, (outputs, inputs) in sizes.items():
        if name in specs:
            parts = parts_by_spec(name, outputs, specs[name])
            found[name] = (parts, f"{len(parts)} parts by {FUSED_KEY}" if len(parts) > 1 else f"whole by {FUSED_KEY}")
            continue
        path, _, attribute = name.rpartition(".")
        known = known_parts(model, path, attribute, outputs, inputs)
        if known is not None:
            found[name] = (known, f"{len(known)} parts") if value == KNOWN else ((
                outputs, ), f"fused of {len(known)} and kept whole, see {FUSED_KEY}")
    return found
