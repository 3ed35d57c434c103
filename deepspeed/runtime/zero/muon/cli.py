# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`ds_muon plan`: what Muon costs for a model, a ds_config and numbers of ranks that need not exist."""

import argparse
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Mapping, Optional, Sequence

import torch
from tqdm import tqdm

import deepspeed
from deepspeed.runtime.config import MUON_OPTIMIZER
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.runtime.zero.muon.estimate import (Engine, Estimate, Iteration, Machine, Parameter, estimate, limits,
                                                  step_groups)
from deepspeed.runtime.zero.muon.matrices import matrices_of, matrices_of_parameter
from deepspeed.runtime.zero.muon.options import (DEFAULT_WORKSPACE_MB, MUON_GROUP_DEFAULTS, check_muon_group,
                                                 check_optimizer_params, check_workspace_mb)
from deepspeed.runtime.zero.muon.plan import round_numel_within
from deepspeed.runtime.zero.muon.plan_output import as_json, as_text, plot

FP32_NAMES = ("fp32", "float32", "float")
SHAPE_KEYS = ("name", "shape", "use_muon", "expert_stack", "parts", "transposed")

# ds_config sections that cut matrices or groups in a way that is not planned here: (keys, value that turns it off).
UNPLANNED = ((("tensor_parallel", "autotp_size"), (0, 1)), (("zero_optimization", "mics_shard_size"), (-1, )),
             (("sequence_parallel_size", ), (1, )), (("expert_parallel", "enabled"), (False, )))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """The command. Returns 0; a mistake of the user ends with a message on stderr and exit status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        engine, iteration = read_ds_config(options.ds_config)
        parameters = read_shapes(options.shapes) if options.shapes else read_model(options.model, options.ds_config)
        if not any(parameter.matrices for parameter in parameters):
            raise ValueError("no parameter goes to Muon, so there is nothing to plan")
        # Without zero.Init the optimizer sorts its group, largest size first; under it sizes are not known there.
        if not options.zero_init:
            parameters = sorted(parameters, key=lambda parameter: parameter.shape, reverse=True)
        elif engine.stage != 3:
            raise ValueError(f"--zero-init means stage 3, but the ds_config has stage {engine.stage}")
        machine = Machine(options.nodes_of, options.tflops * 1e12, options.intra_GBps * 1e9, options.inter_GBps * 1e9)
        estimates = _estimates(parameters, engine, iteration, machine, options.world_size)
        found = limits(parameters, iteration, max(options.world_size))
        if options.plot:
            plot(estimates, options.plot)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(as_json(parameters, engine, iteration, machine, estimates, found), indent=2))
    else:
        print(as_text(parameters, engine, machine, estimates, found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_muon", description="Tools for DeepSpeed's Muon optimizer.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what a Muon step costs on numbers of ranks that need not exist")
    source = plan.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="config.json of a transformers model, or the folder that it is in")
    source.add_argument("--shapes",
                        type=Path,
                        help="JSON list of objects with name, shape, and optionally use_muon (default: two or more "
                        "dimensions), expert_stack, parts, transposed")
    plan.add_argument("--ds-config", type=Path, required=True, help="the ds_config.json of the run")
    plan.add_argument("--world-size",
                      type=_world_sizes,
                      required=True,
                      help="numbers of data-parallel ranks, with commas between")
    plan.add_argument("--zero-init",
                      action="store_true",
                      help="the model is built under zero.Init (ZeRO-3), so parameters keep the model's order")
    plan.add_argument("--nodes-of", type=_positive_int, default=8, help="ranks of a node (default: 8)")
    plan.add_argument("--tflops", type=_positive, default=400.0, help="TFLOP/s a rank reaches (default: 400)")
    plan.add_argument("--intra-GBps", type=_positive, default=400.0, help="GB/s of a rank in its node (default: 400)")
    plan.add_argument("--inter-GBps", type=_positive, default=50.0, help="GB/s of a rank between nodes (default: 50)")
    plan.add_argument("--plot", type=Path, help="write a picture of bytes and seconds over ranks")
    plan.add_argument("--json", action="store_true", help="print JSON, in bytes, FLOPs and seconds")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _world_sizes(text: str) -> list[int]:
    try:
        return sorted({_positive_int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between, got {text!r}") from None


def _read_json(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}, found a "
                         f"{type(found).__name__}")
    return found


def _section(config: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = config.get(key, {})
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {key} must be an object, got {found!r}")
    return found


def _optimizer_params(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The params of the Muon optimizer, without those that are left to "auto"."""
    optimizer = _section(config, "optimizer", path)
    if str(optimizer.get("type")).lower() != MUON_OPTIMIZER:
        raise ValueError(f"{path}: \"optimizer\": {{\"type\": ...}} must be Muon, got {optimizer.get('type')!r}")
    params = _section(optimizer, "params", path)
    check_optimizer_params(params)
    return {key: value for key, value in params.items() if value != "auto"}


def read_ds_config(path: Path) -> tuple[Engine, Iteration]:
    """What a ds_config says of the cut and of the iteration. Raises ValueError where it is wrong or unplanned."""
    config = _read_json(path, dict)
    params = _optimizer_params(config, path)
    group = {**MUON_GROUP_DEFAULTS, **{key: params[key] for key in MUON_GROUP_DEFAULTS if key in params}}
    check_muon_group(str(path), group)
    for keys, off in UNPLANNED:
        value: Any = config
        for key in keys:
            value = value.get(key, off[0]) if isinstance(value, dict) else off[0]
        if value not in off:
            raise ValueError(
                f"{path}: {'.'.join(keys)} is {value!r}, which is not planned here; leave it out and give the "
                "number of ranks that a parameter is cut over as --world-size")
    engine = _engine(config, path)
    # Unless told otherwise, accelerators iterate in fp16 (gram) or bf16 (standard): two bytes both.
    itemsize = 4 if str(group["ns_dtype"]).endswith("float32") else 2
    workspace_mb = check_workspace_mb(params.get("workspace_mb", DEFAULT_WORKSPACE_MB))
    return engine, Iteration(method=group["ns_method"],
                             steps=group["ns_steps"],
                             itemsize=itemsize,
                             round_numel=round_numel_within(workspace_mb, itemsize, engine.bucket_numel))


def _engine(config: Mapping[str, Any], path: Path) -> Engine:
    zero = get_zero_config({"zero_optimization": _section(config, "zero_optimization", path)})
    stage = int(zero.stage)
    bf16 = bool(_section(config, "bf16", path).get("enabled"))
    half = bf16 or bool(_section(config, "fp16", path).get("enabled"))
    accumulation_dtype = str(_section(config, "data_types", path).get("grad_accum_dtype"))
    offload = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    flat_bf16 = stage == 1 and bf16 and accumulation_dtype in FP32_NAMES and not offload
    steps = config.get("gradient_accumulation_steps", 1)
    if steps == "auto":
        steps = 1
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{path}: gradient_accumulation_steps must be an integer of at least 1, got {steps!r}")
    element_bytes = 2 if half else 4
    aligned = zero.parameter_alignment and stage in (1, 2) and not flat_bf16
    return Engine(name="BF16_Optimizer" if flat_bf16 else f"ZeRO-{stage}" if stage else "stage 0",
                  stage=stage,
                  element_bytes=element_bytes,
                  accumulation_steps=steps,
                  offload=offload,
                  flat_bf16=flat_bf16,
                  sub_group_numel=zero.sub_group_size,
                  bucket_numel=zero.reduce_bucket_size,
                  round_robin=bool(zero.round_robin_gradients) and stage in (1, 2) and not flat_bf16,
                  parameter_alignment_numel=16 // element_bytes if aligned else 1)


def read_shapes(path: Path) -> list[Parameter]:
    """Parameters from a list of shapes. Raises ValueError where an entry is wrong."""
    parameters = []
    for index, entry in enumerate(_read_json(path, list)):
        if not isinstance(entry, dict) or not {"name", "shape"} <= entry.keys() <= set(SHAPE_KEYS):
            raise ValueError(f"{path}: entry {index} must be an object with name, shape and, where they are needed, "
                             f"{', '.join(SHAPE_KEYS[2:])}; got {entry!r}")
        name, shape = entry["name"], entry["shape"]
        if not isinstance(name, str) or not isinstance(shape, list) or not all(
                isinstance(size, int) and size > 0 for size in shape):
            raise ValueError(f"{path}: entry {index} needs a string as name and a list of positive integers as shape, "
                             f"got {entry!r}")
        use_muon = entry.get("use_muon", len(shape) >= 2)
        matrices = matrices_of(name,
                               shape,
                               expert_stack=entry.get("expert_stack", False),
                               parts=entry.get("parts"),
                               transposed=entry.get("transposed", False)) if use_muon else ()
        parameters.append(Parameter(name, tuple(shape), matrices))
    return parameters


def read_model(path: Path, ds_config: Path) -> list[Parameter]:
    """Parameters of a transformers model, built on the meta device and marked as deepspeed.initialize marks it.

    Raises ValueError where the model cannot be built, OSError where there is no such file. Nothing is downloaded.
    """
    path = path / "config.json" if path.is_dir() else path
    model = _build(path, _read_json(path, dict))
    params = _optimizer_params(_read_json(ds_config, dict), ds_config)
    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name=MUON_OPTIMIZER, optimizer_params=params), model)
    return parameters_of(model)


def parameters_of(model: torch.nn.Module) -> list[Parameter]:
    """The trainable parameters of a model that is marked."""
    return [
        Parameter(name, tuple(param.shape),
                  matrices_of_parameter(name, param, tuple(param.shape)) if param.use_muon else ())
        for name, param in model.named_parameters() if param.requires_grad and param.numel()
    ]


def _build(path: Path, description: Mapping[str, Any]) -> torch.nn.Module:
    try:
        import transformers
    except ImportError:
        raise ValueError("--model needs transformers, which is not installed; install it, or use --shapes") from None
    try:
        config = transformers.AutoConfig.for_model(**description)
        architectures = description.get("architectures") or []
        model_class = getattr(transformers, architectures[0], None) if architectures else None
        with torch.device("meta"):
            if model_class is not None:
                return model_class(config)
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ValueError(f"{path} describes no model that transformers {transformers.__version__} can build "
                         f"({type(error).__name__}: {error}); correct it, or use --shapes") from error


def _estimates(parameters: Sequence[Parameter], engine: Engine, iteration: Iteration, machine: Machine,
               world_sizes: Sequence[int]) -> list[Estimate]:
    count = sum(len(step_groups(parameters, engine, world_size)) for world_size in world_sizes)
    # On stderr, so that the output can be piped; not at all where the plan is quick.
    with tqdm(total=count, desc="planning", unit="plan", file=sys.stderr, delay=1, leave=False) as bar:
        return [
            estimate(parameters, engine, iteration, machine, world_size, progress=bar.update)
            for world_size in world_sizes
        ]
