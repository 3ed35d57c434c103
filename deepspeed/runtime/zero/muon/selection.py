# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which parameters are matrices for Muon, decided by the module that owns them rather than by name alone.

Muon is for the weights of products in hidden layers. A table that is looked up, an output head, a router, a norm or a
state matrix is no such weight, whatever its shape; orthogonalizing it trains, but badly, and nothing shows it.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Iterable, Mapping, Optional, Sequence

import torch
from torch import nn

from deepspeed.runtime.zero.muon.fused import FUSED_KEY, names_matched, parts_of_experts, take_apart

BY_PARAMETER = "param.use_muon, set by the user"
BY_GROUP_KEY = "use_muon of its param group"
BY_MUON_PATTERN = "muon_params"
BY_ADAM_PATTERN = "adam_params"

# What `tag_parameters` and set_optimizer_flags write on parameters. Who replaces a parameter has to copy them.
MARKS = ("use_muon", "muon_rule", "muon_parts", "muon_transposed", "is_expert_group", "muon_num_heads",
         "muon_head_dim")

# Modules that compute a product with `weight` and do not derive from nn.Linear, by class name: transformers' Conv1D
# (stored [in, out]) and the layers that DeepSpeed puts in the place of Linear.
_TRANSPOSED_PRODUCTS = ("Conv1D", )
_PRODUCT_CLASSES = (*_TRANSPOSED_PRODUCTS, "LinearLayer", "LinearAllreduce", "LmHeadLinearAllreduce",
                    "OptimizedLinear")
_HEADS = ("lm_head", "score", "classifier", "head", "heads", "output", "qa_outputs", "embed_out", "decoder")
# `coefficient` mixes the experts with the residual branch in DeepSpeed's MoE layers.
_ROUTERS = ("router", "gate", "wg", "coefficient")
_STOCK_NAMES = ("embed", "lm_head")

# The attribute in which a group's use_muon travels from `mark_groups` to `tag_parameters`.
_GROUP_MARK = "muon_of_group"


@dataclass(frozen=True)
class Choice:
    """What becomes of a parameter, and by which rule. `parts` are numbers of outputs, see matrices.matrices_of."""
    use_muon: bool
    rule: str
    expert_stack: bool = False
    transposed: bool = False
    parts: Optional[tuple[int, ...]] = None


def tag_parameters(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Choice]:
    """Decide for every parameter of `model` and mark it: `use_muon`, and for the layout `is_expert_group`,
    `muon_parts`, `muon_transposed`. `options` are the params of the Muon optimizer.

    What counts, in this order: `param.use_muon` set by the user, `use_muon` of the parameter's group (`mark_groups`),
    the patterns `adam_params` and `muon_params` (regular expressions, searched in the name), the rules of this module.
    Raises ValueError for a group's `use_muon` that is no bool, for a pattern that is no regular expression or matches
    nothing, and for a parameter that patterns of both kinds match.
    """
    choices = choose(model, options)
    for name, param in model.named_parameters():
        choice = choices[name]
        param.use_muon = choice.use_muon
        param.muon_parts = choice.parts
        # Tells a later call that the marks are not the user's.
        param.muon_rule = choice.rule
        if choice.expert_stack:
            param.is_expert_group = True
        param.muon_transposed = choice.transposed
        # The groups of this call, not of a later one with the same model.
        if hasattr(param, _GROUP_MARK):
            delattr(param, _GROUP_MARK)
    return choices


def mark_groups(model_parameters: Any) -> Any:
    """Let `use_muon` of the param groups in `model_parameters` reach `tag_parameters`, which sees the model alone.

    `model_parameters` is what deepspeed.initialize got. Where it is a list or tuple, the parameters of its dicts are
    marked, and an equal list is returned in which every group holds a list of parameters, for it is read again. Any
    other is returned as it came: an iterator over a model is to be read when layers have been replaced.
    """
    if not isinstance(model_parameters, (list, tuple)) or not any(isinstance(item, dict) for item in model_parameters):
        return model_parameters
    return [_marked(item) if isinstance(item, dict) else item for item in model_parameters]


def _marked(group: dict[str, Any]) -> dict[str, Any]:
    params = group.get("params", ())
    if not isinstance(params, list):
        group = {**group, "params": [params] if isinstance(params, torch.Tensor) else list(params)}
    if "use_muon" in group:
        for param in group["params"]:
            setattr(param, _GROUP_MARK, group["use_muon"])
    return group


def check_groups(model_parameters: Iterable[Any]) -> None:
    """Raises ValueError where `use_muon` of a param group has not reached its parameters.

    `model_parameters` as a list, after `tag_parameters`. An iterator over param groups cannot be read beforehand.
    """
    groups = [item for item in model_parameters if isinstance(item, dict)]
    for index, group in enumerate(groups):
        for param in group["params"] if "use_muon" in group else ():
            if getattr(param, "muon_rule", BY_PARAMETER) not in (BY_PARAMETER, BY_GROUP_KEY):
                raise ValueError(f"Muon: use_muon of param group {group.get('name', index)!r} came too late for its "
                                 "parameters: give deepspeed.initialize a list or tuple of groups, not an iterator")


def choose(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Choice]:
    """The choice for each parameter name, without marking anything. Raises as `tag_parameters` does."""
    names = [name for name, _ in model.named_parameters()]
    to_adam = _matched(BY_ADAM_PATTERN, options.get("adam_params"), names)
    to_muon = _matched(BY_MUON_PATTERN, options.get("muon_params"), names)
    if to_adam & to_muon:
        raise ValueError(f"Muon: adam_params and muon_params both match {sorted(to_adam & to_muon)}")
    owners = _owners(model)
    heads = _head_parameters(model)
    choices = {}
    for name, param in model.named_parameters():
        choice = _by_rules(name, param, owners[id(param)], id(param) in heads)
        if name in to_adam:
            choice = Choice(False, BY_ADAM_PATTERN)
        elif name in to_muon:
            choice = _with_muon(choice, name, param, BY_MUON_PATTERN)
        of_group = getattr(param, _GROUP_MARK, None)
        if of_group is not None:
            if not isinstance(of_group, bool):
                raise ValueError(
                    f"Muon: use_muon of the param group of {name} must be True or False, got {of_group!r}")
            choice = _with_muon(choice, name, param, BY_GROUP_KEY) if of_group else Choice(False, BY_GROUP_KEY)
        own = getattr(param, "use_muon", None)
        if own is not None and getattr(param, "muon_rule", BY_PARAMETER) == BY_PARAMETER:
            choice = _with_muon(choice, name, param, BY_PARAMETER) if own else Choice(False, BY_PARAMETER)
        choices[name] = choice
    _take_apart(model, choices, options)
    return choices


def _take_apart(model: nn.Module, choices: dict[str, Choice], options: Mapping[str, Any]) -> None:
    """Into `choices` goes of which parts fused projections are made: the user's mark first, then `fused_params`."""
    sizes = {}
    for name, param in model.named_parameters():
        choice = choices[name]
        own = None if hasattr(param, "muon_rule") else getattr(param, "muon_parts", None)
        if choice.use_muon and own:
            choices[name] = replace(choice, parts=tuple(own), rule=f"{choice.rule}, {len(own)} parts by muon_parts")
        elif choice.use_muon:
            sizes[name] = _sizes(layer_shape(param), choice)
    for name, (parts, said) in take_apart(model, options.get(FUSED_KEY), sizes).items():
        choices[name] = replace(choices[name], parts=parts, rule=f"{choices[name].rule}, {said}")


def _sizes(shape: tuple[int, ...], choice: Choice) -> tuple[int, int]:
    """(outputs, inputs) of the matrix, or of each expert's."""
    rows, *rest = shape[1:] if choice.expert_stack else shape
    return (math.prod(rest), rows) if choice.transposed else (rows, math.prod(rest))


def layer_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The shape as a layer has it: under zero.Init the data is a flat placeholder and `ds_shape` is the shape."""
    return tuple(getattr(param, "ds_shape", param.shape))


def _with_muon(choice: Choice, name: str, param: torch.Tensor, rule: str) -> Choice:
    if len(layer_shape(param)) < 2:
        raise ValueError(
            f"Muon: {rule} asks for Muon on {name}, which has shape {layer_shape(param)}; it takes two or "
            "more dimensions")
    return Choice(True, rule, choice.expert_stack, choice.transposed, choice.parts)


def _matched(key: str, patterns: Optional[Sequence[str]], names: Sequence[str]) -> set[str]:
    if isinstance(patterns, str):
        raise ValueError(f"Muon: {key} must be a list of regular expressions, got the string {patterns!r}")
    found: set[str] = set()
    for pattern in patterns or ():
        found.update(names_matched(key, pattern, names, "of the model"))
    return found


def _owners(model: nn.Module) -> dict[int, list[tuple[str, str, nn.Module]]]:
    """(module path, attribute, module) of every module that holds a parameter, several where it is tied."""
    owners: dict[int, list[tuple[str, str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False):
            owners.setdefault(id(param), []).append((path, attribute, module))
    return owners


def _head_parameters(model: nn.Module) -> set[int]:
    """ids of the parameters of the output embeddings that transformers' models name."""
    found: set[int] = set()
    for module in model.modules():
        get_output_embeddings = getattr(module, "get_output_embeddings", None)
        head = get_output_embeddings() if callable(get_output_embeddings) else None
        if isinstance(head, nn.Module):
            found.update(id(param) for param in head.parameters())
    return found


def _by_rules(name: str, param: torch.Tensor, owners: Sequence[tuple[str, str, nn.Module]], is_head: bool) -> Choice:
    shape = layer_shape(param)
    if len(shape) < 2:
        return Choice(False, "fewer than two dimensions")
    if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for _, _, module in owners):
        return Choice(False, "embedding table")
    if is_head:
        return Choice(False, "output head")
    path, attribute, module = owners[0]
    leaf = path.rpartition(".")[2]
    if getattr(param, "is_expert_group", False) or _is_expert_stack(shape, module):
        transposed, parts = parts_of_experts(attribute, shape, module)
        rule = "expert stack, gate and up apart" if parts else "expert stack"
        return Choice(True, rule, expert_stack=len(shape) == 3, transposed=transposed, parts=parts)
    # Outside the numbered layers these names are the model's last layer.
    if leaf in _HEADS and not any(part.isdigit() for part in path.split(".")):
        return Choice(False, "output head")
    if leaf in _ROUTERS or re.search(r"router|gate$", type(module).__name__, re.IGNORECASE):
        return Choice(False, "router")
    if any(keyword in name.lower() for keyword in _STOCK_NAMES):
        return Choice(False, "name says embedding or head")
    return _by_module(attribute, shape, module)


def _by_module(attribute: str, shape: tuple[int, ...], module: nn.Module) -> Choice:
    if isinstance(module, nn.modules.conv._ConvNd) and attribute == "weight":
        if len(shape) <= 3:
            return Choice(False, "1-D convolution")
        if module.groups > 1:
            return Choice(False, "grouped or depthwise convolution")
        return Choice(True, "convolution kernel")
    kind = type(module).__name__
    is_product = isinstance(module, (nn.Linear, nn.MultiheadAttention)) or kind in _PRODUCT_CLASSES \
        or re.search(r"linear|dense", kind, re.IGNORECASE)
    if is_product and attribute.endswith("weight"):
        return Choice(True, "weight of a product", transposed=kind in _TRANSPOSED_PRODUCTS)
    return Choice(False, f"{kind}.{attribute} is not known as the weight of a product")


def _is_expert_stack(shape: tuple[int, ...], module: nn.Module) -> bool:
    return len(shape) == 3 and "expert" in type(module).__name__.lower()
