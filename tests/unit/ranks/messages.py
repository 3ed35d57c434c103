# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What pytest's process and a rank say to each other. Everything is plain data that pickles.

A test is one exchange: ``Task`` to each rank, ``Outcome`` from each; then ``Settle`` to each rank that stays and an
``Outcome`` back, that of tidying up. No rank settles before all have reported or one has failed, so that a rank which
is done never closes its connections under one that is still talking to it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Dict, Tuple


class Kind(Enum):
    """How a test ended on one rank. The last two are seen by pytest's process, the others are told by the rank."""
    PASSED = "passed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    FAILED = "failed"
    LOST_PEER = "lost its peer"
    DIED = "died"
    STUCK = "stuck"


@dataclass(frozen=True)
class Target:
    """A method to run: where pytest found its class, in terms that another process can follow.

    ``module`` is the module's name in pytest's process, ``file`` its source; ``class_path`` are the names that lead
    from the module to the class.
    """
    module: str
    file: str
    class_path: Tuple[str, ...]
    method: str


@dataclass(frozen=True)
class Surroundings:
    """The state of pytest's process that a rank takes over for one test, as a process started now would."""
    environ: Dict[str, str]
    sys_path: Tuple[str, ...]
    directory: str


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one process group meet. ``standing``: the group exists already and is used as it is."""
    world_size: int
    init_method: str
    master_port: str
    standing: bool


@dataclass(frozen=True)
class Task:
    """One test. ``values`` is a pickle of (attributes of the test object, arguments of the method): it is opened only
    after the test's module is loaded, because its classes may be defined there."""
    target: Target
    surroundings: Surroundings
    meeting: Meeting
    values: bytes
    exec_timeout: float


@dataclass(frozen=True)
class Settle:
    """Tidy up after a test; with ``keep_group`` the process group and DeepSpeed's state stay as they are."""
    keep_group: bool


@dataclass(frozen=True)
class Outcome:
    """How a test, or the tidying after it, ended on one rank.

    ``summary`` is one line, or the reason of a skip; ``details`` a traceback or a stack, or empty. ``seconds`` is the
    time of the event on the clock that all processes of the machine share (time.time), to put first causes first.
    """
    rank: int
    kind: Kind
    summary: str = ""
    details: str = ""
    seconds: float = 0.0
