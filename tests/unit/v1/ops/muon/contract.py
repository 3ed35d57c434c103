# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What every engine is held to, and how it is measured: a model with chosen gradients, the reference, the comparisons.

The gradients are whole multiples of a power of two, small enough that accumulation, reduction, averaging and loss
scales are exact in fp32, bf16 and fp16. So an engine of any dtype can be compared with the reference to fp32 rounding,
and engines with one another bit for bit. Runs on stock DeepSpeed as well: nothing of the package is imported here.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple
from unittest import mock

import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from unit.v1.ops.muon.oracle import MuonOracle

Shape = Tuple[int, ...]
Tensors = Dict[str, torch.Tensor]

# No two of these have a size in common with the partitions of 2 or 3 ranks, so matrices straddle whatever the order. A
# row, a column, and for Adam an embedding and a vector.
SHAPES: Dict[str, Shape] = {
    "layers.0.weight": (17, 13),
    "layers.1.weight": (9, 17),
    "layers.2.weight": (31, 3),
    "layers.3.weight": (1, 40),
    "layers.4.weight": (40, 1),
    "norm.weight": (7, ),
    "embed_tokens.weight": (11, 5),
}
MUON_LR, ADAM_LR, WEIGHT_DECAY, BETA = 0.02, 1e-3, 0.01, 0.95
MOMENTUM = "momentum_buffer"

ENGINES: Dict[str, Dict[str, Any]] = {
    "stage0": {
        "zero_optimization": {
            "stage": 0
        }
    },
    "bf16_optimizer": {
        "zero_optimization": {
            "stage": 1
        },
        "data_types": {
            "grad_accum_dtype": "fp32"
        }
    },
    "zero1": {
        "zero_optimization": {
            "stage": 1
        }
    },
    "zero2": {
        "zero_optimization": {
            "stage": 2
        }
    },
    "zero3": {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0
        }
    },
    "zero1_offload": {
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {
                "device": "cpu"
            }
        }
    },
    "zero2_offload": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {
                "device": "cpu"
            }
        }
    },
    "zero3_offload": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "cpu"
            }
        }
    },
}
DTYPES: Dict[str, Dict[str, Any]] = {
    "fp32": {},
    "bf16": {
        "bf16": {
            "enabled": True
        }
    },
    "fp16": {
        "fp16": {
            "enabled": True,
            "loss_scale": 128
        }
    },
}
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def ds_config(engine: str, dtype: str = "fp32", gas: int = 1, clip: float = 0.0, **sections: Any) -> Dict[str, Any]:
    """The ds_config of an engine. `sections` are laid over it; `optimizer` stands for the params of the optimizer."""
    params = {
        "lr": MUON_LR,
        "adam_lr": ADAM_LR,
        "weight_decay": WEIGHT_DECAY,
        "momentum": BETA,
        "torch_adam": True,
        "ns_method": "standard",
        **sections.pop("optimizer", {"ns_dtype": "float32"})
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "Muon",
            "params": params
        },
    }
    for part in (ENGINES[engine], DTYPES[dtype], sections):
        for key, value in part.items():
            config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return config


class LinearProduct(torch.nn.Module):
    """<weight, factor>: the gradient of the weight is the factor. Muon takes the weights of what is called linear."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor.to(self.weight.dtype)).sum()


class ProductModel(torch.nn.Module):
    """Parameters of the given names, each of which has to end in `.weight`, with small multiples of 1/16 in them."""

    def __init__(self, shapes: Mapping[str, Shape], seed: int = 0) -> None:
        super().__init__()
        self.products: Dict[str, LinearProduct] = {}
        for index, (name, shape) in enumerate(shapes.items()):
            *path, leaf, _ = name.split(".")
            parent: torch.nn.Module = self
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, torch.nn.Module())
                parent = getattr(parent, part)
            product = self.products[name] = LinearProduct(shape)
            parent.add_module(leaf, product)
            whole = GatheredParameters([product.weight], modifier_rank=0, enabled=hasattr(product.weight, "ds_id"))
            with whole, torch.no_grad():
                product.weight.copy_(_integers(shape, 8, (seed, index)) / 16)

    def forward(self, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss, in the parameters' dtype. A parameter without a factor is unused."""
        return torch.stack([self.products[name](factor) for name, factor in factors.items()]).sum()


def _integers(shape: Shape, limit: int, seed: Sequence[int]) -> torch.Tensor:
    number = 0
    for part in seed:
        number = number * 1009 + part
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-limit, limit + 1, shape, generator=generator).float()


@dataclass(frozen=True)
class Gradients:
    """The gradients of every rank, micro-batch and step, known to all ranks; their mean is exact in 8 bits."""
    shapes: Mapping[str, Shape]
    world_size: int
    gas: int = 1
    unit: float = 2.0**-5
    unused: Callable[[str, int, int, int], bool] = field(default=lambda name, step, micro, rank: False)

    def local(self, step: int, micro: int, rank: int) -> Tensors:
        """What one micro-batch of one rank has as gradients."""
        factor = self.unit * self.world_size * self.gas
        return {
            name: _integers(shape, 4, (1 + step, micro, rank, index)) * factor
            for index, (name, shape) in enumerate(self.shapes.items()) if not self.unused(name, step, micro, rank)
        }

    def mean(self, step: int) -> Tensors:
        """Over ranks and micro-batches, fp32."""
        total = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        for micro in range(self.gas):
            for rank in range(self.world_size):
                for name, gradient in self.local(step, micro, rank).items():
                    total[name] += gradient / (self.world_size * self.gas)
        return total

    def norm(self, step: int) -> float:
        return norm_of(self.mean(step))


def norm_of(gradients: Tensors) -> float:
    return float(torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm())


def clip_of(kind: str, gradients: Gradients, steps: int) -> float:
    """`gradient_clipping` that is off, or clips in every step, or in none."""
    norms = [gradients.norm(step) for step in range(steps)]
    return {"off": 0.0, "active": min(norms) / 3, "inactive": max(norms) * 3}[kind]


def rows_by_columns(name: str, tensor: torch.Tensor) -> List[torch.Tensor]:
    """A parameter as the matrices that are orthogonalized: one, [out, rest]."""
    return [tensor.reshape(tensor.shape[0], -1)]


class Reference:
    """Muon for the matrices, torch's AdamW for the others, in one process on whole parameters."""

    def __init__(self,
                 weights: Tensors,
                 muon: Sequence[str],
                 matrices_of: Callable[[str, torch.Tensor], List[torch.Tensor]] = rows_by_columns,
                 lr: float = MUON_LR,
                 beta: float = BETA,
                 adam_lr: float = ADAM_LR) -> None:
        self.start = {name: weight.detach().double().cpu().clone() for name, weight in weights.items()}
        self.muon, self.matrices_of = list(muon), matrices_of
        self.oracle = MuonOracle(self._matrices(self.start), lr=lr, beta=beta, weight_decay=WEIGHT_DECAY)
        self.others = {
            name: torch.nn.Parameter(weight.float())
            for name, weight in self.start.items() if name not in self.muon
        }
        if self.others:
            self.adam = torch.optim.AdamW(list(self.others.values()),
                                          lr=adam_lr,
                                          weight_decay=WEIGHT_DECAY,
                                          betas=(0.9, 0.95),
                                          eps=1e-10)

    def _matrices(self, tensors: Tensors) -> List[torch.Tensor]:
        return [matrix for name in self.muon for matrix in self.matrices_of(name, tensors[name])]

    def _whole(self, matrices: Sequence[torch.Tensor]) -> Tensors:
        left = list(matrices)
        whole = {}
        for name in self.muon:
            count = len(self.matrices_of(name, self.start[name]))
            whole[name] = torch.cat([matrix.flatten() for matrix in left[:count]]).view(self.start[name].shape)
            del left[:count]
        return whole

    def step(self, gradients: Tensors, clip: float = 0.0, norm: Optional[float] = None) -> None:
        """`norm` is that of the gradients of the whole model; default: of these."""
        norm = norm_of(gradients) if norm is None else norm
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        for name, parameter in self.others.items():
            parameter.grad = gradients[name].float() * factor
        if self.others:
            self.adam.step()
        self.oracle.step(self._matrices(gradients), clip, norm)

    @property
    def weights(self) -> Tensors:
        return {**self._whole(self.oracle.weights), **{name: p.detach().double() for name, p in self.others.items()}}

    @property
    def momenta(self) -> Tensors:
        return self._whole(self.oracle.momenta)

    @property
    def matrix_count(self) -> int:
        return len(self.oracle.weights)


def muon_names(shapes: Mapping[str, Shape]) -> List[str]:
    return [name for name, shape in shapes.items() if len(shape) > 1 and "embed" not in name]


def initialize(model: torch.nn.Module, config: Dict[str, Any], **given: Any) -> Any:
    """The DeepSpeed engine of a model that is trained on all of its parameters."""
    if "optimizer" in given:
        config = {key: value for key, value in config.items() if key != "optimizer"}
    else:
        given.setdefault("model_parameters", list(model.parameters()))
    # BF16_Optimizer reports memory between its steps and collects garbage for it: 3 of the 4 seconds of its making.
    with mock.patch("deepspeed.runtime.bf16_optimizer.see_memory_usage"):
        return deepspeed.initialize(model=model, config=config, **given)[0]


def train_step(engine: Any,
               gradients: Gradients,
               step: int,
               change: Optional[Callable[[Tensors, int], None]] = None) -> None:
    """All micro-batches of one optimizer step. `change` may alter a micro-batch's gradients in place."""
    for micro in range(gradients.gas):
        factors = gradients.local(step, micro, dist.get_rank())
        if change is not None:
            change(factors, micro)
        loss = engine({name: factor.to(engine.device) for name, factor in factors.items()})
        engine.backward(loss)
        engine.step()


def module_weights(engine: Any) -> Tensors:
    """Whole parameters of the module, as it computes with them. A collective."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().cpu().clone()
    return found


def partitioned(engine: Any) -> bool:
    """Whether the engine cuts its parameters. A pipeline in bf16 has BF16_Optimizer also at stage 0."""
    return engine.zero_optimization() or type(engine.optimizer).__name__ == "BF16_Optimizer"


def whole_parameters(engine: Any) -> Dict[str, torch.nn.Parameter]:
    """What the optimizer steps, of an engine that does not cut it: the module's parameters or fp32 copies of them."""
    named = list(engine.module.named_parameters())
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return dict(named)
    copies = {
        id(parameter): copy
        for group, fp32_group in zip(wrapper.fp16_groups, wrapper.fp32_groups)
        for parameter, copy in zip(group, fp32_group)
    }
    return {name: copies[id(parameter)] for name, parameter in named}


def master_weights(engine: Any, names: Optional[Sequence[str]] = None) -> Tensors:
    """Whole fp32 parameters (default: all), gathered with DeepSpeed's own function. A collective."""
    parameters = dict(engine.module.named_parameters()) if partitioned(engine) else whole_parameters(engine)
    found = {name: parameters[name] for name in names or parameters}
    if partitioned(engine):
        found = {name: safe_get_full_fp32_param(parameter) for name, parameter in found.items()}
    return {name: weight.detach().cpu().clone() for name, weight in found.items() if weight is not None}


def momenta(engine: Any, names: Sequence[str]) -> Tensors:
    """Whole momenta of these parameters, gathered with DeepSpeed's own function. A collective."""
    if partitioned(engine):
        parameters = dict(engine.module.named_parameters())
        found = {name: safe_get_full_optimizer_state(parameters[name], MOMENTUM) for name in names}
        shapes = {name: getattr(parameters[name], "ds_shape", parameters[name].shape) for name in names}
    else:
        parameters = whole_parameters(engine)
        found = {name: engine.basic_optimizer.state[parameters[name]][MOMENTUM] for name in names}
        shapes = {name: parameters[name].shape for name in names}
    return {name: momentum.detach().cpu().view(shapes[name]).clone() for name, momentum in found.items()}


def momentum_shards(engine: Any) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """(partition, momentum) of every Muon partition of this rank."""
    return [(partition, state[MOMENTUM]) for partition, state in engine.basic_optimizer.state.items()
            if MOMENTUM in state]


def over_ranks(number: float) -> float:
    """The sum of a number over all ranks. A collective."""
    total = torch.tensor(float(number), dtype=torch.float64, device=get_accelerator().current_device_name())
    dist.all_reduce(total)
    return float(total)


def distance(found: torch.Tensor, expected: torch.Tensor, start: Optional[torch.Tensor] = None) -> float:
    """|found - expected| relative to the way from `start` (default: 0) to `expected`."""
    way = expected.double() - (0 if start is None else start.double())
    return float((found.double() - expected.double()).norm() / way.norm())


def largest_distance(found: Tensors, expected: Tensors, start: Optional[Tensors] = None) -> float:
    """The largest of the parameters named in `expected`."""
    return max(
        distance(found[name], tensor, None if start is None else start[name]) for name, tensor in expected.items())


@contextmanager
def fp16_accepted() -> Iterator[None]:
    """DeepSpeed's accelerator accepts fp16 on this rank, also where the CPU only computes it slowly."""
    accelerator = get_accelerator()
    own = vars(accelerator).get("is_fp16_supported")
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        if own is None:
            del accelerator.is_fp16_supported
        else:
            accelerator.is_fp16_supported = own


@dataclass(frozen=True)
class Tolerances:
    """Largest relative errors, with what was measured beside them where they are made."""
    weights: float
    momenta: float
    norm: float


# fp32 against float64, measured over all tests: at most 8.1e-6 of the weights' way, 1.5e-7 of the momenta, 9.2e-8 of
# the norm.
ROUNDING = Tolerances(weights=2e-5, momenta=5e-7, norm=5e-7)


def below(what: str, found: float, bound: float) -> None:
    """Asserts found < bound, and says what was found: ranks have no rewritten assertions."""
    assert found < bound, f"{what}: {found:.2e} is not below {bound:.2e}"


def equal(what: str, found: Any, expected: Any) -> None:
    assert found == expected, f"{what}: found {found}, expected {expected}"


def check(engine: Any, reference: Reference, *, steps: int, norm: float, tolerances: Tolerances = ROUNDING) -> None:
    """I1, I2, I4 and I5 after `steps` steps of engine and reference, of which the last had gradients of this norm."""
    weights = master_weights(engine)
    computed = module_weights(engine)
    equal("parameters", set(weights), set(reference.start))
    below("weights", largest_distance(weights, reference.weights, reference.start), tolerances.weights)
    for name, weight in computed.items():
        assert torch.equal(weight, weights[name].to(weight.dtype).view(weight.shape)), f"{name} is not its master"
    below("momenta", largest_distance(momenta(engine, reference.muon), reference.momenta), tolerances.momenta)
    # Stage 0 in fp32 has no norm to tell, with any optimizer.
    if engine.optimizer is not engine.basic_optimizer:
        below("norm", abs(float(engine.get_global_grad_norm()) / norm - 1), tolerances.norm)
    check_momentum_shards(engine, reference)
    check_counts(engine, reference, steps)


def check_counts(engine: Any, reference: Reference, steps: int) -> None:
    """I2: each matrix once per step over all ranks."""
    equal("orthogonalizations", over_ranks(engine.basic_optimizer.orthogonalizations), reference.matrix_count * steps)


def check_momentum_shards(engine: Any, reference: Reference) -> None:
    """I4: fp32, of the partition's size, nothing else, and nothing in the padding."""
    shards = momentum_shards(engine)
    for partition, momentum in shards:
        assert momentum.dtype == torch.float32 and momentum.shape == partition.shape
        assert set(engine.basic_optimizer.state[partition]) == {MOMENTUM}
    if not partitioned(engine):
        return
    whole = momenta(engine, reference.muon)
    numel = sum(momentum.numel() for momentum in whole.values())
    padding = over_ranks(sum(momentum.numel() for _, momentum in shards)) - numel
    assert 0 <= padding <= 2 * dist.get_world_size() * len(whole), f"{padding} elements more than {numel}"
    used = sum(int(momentum.count_nonzero()) for momentum in whole.values())
    equal("elements in use", over_ranks(sum(int(momentum.count_nonzero()) for _, momentum in shards)), used)


@contextmanager
def counted_collectives() -> Iterator[Dict[str, Tuple[int, int]]]:
    """Calls of each collective of deepspeed.comm while the block runs, and the bytes of their first tensors."""
    counts: Dict[str, Tuple[int, int]] = {}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:

        def count(first: Any, *arguments: Any, **named: Any) -> Any:
            tensors = first if isinstance(first, (list, tuple)) else [first]
            size = sum(one.numel() * one.element_size() for one in tensors if isinstance(one, torch.Tensor))
            calls, total = counts.get(name, (0, 0))
            counts[name] = (calls + 1, total + size)
            return function(first, *arguments, **named)

        return count

    with ExitStack() as patches:
        for name in ("all_reduce", "reduce", "reduce_scatter_fn", "reduce_scatter_tensor", "all_to_all_single",
                     "all_gather", "all_gather_into_tensor", "allgather_fn", "broadcast", "all_gather_object"):
            patches.enter_context(mock.patch.object(dist, name, counted(name, getattr(dist, name))))
        yield counts


def straddling(engine: Any) -> bool:
    """Whether some matrix lies on several ranks: then its slices have to be exchanged. After the first step."""
    return any(sum(report.received_bytes) > 0 for report in engine.basic_optimizer.plan_reports())
