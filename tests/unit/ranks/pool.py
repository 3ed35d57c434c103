# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ranks of one pytest process: started when first needed, reused by every test, replaced after a failure."""

import atexit
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from unit.ranks.handle import RankProcess
from unit.ranks.messages import Kind, Meeting, Outcome, Settle, Surroundings, Target, Task

START_SECONDS = 180.0
SETTLE_SECONDS = 30.0
# After the first failure the other ranks can still report their own; then they are stopped.
GRACE_SECONDS = 5.0
# A rank with more threads is replaced before the next test. What is left behind by an engine that nothing can collect
# (DeepSpeed's ZeRO-3 after two steps) includes its process groups, with three threads and four sockets each.
MOST_THREADS = 150

_PRELOADED = ["torch", "numpy", "pytest", "deepspeed"]
_GOOD = (Kind.PASSED, Kind.SKIPPED, Kind.XFAILED)


@dataclass(frozen=True)
class Job:
    """One test on ``world_size`` ranks. ``values`` as in Task.

    ``group_kind`` names what distinguishes process groups of one world size; two jobs in a row with ``reuse_group``
    and the same kind run in the same group.
    """
    target: Target
    values: bytes
    world_size: int
    exec_timeout: float
    master_port: str
    reuse_group: bool
    group_kind: Tuple[object, ...]


@dataclass(frozen=True)
class _Standing:
    """The process group that the last test left, who is in it and where they met."""
    kind: Tuple[object, ...]
    pids: Tuple[int, ...]
    meeting: Meeting


class RankPool:
    """Ranks 0, 1, ... as processes; a test of world size W uses the first W, the others wait.

    ``accelerator`` is a DeepSpeed accelerator's name. For "cpu" the ranks are forked from a server that has imported
    torch and DeepSpeed, so that a rank costs milliseconds; others start anew, because a device does not survive a
    fork.
    """

    def __init__(self, accelerator: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._ranks: Dict[int, RankProcess] = {}
        self._standing: Optional[_Standing] = None
        self._stores = 0
        self._environ = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": accelerator}
        self._context = multiprocessing.get_context("forkserver" if accelerator == "cpu" else "spawn")
        if accelerator == "cpu":
            self._context.set_forkserver_preload(_PRELOADED)
        atexit.register(self.close)

    def run(self, job: Job) -> List[Outcome]:
        """Runs one test on every rank and returns one outcome of each: how the test ended, or that tidying up failed.

        When ranks do not start, the outcomes are those of these ranks only.

        Never raises for what a rank does. When anything else interrupts it (Ctrl-C, a timeout plugin) the ranks are
        stopped and their stacks printed before the interrupt goes on.
        """
        late = self._start(job.world_size)
        if late:
            return late
        ranks = [self._ranks[number] for number in range(job.world_size)]
        try:
            outcomes = self._exchange(job, ranks)
        except BaseException:
            for rank in ranks:
                print(f"rank {rank.rank} was interrupted here:\n{rank.stack()}")
            self._drop(ranks)
            raise
        finally:
            for path in self._directory.glob("store*"):
                path.unlink(missing_ok=True)
        return outcomes

    def close(self) -> None:
        """Ends all ranks; can be called again."""
        atexit.unregister(self.close)
        self._drop(list(self._ranks.values()))
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, world_size: int) -> List[Outcome]:
        self._drop([rank for rank in self._ranks.values() if not rank.alive or rank.threads > MOST_THREADS])
        missing = [number for number in range(world_size) if number not in self._ranks]
        with _environment({**self._environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
            for number in missing:
                self._ranks[number] = RankProcess(number, self._context, self._directory)
        started = {number: self._ranks[number].outcome(START_SECONDS) for number in missing}
        late = [outcome for outcome in started.values() if outcome.kind is not Kind.PASSED]
        for outcome in late:
            print(f"rank {outcome.rank} did not start:\n{self._ranks[outcome.rank].output()}")
        self._drop([self._ranks[outcome.rank] for outcome in late])
        return late

    def _exchange(self, job: Job, ranks: Sequence[RankProcess]) -> List[Outcome]:
        meeting = self._meeting(job, ranks)
        surroundings = Surroundings({**os.environ, **self._environ}, tuple(sys.path), os.getcwd())
        for rank in ranks:
            rank.send(Task(job.target, surroundings, meeting, job.values, job.exec_timeout))
        outcomes = _collect(ranks, job.exec_timeout)
        _show_output(ranks)
        if not all(outcome.kind in _GOOD for outcome in outcomes):
            self._drop(ranks)
            return outcomes
        keep = job.reuse_group and all(outcome.kind is Kind.PASSED for outcome in outcomes)
        self._standing = _Standing(job.group_kind, tuple(rank.pid for rank in ranks), meeting) if keep else None
        untidy = {outcome.rank: outcome for outcome in self._settle(ranks, keep)}
        return [untidy.get(outcome.rank, outcome) for outcome in outcomes]

    def _meeting(self, job: Job, ranks: Sequence[RankProcess]) -> Meeting:
        standing = self._standing
        if (standing is not None and job.reuse_group and standing.kind == job.group_kind
                and standing.pids == tuple(rank.pid for rank in ranks)):
            return Meeting(job.world_size, standing.meeting.init_method, standing.meeting.master_port, standing=True)
        self._stores += 1
        store = self._directory / f"store{self._stores}"
        return Meeting(job.world_size, f"file://{store}", job.master_port, standing=False)

    def _settle(self, ranks: Sequence[RankProcess], keep: bool) -> List[Outcome]:
        for rank in ranks:
            rank.send(Settle(keep_group=keep))
        replies = [(rank, rank.outcome(SETTLE_SECONDS)) for rank in ranks]
        bad = [(rank, reply) for rank, reply in replies if reply.kind is not Kind.PASSED]
        self._drop([rank for rank, _ in bad])
        return [replace(reply, summary=f"while tidying up after the test: {reply.summary}") for _, reply in bad]

    def _drop(self, ranks: Sequence[RankProcess]) -> None:
        """Kills ranks; the next test that needs them starts others in their place."""
        if ranks:
            self._standing = None
        for rank in ranks:
            if self._ranks.pop(rank.rank, None) is not None:
                rank.kill()


def _collect(ranks: Sequence[RankProcess], exec_timeout: float) -> List[Outcome]:
    """One outcome of each rank, by rank. Reads all that is there to read before it gives up on a rank."""
    deadline = time.monotonic() + exec_timeout
    why = f"did not finish within {exec_timeout:.0f} s (exec_timeout)"
    pending, outcomes = list(ranks), []
    while pending:
        ready = wait([handle for rank in pending for handle in rank.handles],
                     timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank in pending if any(handle in ready for handle in rank.handles)]:
            outcome = rank.outcome()
            outcomes.append(outcome)
            pending.remove(rank)
            if outcome.kind is not Kind.PASSED:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                why = f"did not finish within {GRACE_SECONDS:.0f} s after another rank had ended"
            if outcome.kind not in _GOOD:
                # Its connections close with it: a peer that waits for it in a collective gets an error, not a hang.
                rank.abandon()
    outcomes.extend(rank.stuck(why) for rank in pending)
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _show_output(ranks: Sequence[RankProcess]) -> None:
    """Prints what the ranks printed: pytest captures it and shows it with a failure, as for any other test."""
    for rank in ranks:
        text = rank.output()
        if text:
            print(f"--- rank {rank.rank} ---\n{text}", end="" if text.endswith("\n") else "\n")


@contextmanager
def _environment(variables: Dict[str, str]) -> Iterator[None]:
    """Sets environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
