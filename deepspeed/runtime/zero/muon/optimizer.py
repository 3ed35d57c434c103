# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The torch optimizer: Muon for groups with `use_muon`, the Adam that DeepSpeed would choose for the others."""

import hashlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Optional

import torch

from deepspeed.runtime.zero.muon import newton_schulz
from deepspeed.runtime.zero.muon.coefficients import flops, resolve
from deepspeed.runtime.zero.muon.exchange import Exchange, require_same_on_all_ranks
from deepspeed.runtime.zero.muon.kernels import agree
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import matrices_of_parameter
from deepspeed.runtime.zero.muon.options import (ADAM_GROUP_DEFAULTS, DEFAULT_WORKSPACE_MB, MUON_GROUP_DEFAULTS,
                                                 check_adam_group, check_flag, check_muon_group, check_stats_every,
                                                 check_tensor_parallel, check_workspace_mb)
from deepspeed.runtime.zero.muon.pack import Workspace
from deepspeed.runtime.zero.muon.plan import Plan, PlanReport, build_plan, rank_plan, round_numel_within
from deepspeed.runtime.zero.muon.products import Products
from deepspeed.runtime.zero.muon.selftest import SelfTest
from deepspeed.runtime.zero.muon.stats import FamilyStats, Statistics, collect
from deepspeed.runtime.zero.muon.step import Kernel, MuonStep, Partition
from deepspeed.utils import logger

MOMENTUM_KEY = "momentum_buffer"


@dataclass(frozen=True)
class Binding:
    """A flat partition tensor that an engine has described: its layout over the ranks of `process_group`, and the
    device on which matrices are assembled and orthogonalized."""
    layout: GroupLayout
    process_group: Optional[Any]
    device: torch.device


@dataclass(frozen=True)
class _WorkSet:
    """Parameters that share exchanges: one process group, one device, one kernel."""
    process_group: Optional[Any]
    device: torch.device
    replicated: bool
    kernel: Kernel


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Muon (K. Jordan et al., 2024) for param groups with `use_muon: True`, an auxiliary Adam for the others.

    A parameter of two or more dimensions is a whole matrix, an [out, rest] convolution kernel, or, where it is marked
    `is_expert_group`, a stack of matrices. A flat partition of a ZeRO engine is described once with `bind`; then each
    matrix is exchanged, orthogonalized by one rank of the group, and its update sent back, all inside `step()`, which
    is collective over the process group.

    Options of a Muon group, read at every step: lr, weight_decay, momentum, nesterov, ns_method, ns_steps,
    ns_coefficients, ns_dtype, adjust_lr_fn. State per parameter: `momentum_buffer`, fp32, of the parameter's shape.

    Args:
        param_groups: dicts with `params` and `use_muon`.
        adam_optimizer: class of the auxiliary optimizer (FusedAdam, DeepSpeedCPUAdam, ...); default torch's.
        adam_optimizer_kwargs: its keyword arguments.
        adam_w_mode: decoupled weight decay, for torch's.
        fallback_to_inline: use torch's where `adam_optimizer` raises RuntimeError (a kernel that cannot be built).
        workspace_mb: bound in MiB on what a step holds beyond the momentum, one largest matrix apart.
        max_round_numel: further bound on the elements that an owner orthogonalizes at a time.

    Raises ValueError for a group without `use_muon` or with options out of range.
    """

    def __init__(self,
                 param_groups: Iterable[dict[str, Any]],
                 adam_optimizer: Optional[Callable[..., torch.optim.Optimizer]] = None,
                 adam_optimizer_kwargs: Optional[dict[str, Any]] = None,
                 adam_w_mode: bool = True,
                 fallback_to_inline: bool = False,
                 *,
                 workspace_mb: float = DEFAULT_WORKSPACE_MB,
                 max_round_numel: Optional[int] = None):
        groups = [_with_defaults(index, group) for index, group in enumerate(param_groups)]
        super().__init__(groups, {})
        self.limit_workspace(workspace_mb, max_round_numel)
        # What an engine does with tensor-parallel shards.
        self.tensor_parallel = "exact"
        # Whether the first step is checked, and after how many steps statistics are taken (0: never).
        self.selftest = True
        self.stats_every = 0
        self._initial_lrs: Optional[list[float]] = [float(group["lr"]) for group in self.param_groups]
        self._bindings: dict[torch.Tensor, Binding] = {}
        self._workspaces: dict[torch.device, Workspace] = {}
        self._products: dict[tuple[Any, torch.device, torch.dtype], Products] = {}
        self.aux_optimizer = self._make_aux_optimizer(adam_optimizer, adam_optimizer_kwargs or {}, adam_w_mode,
                                                      fallback_to_inline)
        self._link_aux()

    def configure(self, options: Mapping[str, Any], reduce_bucket_size: Optional[int] = None) -> None:
        """Take the options of ds_config.json that are not those of a group. Raises ValueError for a bad value."""
        self.limit_workspace(options.get("workspace_mb", DEFAULT_WORKSPACE_MB), reduce_bucket_size)
        self.tensor_parallel = check_tensor_parallel(options.get("tensor_parallel", "exact"))
        self.selftest = check_flag("muon_selftest", options.get("muon_selftest", True))
        self.stats_every = check_stats_every(options.get("muon_stats_every", 0))

    def limit_workspace(self, workspace_mb: float, max_round_numel: Optional[int] = None) -> None:
        """Set the bounds that the constructor describes; plans made before are dropped. ValueError for a bad bound."""
        self.workspace_mb = check_workspace_mb(workspace_mb)
        self.max_round_numel = max_round_numel
        self._steps: dict[tuple[Any, ...], MuonStep] = {}

    def _make_aux_optimizer(self, adam_optimizer: Optional[Callable[..., torch.optim.Optimizer]], kwargs: dict[str,
                                                                                                               Any],
                            adam_w_mode: bool, fallback_to_inline: bool) -> Optional[torch.optim.Optimizer]:
        groups = _aux_groups(self.param_groups)
        if not groups:
            return None
        aux: Optional[torch.optim.Optimizer] = None
        if adam_optimizer is not None:
            try:
                aux = adam_optimizer(groups, **kwargs)
            except RuntimeError as error:
                if not fallback_to_inline:
                    raise
                logger.warning(f"Muon: {adam_optimizer.__name__} is not available here, torch's Adam serves the "
                               f"auxiliary groups instead: {error}")
        if aux is None:
            aux = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(groups)
        # One state and one set of group dicts for both, so that engines and checkpoints see a single optimizer.
        for group, completed in zip(groups, aux.param_groups):
            for key, value in completed.items():
                group.setdefault(key, value)
        return aux

    def _link_aux(self) -> None:
        """Give the auxiliary optimizer this one's state and, of the groups that are here now, its own."""
        if self.aux_optimizer is not None:
            self.aux_optimizer.param_groups = _aux_groups(self.param_groups)
            self.aux_optimizer.state = self.state

    def bind(self,
             flat_param: torch.Tensor,
             layout: GroupLayout,
             process_group: Optional[Any] = None,
             device: Optional[torch.device] = None) -> None:
        """Say what the flat partition `flat_param` [partition_numel] holds, on this and on the other ranks.

        `process_group` is the one over which the layout cuts (None: this rank alone); `device` is where matrices are
        orthogonalized (default: where `flat_param` lies, which is wrong only for offloaded partitions). The partition
        may be empty now and swapped in for the step.
        """
        self._bindings[flat_param] = Binding(layout, process_group, device or flat_param.device)
        self._steps.clear()

    @property
    def orthogonalizations(self) -> int:
        """How many matrices this rank has orthogonalized so far."""
        return sum(step.orthogonalized for step in self._steps.values())

    def plan_reports(self) -> list[PlanReport]:
        """Figures of the plans built so far (a plan is built at the first step of its parameters)."""
        return [step.plan.plan.report() for step in self._steps.values()]

    def bound_reports(self) -> list[PlanReport]:
        """Figures of each bound partition, planned on its own: what is known before the first step. No collective."""
        kernels = {
            param: _kernel(group)
            for group in self.param_groups if group["use_muon"] for param in group["params"]
        }
        # ZeRO-3 empties its groups between steps; their first kernel stands for all then.
        default = next((_kernel(group) for group in self.param_groups if group["use_muon"]), None)
        return [
            self._plan([binding.layout], kernels.get(param, default)).report()
            for param, binding in self._bindings.items()
        ]

    def release_workspace(self) -> None:
        """Free the exchange and batch buffers; the next step allocates them anew."""
        for workspace in self._workspaces.values():
            workspace.release()

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, step_id: Optional[int] = None) -> Any:
        """One optimizer step of all param groups. Collective over the process groups of bound partitions.

        Weights, momenta and the Adam state are changed, gradients are not. A Muon parameter without a gradient is
        stepped with a zero one: ranks must agree on who steps. `step_id` goes to an auxiliary optimizer that overlaps
        steps. Returns the closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_of_flattened_lr()
        self._step_matrices(lambda: self._step_aux(step_id))
        return loss

    def _warn_of_flattened_lr(self) -> None:
        """Say once when a schedule has set one learning rate for groups that began with different ones."""
        rates = [float(group["lr"]) for group in self.param_groups]
        if self._initial_lrs is None or len(rates) != len(self._initial_lrs):
            return
        if len(set(self._initial_lrs)) > 1 and len(set(rates)) == 1 and rates[0] > 0:
            logger.warning(
                f"Muon: the learning rates of the param groups were {self._initial_lrs}, and now all are "
                f"{rates[0]:g}: the scheduler sets one absolute value for Muon and Adam. Give it a list with a "
                "value for each group (warmup_max_lr: [muon, adam]), or use one that keeps ratios, such as "
                "WarmupCosineLR.")
            self._initial_lrs = None

    def _step_matrices(self, step_others: Callable[[], None]) -> None:
        """Step the Muon groups, and call `step_others` while the last exchange is in flight."""
        sets: dict[_WorkSet, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            if not group["use_muon"]:
                continue
            kernel = _kernel(group)
            for param in group["params"]:
                binding = self._binding(param)
                key = _WorkSet(binding.process_group, binding.device, binding.layout.replicated, kernel)
                sets.setdefault(key, []).append((param, group))
        self._build_missing(sets)
        if not sets:
            step_others()
        for number, (key, members) in enumerate(sets.items(), start=1):
            partitions, write_back = [], []
            for param, group in members:
                partition = self._partition(param, group)
                partitions.append(partition)
                if partition.weight.data_ptr() != param.data_ptr():
                    write_back.append((param, partition.weight))
            self._steps[_step_key(key, members)].run(partitions, step_others if number == len(sets) else None)
            for param, weight in write_back:
                param.copy_(weight.view_as(param))

    def _partition(self, param: torch.Tensor, group: dict[str, Any]) -> Partition:
        expected = self._bindings[param].layout.partition_numel
        if param.numel() != expected:
            raise RuntimeError(
                f"Muon: a partition of {param.numel()} elements is stepped, but its layout has {expected}")
        state = self.state[param]
        if MOMENTUM_KEY not in state:
            state[MOMENTUM_KEY] = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        return Partition(weight=param.detach().float().reshape(-1),
                         grad=grad.float().reshape(-1),
                         momentum=state[MOMENTUM_KEY].view(-1),
                         lr=float(group["lr"]),
                         weight_decay=float(group["weight_decay"]),
                         beta=float(group["momentum"]),
                         nesterov=group["nesterov"],
                         adjust_lr_fn=group["adjust_lr_fn"])

    def _binding(self, param: torch.Tensor) -> Binding:
        """The engine's description of `param`; a parameter of two or more dimensions describes itself."""
        binding = self._bindings.get(param)
        if binding is None:
            if param.dim() < 2:
                raise RuntimeError(f"Muon: a flat tensor of {param.numel()} elements is in a Muon group but no layout "
                                   "was bound to it, so its matrices are unknown. The engine must call "
                                   "optimizer.bind; a user's 1-D parameter belongs into a group with use_muon: False.")
            matrices = matrices_of_parameter(f"parameter {len(self._bindings)}", param, tuple(param.shape))
            layout = GroupLayout.flat(matrices=matrices,
                                      flat_offsets=[matrix.offset_in_parameter for matrix in matrices],
                                      world_size=1,
                                      partition_numel=param.numel())
            binding = self._bindings[param] = Binding(layout, None, param.device)
        return binding

    def _build_missing(self, sets: dict[_WorkSet, list[tuple[torch.Tensor, dict[str, Any]]]]) -> None:
        """Plan what has not been planned yet, and compare with the other ranks before anything depends on it."""
        built: dict[Any, list[tuple[str, str]]] = {}
        new: list[tuple[_WorkSet, MuonStep]] = []
        for key, members in sets.items():
            step_key = _step_key(key, members)
            if step_key not in self._steps:
                step = self._steps[step_key] = self._build_step(key, members)
                new.append((key, step))
                built.setdefault(key.process_group,
                                 []).extend([*step.plan.plan.digests(), ("Newton-Schulz settings", repr(key.kernel))])
        try:
            for process_group, digests in built.items():
                digests.append(("the number of Muon groups", hashlib.sha256(repr(digests).encode()).hexdigest()[:16]))
                require_same_on_all_ranks(Exchange(process_group), digests, "the matrices and their plan")
            # Only now do all ranks know that they ask for the same.
            for key, step in new:
                agreed = (key.process_group, key.device, key.kernel.dtype)
                if agreed not in self._products:
                    self._products[agreed] = agree(step.exchange, key.device, key.kernel.dtype)
                step.products = self._products[agreed]
        except (RuntimeError, ValueError):
            self._steps.clear()
            raise

    def _build_step(self, key: _WorkSet, members: list[tuple[torch.Tensor, dict[str, Any]]]) -> MuonStep:
        plan = self._plan([self._bindings[param].layout for param, _ in members], key.kernel)
        exchange = Exchange(key.process_group)
        if plan.world_size != exchange.world_size:
            raise RuntimeError(f"Muon: a layout over {plan.world_size} ranks was bound to a process group of "
                               f"{exchange.world_size}")
        workspace = self._workspaces.setdefault(key.device, Workspace(key.device))
        step = MuonStep(rank_plan(plan, exchange.rank), key.kernel, exchange, workspace)
        if self.selftest:
            step.watchers.append(SelfTest.of(members))
        if self.stats_every:
            step.watchers.append(Statistics(plan, self.stats_every))
        return step

    def muon_stats(self, new_only: bool = False) -> dict[str, FamilyStats]:
        """Figures of a few matrices of each family, from the last step that `stats_every` divides; see `FamilyStats`.

        Empty before that step, and with `new_only` where they have been returned already. Sums over the ranks: all
        have to call it, after the same step.
        """
        return collect(self._steps.values(), new_only)

    def weights_were_set(self) -> None:
        """Say that the weights are no longer those that the last step has left, as after loading a checkpoint."""
        for step in self._steps.values():
            for watcher in step.watchers:
                watcher.weights_were_set()

    def _plan(self, layouts: list[GroupLayout], kernel: Kernel) -> Plan:
        itemsize = torch.empty((), dtype=kernel.dtype).element_size()
        round_numel = round_numel_within(self.workspace_mb, itemsize, self.max_round_numel)
        costs = [
            flops(matrix.rows, matrix.cols, kernel.method, len(kernel.triples)) for layout in layouts
            for matrix in layout.matrices
        ]
        return build_plan(layouts, costs=costs, itemsize=itemsize, round_numel=round_numel)

    def _step_aux(self, step_id: Optional[int]) -> None:
        # Engines step one group at a time by putting it alone into `param_groups` for the call.
        self._link_aux()
        if self.aux_optimizer is None or not self.aux_optimizer.param_groups:
            return
        if step_id is not None and getattr(self.aux_optimizer, "overlap_step", None) is False:
            self.aux_optimizer.step(step_id=step_id)
        else:
            self.aux_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. The momentum keeps fp32, whatever the parameters' dtype is.

        An option that the saved groups do not have, as those of older versions, keeps its value.
        """
        self.weights_were_set()
        before = self.param_groups
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved_ids, params):
            momentum = saved.get(index, {}).get(MOMENTUM_KEY)
            if momentum is not None:
                # torch has cast it to the parameter's dtype on the way in.
                self.state[param][MOMENTUM_KEY] = momentum.detach().clone().to(device=param.device,
                                                                               dtype=torch.float32)
        for group, own in zip(self.param_groups, before):
            for key, value in (MUON_GROUP_DEFAULTS if group["use_muon"] else ADAM_GROUP_DEFAULTS).items():
                group.setdefault(key, own.get(key, value))
        self._link_aux()


def _with_defaults(index: int, group: dict[str, Any]) -> dict[str, Any]:
    label = group.get("name", f"param group {index}")
    if not isinstance(group.get("use_muon"), bool):
        raise ValueError(f"Muon: {label} must say use_muon: True or False, got {group.get('use_muon')!r}")
    defaults = MUON_GROUP_DEFAULTS if group["use_muon"] else ADAM_GROUP_DEFAULTS
    completed = {**defaults, **group}
    if completed["use_muon"]:
        check_muon_group(label, completed)
        params = completed["params"]
        # Largest size first, as stock DeepSpeed flattens them: a checkpoint's flat partitions depend on the order.
        completed["params"] = sorted([params] if isinstance(params, torch.Tensor) else params,
                                     key=lambda param: param.size(),
                                     reverse=True)
    else:
        check_adam_group(label, completed)
    return completed


def _aux_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if not group["use_muon"]]


def _kernel(group: dict[str, Any]) -> Kernel:
    dtype = group["ns_dtype"]
    if dtype is None:
        dtype = newton_schulz.compute_dtype(group["ns_method"])
    elif isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return Kernel(group["ns_method"], resolve(group["ns_coefficients"], group["ns_steps"]), dtype)


def _step_key(key: _WorkSet, members: list[tuple[torch.Tensor, dict[str, Any]]]) -> tuple[Any, ...]:
    return (key, *(id(param) for param, _ in members))
