# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tests that run on several ranks: the interface that DeepSpeed's own tests are written against.

    class TestExample(DistributedTest):
        world_size = [1, 2]

        @pytest.mark.parametrize("shape", [(3, 5), (4, 4)])
        def test(self, shape, tmpdir):
            assert dist.get_world_size() == self.world_size

The method runs on every rank; pytest's process only waits. Values of fixtures and parameters are pickled to the ranks.
The ranks start once and serve all tests, see ``unit.ranks``; between tests the process group, DeepSpeed's globals,
random states, torch's settings, environment variables and the working directory are put back.
"""

import functools
import inspect
import os
import pickle
import random
import socket
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np
import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from unit.ranks.messages import Target
from unit.ranks.pool import Job, RankPool
from unit.ranks.report import conclude

DEEPSPEED_TEST_TIMEOUT = int(os.environ.get("DS_UNITTEST_TIMEOUT", "180"))

_POOLS: "pytest.StashKey[Dict[str, RankPool]]" = pytest.StashKey()


class DistributedExec:
    """What ``DistributedTest`` and ``DistributedFixture`` share: class attributes, and the way to the ranks.

    world_size         ranks to run on; a list runs the test once for each
    backend            of torch.distributed; by default the accelerator's
    init_distributed   whether the process group is there when the test begins
    set_dist_env       whether RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR, MASTER_PORT are set
    requires_cuda_env  whether the test is skipped where DeepSpeed's accelerator is not available
    reuse_dist_env     whether process group and DeepSpeed's globals may stay from test to test
    exec_timeout       seconds until a test that does not end is stopped and reported with the stacks of its ranks

    On machines with fewer accelerators than ranks the test runs on the CPU with gloo.
    """

    world_size: Union[int, Sequence[int]] = 2
    backend = get_accelerator().communication_backend_name()
    init_distributed = True
    set_dist_env = True
    requires_cuda_env = True
    reuse_dist_env = False
    exec_timeout: float = DEEPSPEED_TEST_TIMEOUT
    # Accepted as DeepSpeed's tests set them. Here any rank may have children, and the pool chooses how ranks start.
    non_daemonic_procs = False
    start_method: Optional[str] = None

    def _launch(self, config: pytest.Config, target: Target, arguments: Mapping[str, Any],
                world_size: Union[int, Sequence[int]]) -> None:
        """Runs ``target`` on the ranks, once per world size. Raises pytest's skip, xfail or failure."""
        if self.requires_cuda_env and not get_accelerator().is_available():
            pytest.skip("only supported in accelerator environments.")
        # pytest writes fixtures' bookkeeping to the instance too: what does not pickle is not for the test.
        attributes = {name: value for name, value in vars(self).items() if _pickled(value) is not None}
        for name, value in arguments.items():
            if _pickled(value) is None:
                pytest.fail(
                    f"{target.method}() asks for '{name}', a {type(value).__name__}, which cannot be sent to the "
                    "ranks: it does not pickle. Pass what can be pickled and make the rest inside of the test.",
                    pytrace=False)
        for size in _as_list(world_size):
            job = Job(target=target,
                      values=pickle.dumps((attributes, dict(arguments))),
                      world_size=size,
                      exec_timeout=self.exec_timeout,
                      master_port=get_master_port(),
                      reuse_group=self.reuse_dist_env,
                      group_kind=(size, self.backend, self.init_distributed, self.set_dist_env))
            conclude(_pool(config, size).run(job), size)


class DistributedTest(DistributedExec):
    """Base of a test class whose methods run on every rank.

    Fixtures, ``pytest.mark``, parameters, ``pytest.skip`` inside of the test and ``pytest.mark.world_size(n)`` on a
    method work as usual. ``self.world_size`` is the number of ranks that the method runs on. ``setup_method``,
    ``teardown_method`` and fixtures run in pytest's process; what they leave on ``self`` is sent along where it
    pickles.
    """

    is_dist_test = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def class_tmpdir(cls, tmpdir_factory: Any) -> Any:
        """A directory shared by all tests of the class and their fixtures."""
        return tmpdir_factory.mktemp(cls.__name__)

    @pytest.fixture(autouse=True)
    def rank_count(self, request: pytest.FixtureRequest) -> Union[int, Sequence[int]]:
        """The world size of this test: a parameter made by ``pytest_generate_tests`` where there are several."""
        return getattr(request, "param", None) or _wanted_world_size(request.node, type(self))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Makes one test of each world size in a list."""
        sizes = _as_list(_wanted_world_size(metafunc.definition, type(self)))
        if len(sizes) > 1 and "world_size" not in metafunc.fixturenames:
            metafunc.parametrize("rank_count", sizes, indirect=True, ids=[f"ranks{size}" for size in sizes])

    def __call__(self, request: pytest.FixtureRequest) -> None:
        """Runs the current test of ``request`` on the ranks."""
        self.run_item(request.node)

    def run_item(self, item: pytest.Function) -> None:
        """Runs the test ``item`` on the ranks. Raises pytest's skip, xfail or failure."""
        classes = tuple(node.name for node in item.listchain() if isinstance(node, pytest.Class))
        target = Target(item.module.__name__, item.module.__file__, classes, item.originalname)
        names = inspect.signature(item.function).parameters
        arguments = {name: item.funcargs[name] for name in names if name in item.funcargs}
        world_size = item.funcargs.get("world_size", item.funcargs["rank_count"])
        self._launch(item.config, target, arguments, world_size)


class DistributedFixture(DistributedExec):
    """Base of a fixture whose ``run`` is executed on ranks, with a world size of its own, before the test.

    The class itself is the fixture: a test asks for it by the class's name. ``run`` may ask for other fixtures; it
    returns nothing, but can leave files for the test in ``class_tmpdir``.
    """

    is_dist_fixture = True

    def run(self, *args: Any, **kwargs: Any) -> None:
        """What the ranks do; to be defined by the subclass with the fixtures it wants as parameters."""
        raise NotImplementedError(f"{type(self).__name__} is a DistributedFixture: it must define run(self, ...)")

    def __call__(self, request: pytest.FixtureRequest, **arguments: Any) -> None:
        """Runs ``run`` on the ranks with the values of its fixtures, which are looked up where they are not given."""
        if not isinstance(self.world_size, int):
            pytest.fail(
                f"{type(self).__name__}.world_size is {self.world_size}: a DistributedFixture has one world size",
                pytrace=False)
        for name in fixture_names(type(self)):
            if name not in arguments:
                arguments[name] = request.getfixturevalue(name)
        file = sys.modules[type(self).__module__].__file__ or ""
        target = Target(type(self).__module__, file, tuple(type(self).__qualname__.split(".")), "run")
        self._launch(request.config, target, arguments, self.world_size)


def fixture_names(fixture: type) -> List[str]:
    """The fixtures that ``fixture.run`` asks for: its parameters without a default, as pytest reads them."""
    parameters = list(inspect.signature(fixture.run).parameters.values())[1:]  # type: ignore[attr-defined]
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]


def as_pytest_fixture(fixture: type) -> Any:
    """The pytest fixture that stands for a ``DistributedFixture`` class, with the parameters of its ``run``."""

    def run_on_ranks(request: pytest.FixtureRequest, **arguments: Any) -> None:
        fixture()(request, **arguments)

    names = ["request"] + fixture_names(fixture)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run_on_ranks.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names])
    return pytest.fixture(name=fixture.__name__)(run_on_ranks)


def _wanted_world_size(node: Any, owner: type) -> Union[int, Sequence[int]]:
    mark = node.get_closest_marker("world_size")
    return mark.args[0] if mark is not None else owner.world_size  # type: ignore[attr-defined]


def _as_list(world_size: Union[int, Sequence[int]]) -> List[int]:
    return [world_size] if isinstance(world_size, int) else list(world_size)


def _pickled(value: Any) -> Optional[bytes]:
    try:
        return pickle.dumps(value)
    except Exception:  # what __reduce__ of any class raises
        return None


def _pool(config: pytest.Config, world_size: int) -> RankPool:
    """The ranks of this pytest run, on the accelerator if it has a device for each, else on the CPU."""
    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name != "cpu" and accelerator.device_count() < world_size:
        name = "cpu"
    pools = config.stash.setdefault(_POOLS, {})
    if name not in pools:
        pools[name] = RankPool(name)
        config.add_cleanup(pools[name].close)
    return pools[name]


def get_xdist_worker_id() -> Optional[int]:
    """The number of this pytest-xdist worker, None where there is none."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return int(worker.replace("gw", "")) if worker else None


def get_master_port(base_port: int = 29500, port_range_size: int = 1000) -> str:
    """A free port, from the range that this pytest-xdist worker has to itself. Raises OSError where none is free.

    The search begins at random, so that pytest processes side by side do not all pick the first one.
    """
    first = base_port + port_range_size * (get_xdist_worker_id() or 0)
    # Not the generator that tests seed: a seeded test would always ask for the same port.
    start = random.SystemRandom().randrange(port_range_size)
    for offset in range(port_range_size):
        port = first + (start + offset) % port_range_size
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return str(port)
    raise OSError(f"no free port from {first} to {first + port_range_size - 1}")


def get_test_path(filename: str) -> str:
    """The path of a file that lies beside this one."""
    return str(Path(__file__).parent / filename)


def is_rocm_pytorch() -> bool:
    """Whether torch is built for ROCm."""
    return getattr(torch.version, "hip", None) is not None


def skip_on_arch(min_arch: int = 7) -> None:
    """Skips the test on CUDA devices of a lower compute capability than ``min_arch``."""
    if get_accelerator().device_name() == "cuda":
        found = torch.cuda.get_device_capability()[0]  # ignore-cuda
        if found < min_arch:
            pytest.skip(f"needs compute capability {min_arch} or higher, found {found}")


def preferred_dtype() -> torch.dtype:
    """The dtype to train with here: bfloat16, float16 or float32, the first that the accelerator has."""
    accelerator = get_accelerator()
    if accelerator.is_bf16_supported():
        return torch.bfloat16
    return torch.float16 if accelerator.is_fp16_supported() else torch.float32


class EnableDeterminism:
    """A context with deterministic algorithms and generators seeded with ``seed`` plus the local rank; undone at its
    end."""

    _VARIABLES = {"CUDA_LAUNCH_BLOCKING": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}

    def __init__(self, seed: int) -> None:
        self.seed = seed + int(os.environ.get("LOCAL_RANK", "0"))

    def __enter__(self) -> None:
        accelerator = get_accelerator()
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state(), accelerator.get_rng_state()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._before = {name: os.environ.get(name) for name in self._VARIABLES}
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)
        accelerator.manual_seed_all(self.seed)
        os.environ.update(self._VARIABLES)
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *exception: Any) -> None:
        of_python, of_numpy, of_torch, of_device = self._states
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        get_accelerator().set_rng_state(of_device)
        torch.use_deterministic_algorithms(self._deterministic)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def enable_determinism(seed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function runs inside of ``EnableDeterminism(seed)``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(function)
        def deterministic(*args: Any, **kwargs: Any) -> Any:
            with EnableDeterminism(seed):
                return function(*args, **kwargs)

        return deterministic

    return decorate


def reduce_boolean_flags(flag: bool, op: Callable[[List[bool]], bool] = all) -> bool:
    """``op`` over the flags of all ranks, the same on each; a collective. Without a process group, ``flag`` itself."""
    if not dist.is_initialized():
        return flag
    device = get_accelerator().current_device_name()
    mine = torch.tensor([int(flag)], dtype=torch.int, device=device)
    everyone = torch.zeros(dist.get_world_size(), dtype=torch.int, device=device)
    dist.all_gather_into_tensor(everyone, mine)
    return op([bool(one) for one in everyone.tolist()])


def allclose_on_all_ranks(actual: Any, expected: Any, assert_message: Optional[str] = None, **kwargs: Any) -> None:
    """Asserts that two tensors are close on every rank, so that all ranks fail together; a collective.

    ``kwargs`` go to ``torch.testing.assert_close``. Raises AssertionError with ``assert_message`` and, on the ranks
    where the tensors differ, how.
    """
    difference = ""
    try:
        torch.testing.assert_close(actual, expected, **kwargs)
    except AssertionError as error:
        difference = f" {error}"
    if not reduce_boolean_flags(not difference):
        raise AssertionError((assert_message or "Tensors are not close on all ranks.") + difference)
