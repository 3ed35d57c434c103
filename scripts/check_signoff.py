# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checks that each commit message named on the command line (as a file) is signed off, as DeepSpeed asks: the line
`Signed-off-by: Name <address>` says that the author may contribute the change (developercertificate.org)."""

import re
import sys
from typing import Iterator

from checklib import Violation, run

# What stands below this line, written by `git commit --verbose`, is no part of the message.
SCISSORS = "# ------------------------ >8 ------------------------"
SIGNED_OFF = re.compile(r"^Signed-off-by: \S.* <[^<>\s@]+@[^<>\s@]+>$", re.MULTILINE)


def check(path: str, text: str) -> Iterator[Violation]:
    message = text.split(SCISSORS)[0]
    if not SIGNED_OFF.search(message):
        yield Violation(1, "no line `Signed-off-by: Name <address>` in the message; commit with `git commit -s`")


if __name__ == "__main__":
    sys.exit(run(check))
