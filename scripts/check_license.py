# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checks that each Python file named on the command line starts with DeepSpeed's licence header."""

import sys
from typing import Iterator

from checklib import Violation, run

HEADER = ("# SPDX-License-Identifier: Apache-2.0", "", "# DeepSpeed Team")


def check(path: str, text: str) -> Iterator[Violation]:
    """The header is the first thing in the file; only a #! line may stand before it. Empty files need none."""
    lines = text.splitlines()
    start = 1 if text.startswith("#!") else 0
    if text.strip() and tuple(lines[start:start + len(HEADER)]) != HEADER:
        yield Violation(start + 1, f"no licence header; start the file with the lines {list(HEADER)}")


if __name__ == "__main__":
    sys.exit(run(check))
