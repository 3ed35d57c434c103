# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a test may change in a rank that stays, and how it is put back.

Three kinds of state: torch's and Python's settings (``Settings``), DeepSpeed's globals (``ModuleGlobals``), and what
every test takes over from pytest's process (``take_over``). Methods that a test patches are not put back: a test that
fails while something is patched costs its rank, which is replaced.
"""

import gc
import logging
import os
import random
import sys
import types
import warnings
from typing import Any, Callable, Iterable, Iterator, List, Set, Tuple

import numpy as np
import torch

from deepspeed.accelerator import get_accelerator
from unit.ranks.messages import Surroundings

# These hold what a process makes once: compiled operators, torch libraries, the accelerator. Undone, they would be
# compiled or registered a second time.
_MADE_ONCE = ("deepspeed.accelerator", "deepspeed.ops", "deepspeed.compile")
# zero.Init replaces functions in these modules while it is entered.
_PATCHED_BY_ZERO_INIT = ("torch", "torch.nn.functional", "torch.nn.init")

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = (dict, list, set)

Undo = Callable[[], None]


def take_over(surroundings: Surroundings) -> None:
    """Gives this process the environment, import path and directory of pytest's process. Changes nothing else."""
    wanted = surroundings.environ
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    os.environ.update(wanted)
    sys.path[:] = surroundings.sys_path
    os.chdir(surroundings.directory)


class Settings:
    """Settings and random states of Python, numpy and torch as they are now; ``restore`` puts them back."""

    def __init__(self) -> None:
        self._undo: List[Undo] = list(_python_settings())
        self._undo.extend(_random_states())
        self._undo.extend(_torch_settings())

    def restore(self) -> None:
        """Puts every setting back; can be called again."""
        for undo in self._undo:
            undo()


def _python_settings() -> Iterator[Undo]:
    filters, arguments, path = list(warnings.filters), list(sys.argv), list(sys.path)
    level, collecting = logging.getLogger("DeepSpeed").level, gc.isenabled()

    def undo() -> None:
        warnings.filters[:] = filters  # type: ignore[index]
        sys.argv[:] = arguments
        sys.path[:] = path
        logging.getLogger("DeepSpeed").setLevel(level)
        (gc.enable if collecting else gc.disable)()

    yield undo


def _random_states() -> Iterator[Undo]:
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def undo() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

    yield undo
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" and accelerator.is_available():
        of_device = accelerator.get_rng_state()
        yield lambda: accelerator.set_rng_state(of_device)


def _torch_settings() -> Iterator[Undo]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    gradients, anomalies = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in ("benchmark", "deterministic", "enabled")}

    def undo() -> None:
        # Only what has changed: some of these setters cost a second, because they import the compiler.
        if (torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled()) != (deterministic, only_warn):
            torch.use_deterministic_algorithms(deterministic, warn_only=only_warn)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            # None, not the device: an explicit default keeps a mode active that every torch function goes through.
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_grad_enabled(gradients)
        if torch.is_anomaly_enabled() != anomalies:
            torch.autograd.set_detect_anomaly(anomalies)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        for name, value in cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)

    yield undo


class ModuleGlobals:
    """DeepSpeed's state outside of any engine, as it is when first seen: what the names of its modules are bound to
    and the data attributes of its classes (ZeRO-3 counts parameters in one), what containers among these and among the
    default arguments of their methods hold, and the attributes of its objects (the communication logger, timers).

    Also the functions that ``zero.Init`` replaces in torch. A new module is seen by the ``see_new_modules`` after its
    import.
    """

    def __init__(self) -> None:
        self._seen: Set[str] = set()
        self._bound: List[Tuple[Any, str, Any]] = []
        self._held: List[Tuple[Any, Any]] = []
        for name in _PATCHED_BY_ZERO_INIT:
            module = sys.modules[name]
            self._bound += [(module, key, value) for key, value in vars(module).items()
                            if isinstance(value, _FUNCTIONS)]

    def see_new_modules(self) -> None:
        """Notes the state of each DeepSpeed module not seen before; a module known already stays as it was noted."""
        for name in [name for name in sys.modules if name == "deepspeed" or name.startswith("deepspeed.")]:
            module = sys.modules[name]
            if name not in self._seen and not name.startswith(_MADE_ONCE) and isinstance(module, types.ModuleType):
                self._seen.add(name)
                self._see(module, lambda value: True)
                for value in list(vars(module).values()):
                    if isinstance(value, type) and value.__module__ == name:
                        self._see(value, _is_data)
                        self._held.extend(_contents(_defaults(vars(value).values())))

    def restore(self) -> None:
        """Binds every noted name and fills every noted container and object as noted; names added since stay."""
        for owner, name, value in self._bound:
            if vars(owner).get(name, value) is not value:
                setattr(owner, name, value)
        for held, contents in self._held:
            if not _holds_the_same(held, contents):
                _refill(held, contents)

    def _see(self, owner: Any, wanted: Callable[[Any], bool]) -> None:
        values = {key: value for key, value in vars(owner).items() if not key.startswith("__") and wanted(value)}
        self._bound.extend((owner, key, value) for key, value in values.items())
        self._held.extend(_contents(values.values()))


def _is_data(value: Any) -> bool:
    return not callable(value) and not hasattr(type(value), "__get__")


def _defaults(values: Iterable[Any]) -> Iterator[Any]:
    """Default arguments of functions: ZeRO-3 counts modules in a list that is one."""
    for value in values:
        if isinstance(value, types.FunctionType):
            yield from value.__defaults__ or ()


def _contents(values: Iterable[Any]) -> Iterator[Tuple[Any, Any]]:
    for value in values:
        if type(value) in _CONTAINERS:
            yield value, value.copy()
        elif type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__"):
            attributes = vars(value)
            yield attributes, attributes.copy()
            yield from _contents(held for held in attributes.values() if type(held) in _CONTAINERS)


def _holds_the_same(held: Any, contents: Any) -> bool:
    # By identity: what a container holds may be tensors, which compare element by element.
    if len(held) != len(contents):
        return False
    if isinstance(held, set):
        return held == contents
    if isinstance(held, list):
        return all(mine is noted for mine, noted in zip(held, contents))
    return all(key in held and held[key] is noted for key, noted in contents.items())


def _refill(held: Any, contents: Any) -> None:
    if isinstance(held, list):
        held[:] = contents
    else:
        held.clear()
        held.update(contents)
