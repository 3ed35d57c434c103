# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a library did in a training run, written down on every rank, and the same run on whole matrices in float64."""

import copy
from dataclasses import dataclass
from typing import Any, Optional

import torch

import deepspeed.comm as dist
from unit.v1.ops.muon.contract import Tensors, largest_distance, master_weights, momenta, norm_of, over_ranks
from unit.v1.ops.muon.oracle import MuonOracle


@dataclass(frozen=True)
class Settings:
    """What the ds_config and the library were told, apart from the learning rates."""
    gas: int
    clip: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    match_rms: bool
    decay_vectors: bool


def in_fp32(config: dict[str, Any]) -> dict[str, Any]:
    """A ds_config whose iteration is in fp32 on every machine: a comparison with float64 then means something."""
    config = copy.deepcopy(config)
    config["optimizer"]["params"]["ns_dtype"] = "float32"
    return config


class Record:
    """The micro-batches that the module of an engine trains on, and the learning rates (Muon's, Adam's) of each."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.tokens: list[torch.Tensor] = []
        self.rates: list[tuple[float, float]] = []
        self.start = master_weights(engine)
        engine.module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training:
            return
        found = kwargs if "input_ids" in kwargs else args[0]
        self.tokens.append(found["input_ids"].cpu().clone())
        groups = self.engine.basic_optimizer.param_groups
        rates = {use: {float(group["lr"]) for group in groups if group["use_muon"] is use} for use in (True, False)}
        # All groups of a half have one rate, or this fails.
        (muon, ), (adam, ) = rates[True], rates[False]
        self.rates.append((muon, adam))

    def of_all_ranks(self) -> list[list[torch.Tensor]]:
        """For each micro-batch, the tokens of every rank. A collective."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.tokens)
        return [list(tokens) for tokens in zip(*gathered)]


def on_whole_matrices(model: torch.nn.Module, record: Record, settings: Settings) -> Tensors:
    """The weights after the recorded run. `model` is one as the library trained, of which only the forward is used:
    called with input_ids and labels it returns the loss, or an output that has it. A collective."""
    model = copy.deepcopy(model).double().train()
    muon = [name for name, param in record.engine.module.named_parameters() if param.use_muon]
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(record.start[name])
    oracles = {name: MuonOracle([named[name]], lr=0.0) for name in muon}
    others = [name for name in named if name not in muon]
    groups = [{
        "params": [named[name] for name in others if (named[name].dim() > 1 or settings.decay_vectors) is decayed],
        "weight_decay":
        settings.weight_decay if decayed else 0.0
    } for decayed in (True, False)]
    adam = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    batches = record.of_all_ranks()
    for first in range(0, len(batches), settings.gas):
        _gradients_of(model, batches[first:first + settings.gas])
        _step(named, oracles, adam, record.rates[first + settings.gas - 1], settings)
    return {name: param.detach() for name, param in named.items()}


def _gradients_of(model: torch.nn.Module, batches: list[list[torch.Tensor]]) -> None:
    model.zero_grad()
    for ranks in batches:
        for tokens in ranks:
            found = model(input_ids=tokens, labels=tokens)
            loss = found if isinstance(found, torch.Tensor) else found.loss
            (loss / (len(batches) * len(ranks))).backward()


def _step(named: dict[str, torch.nn.Parameter], oracles: dict[str, MuonOracle], adam: torch.optim.Optimizer,
          rates: tuple[float, float], settings: Settings) -> None:
    norm = norm_of({name: param.grad for name, param in named.items()})
    for name, oracle in oracles.items():
        rows, columns = named[name].shape
        scale = max(1.0, rows / columns)**0.5
        # The oracle knows the original scale only; decay goes by the rate without any.
        factor = 0.2 * max(rows, columns)**0.5 / scale if settings.match_rms else 1.0
        oracle.lr, oracle.weight_decay = rates[0] * factor, settings.weight_decay / factor
        oracle.step([named[name].grad], settings.clip, norm)
    factor = min(1.0, settings.clip / (norm + 1e-6)) if settings.clip > 0 else 1.0
    for group in adam.param_groups:
        group["lr"] = rates[1]
        for param in group["params"]:
            param.grad.mul_(factor)
    adam.step()
    with torch.no_grad():
        for name, oracle in oracles.items():
            named[name].copy_(oracle.weights[0])


def compare(model: torch.nn.Module, record: Record, settings: Settings) -> dict[str, Any]:
    """The largest relative distance of a parameter from the run on whole matrices, and what else a test looks at."""
    expected = on_whole_matrices(model, record, settings)
    batches = record.of_all_ranks()
    return {
        "distance": largest_distance(master_weights(record.engine), expected, record.start),
        "orthogonalizations": over_ranks(record.engine.basic_optimizer.orthogonalizations),
        "different batches on ranks": all(not torch.equal(ranks[0], ranks[1]) for ranks in batches),
        "steps": len(batches) // settings.gas,
        "matrices": sum(param.use_muon for param in record.engine.module.parameters()),
        "rates": record.rates[settings.gas - 1::settings.gas],
    }


def state_of(engine: Any) -> dict[str, Tensors]:
    """Whole fp32 weights and momenta. A collective."""
    muon = [name for name, param in engine.module.named_parameters() if param.use_muon]
    return {"weights": master_weights(engine), "momenta": momenta(engine, muon)}


def difference(found: dict[str, Tensors], expected: dict[str, Tensors]) -> Optional[str]:
    """The first tensor that is not equal bit for bit, or None."""
    for kind, tensors in expected.items():
        for name, tensor in tensors.items():
            if not torch.equal(found[kind][name], tensor):
                return f"{kind} of {name}"
    return None
