# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One rank as pytest's process sees it: a process, a connection to it and the two files it writes."""

import os
import pickle
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import List, Union

import psutil

import deepspeed
from unit.ranks.messages import Kind, Outcome, Settle, Task
from unit.ranks.process import RankFiles, serve

_HARNESS = str(Path(__file__).parent)
_STACK_SECONDS = 2.0
_SHOWN_OUTPUT_BYTES = 64 * 1024


class RankProcess:
    """Starts with its construction; ``outcome`` for the first time says whether it is ready."""

    def __init__(self, rank: int, context: BaseContext, directory: Path) -> None:
        self.rank = rank
        self._files = RankFiles(directory / f"rank{rank}.output", directory / f"rank{rank}.stack")
        self._files.output.write_bytes(b"")
        self._files.stack.write_bytes(b"")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(rank, theirs, self._files, deepspeed.__file__),
            name=f"rank{rank}")
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def threads(self) -> int:
        """Threads of the process, 0 where it has ended."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).num_threads()
        return 0

    @property
    def handles(self) -> List[Union[Connection, int]]:
        """What becomes ready when there is an outcome: the connection, and the sentinel of the process's death. Both,
        because a child of the rank that outlives it can hold the connection open."""
        return [self._connection, self._process.sentinel]

    def send(self, message: Union[Task, Settle]) -> None:
        """Sends to the rank. To one that is dead it does nothing: ``outcome`` will tell."""
        if isinstance(message, Task):
            os.truncate(self._files.output, 0)
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(message))

    def outcome(self, seconds: float = 0.0) -> Outcome:
        """The next outcome, waiting for it at most ``seconds``; of kind DIED or STUCK when there is none."""
        if not wait(self.handles, timeout=seconds):
            return self.stuck(f"did not answer within {seconds:.0f} s")
        try:
            # The connection first: a rank can have reported before it died.
            if self._connection.poll():
                return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            pass
        return self._died()

    def stuck(self, reason: str) -> Outcome:
        """The outcome of a rank that did not report: ``reason`` and where it is now, in all its threads."""
        stack = self.stack() or "(it gave no stack within {:.0f} s)\n".format(_STACK_SECONDS)
        return Outcome(self.rank, Kind.STUCK, reason, stack, time.time())

    def stack(self) -> str:
        """The Python stack of the running rank, also while it waits in a collective; empty when it gives none."""
        os.truncate(self._files.stack, 0)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline, length = time.monotonic() + _STACK_SECONDS, 0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            written = self._files.stack.stat().st_size
            if written and written == length:
                break
            length = written
        return self._read_stack()

    def output(self) -> str:
        """What the rank has printed since its last task, at most the last 64 KiB."""
        written = self._files.output.read_bytes()
        text = written[-_SHOWN_OUTPUT_BYTES:].decode(errors="replace")
        return text if len(written) <= _SHOWN_OUTPUT_BYTES else f"... (of {len(written)} bytes)\n{text}"

    def abandon(self) -> None:
        """Ends the process and its children, without waiting for it to be gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # Before it has become the leader of a session there is no such group.
        self._process.kill()

    def kill(self) -> None:
        """Ends the process and its children and closes the connection; it is gone when this returns."""
        self.abandon()
        self._process.join()
        self._process.close()
        self._connection.close()

    def _died(self) -> Outcome:
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            reason = f"killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            reason = f"exited with code {code}"
        return Outcome(self.rank, Kind.DIED, reason, self._read_stack(), time.time())

    def _read_stack(self) -> str:
        """The stacks of all threads, innermost call first, without our own calls and our own thread."""
        kept = []
        for thread in self._files.stack.read_text(errors="replace").split("\n\n"):
            lines = thread.splitlines()
            outer = next((index for index, line in enumerate(lines) if _HARNESS in line), len(lines))
            if not any("in _end_with_parent" in line for line in lines):
                kept.append("\n".join(lines[:outer]))
        return "\n\n".join(filter(None, kept)) + ("\n" if any(kept) else "")
