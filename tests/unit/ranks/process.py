# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A rank's process: takes tests one after the other and tells how each ended."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Callable, Optional

import numpy as np
import pytest

import deepspeed
from deepspeed.accelerator import get_accelerator
from unit.ranks.group import Group, forbid_shared_memory_op
from unit.ranks.isolation import ModuleGlobals, Settings, take_over
from unit.ranks.messages import Kind, Outcome, Settle, Target, Task
from unit.ranks.modules import TestModules

# How the backends word that the other end of a connection went away.
_PEER_IS_GONE = re.compile(
    r"(closed|reset) by (the )?(remote )?peer|remote process (has )?exited|broken pipe|socket closed", re.IGNORECASE)
_HARNESS = Path(__file__).parent
# Past the limit of a test a rank ends itself, in case that pytest's process is not there any more to do it.
_LAST_RESORT_SECONDS = 60


@dataclass(frozen=True)
class RankFiles:
    """Where a rank writes: ``output`` its stdout and stderr, ``stack`` its Python stack when SIGUSR1 asks for it."""
    output: Path
    stack: Path


def serve(rank: int, connection: Connection, files: RankFiles, deepspeed_file: str) -> None:
    """The whole life of a rank: ends when pytest's process closes ``connection`` or dies.

    ``deepspeed_file`` is the DeepSpeed that pytest's process imported; a rank with another one refuses to start.
    """
    # A session of its own: Ctrl-C is pytest's to handle, and the rank can be killed together with its children.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _redirect_output(files.output)
    if deepspeed.__file__ != deepspeed_file:
        raise RuntimeError(f"rank {rank} imported DeepSpeed from {deepspeed.__file__}, pytest from {deepspeed_file}: "
                           "start pytest in a directory, and with a PYTHONPATH, that leads both to the same one")
    with open(files.stack, "w") as stack:
        runner = _Runner(rank, stack)
        connection.send_bytes(pickle.dumps(Outcome(rank, Kind.PASSED)))
        while True:
            try:
                message = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            outcome = runner.settle(message) if isinstance(message, Settle) else runner.run(message)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(pickle.dumps(outcome))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


def _redirect_output(path: Path) -> None:
    # Appending: pytest's process empties the file between tests.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # By the line: a rank that is killed keeps what it printed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class _Runner:
    """Runs tests in this process and undoes what they left behind."""

    def __init__(self, rank: int, stack: IO[str]) -> None:
        self._rank = rank
        self._stack = stack
        forbid_shared_memory_op()
        # Python and numpy seed themselves from the clock; a rank that replaces another should not differ from it.
        random.seed(0)
        np.random.seed(0)
        self._modules = TestModules()
        self._globals = ModuleGlobals()
        self._globals.see_new_modules()
        self._group = Group(rank)
        self._settings = Settings()
        self._group_stands = False
        self._modules_frozen = 0
        self._freeze_modules()

    def run(self, task: Task) -> Outcome:
        """Runs one test; whatever it raises becomes the outcome."""
        faulthandler.enable(file=self._stack)
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True)
        faulthandler.dump_traceback_later(task.exec_timeout + _LAST_RESORT_SECONDS, exit=True, file=self._stack)
        try:
            return self._outcome_of(lambda: self._perform(task))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def settle(self, settle: Settle) -> Outcome:
        """Undoes what the last test changed; nothing of the test is referenced afterwards."""
        return self._outcome_of(lambda: self._undo(settle.keep_group))

    def _perform(self, task: Task) -> None:
        if self._group_stands and not task.meeting.standing:
            self._leave_group()
        take_over(task.surroundings)
        owner = self._find(task.target)
        self._settings = Settings()
        attributes, arguments = pickle.loads(task.values)
        test = owner()
        vars(test).update(attributes)
        test.world_size = task.meeting.world_size
        self._group.join(test, task.meeting)
        self._group_stands = True
        getattr(test, task.target.method)(**arguments)

    def _find(self, target: Target) -> Any:
        found: Any = self._modules.load(target.module, target.file)
        if not self._group_stands:
            self._globals.see_new_modules()
        for name in target.class_path:
            found = getattr(found, name)
        return found

    def _undo(self, keep_group: bool) -> None:
        if not keep_group:
            self._leave_group()
        self._settings.restore()
        # Engines are full of cycles, and the next test needs the memory.
        gc.collect()
        self._freeze_modules()
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            accelerator.empty_cache()

    def _freeze_modules(self) -> None:
        """Leaves imported modules out of later collections: with torch and DeepSpeed that is all but a few objects."""
        if len(sys.modules) != self._modules_frozen:
            gc.freeze()
            self._modules_frozen = len(sys.modules)

    def _leave_group(self) -> None:
        self._group.leave()
        self._globals.restore()
        self._group_stands = False

    def _outcome_of(self, action: Callable[[], None]) -> Outcome:
        try:
            action()
        except pytest.skip.Exception as skip:
            return Outcome(self._rank, Kind.SKIPPED, str(skip.msg), "", time.time())
        except pytest.xfail.Exception as xfail:
            return Outcome(self._rank, Kind.XFAILED, str(xfail.msg), "", time.time())
        except BaseException as error:
            kind = Kind.LOST_PEER if _lost_peer(error) else Kind.FAILED
            return Outcome(self._rank, kind, _one_line(error), _traceback_of(error), time.time())
        return Outcome(self._rank, Kind.PASSED, "", "", time.time())


def _lost_peer(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, OSError)) and _PEER_IS_GONE.search(str(error)) is not None


def _one_line(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip().split("\n")[0]


def _traceback_of(error: BaseException) -> str:
    frames: Optional[TracebackType] = error.__traceback__
    # The harness's own frames say nothing about the test; where there are no others, they are all there is.
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == _HARNESS:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
