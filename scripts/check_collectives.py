# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checks that the files of the Muon package named on the command line are free of collectives, except exchange.py:
that all ranks issue the same ones in the same order can be seen only where one file holds them all.

The list below says what of deepspeed.comm is local to a rank. It is a list of what is allowed, so that a collective
that a later DeepSpeed adds is refused without a change here.
"""

import ast
import sys
from pathlib import PurePath
from typing import Iterator

from checklib import Violation, is_under, references, run

LOCAL = frozenset({
    "ProcessGroup", "ReduceOp", "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank",
    "get_world_group", "get_world_size", "is_available", "is_initialized"
})
COMMUNICATION = ("deepspeed.comm", "deepspeed.runtime.comm")
HOLDER = "exchange.py"
MODULES = frozenset({"deepspeed.comm", "deepspeed.comm.comm"})


def check(path: str, text: str) -> Iterator[Violation]:
    if PurePath(path).name == HOLDER:
        return
    for reference in references(path, ast.parse(text)):
        communicates = any(is_under(reference.name, module) for module in COMMUNICATION)
        if not communicates or reference.name in MODULES or _is_local(reference.name):
            continue
        yield Violation(reference.line, f"{reference.name} is used outside {HOLDER}; add it there and call that")


def _is_local(name: str) -> bool:
    """Whether `name` is, or is an attribute of, something in LOCAL: deepspeed.comm.ReduceOp.SUM is."""
    inside = name.removeprefix("deepspeed.comm.").removeprefix("comm.").split(".")
    return is_under(name, "deepspeed.comm") and inside[0] in LOCAL


if __name__ == "__main__":
    sys.exit(run(check))
