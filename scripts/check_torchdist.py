# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checks that no file reaches torch.distributed other than through deepspeed.comm, which other backends replace."""

import ast
import sys
from typing import Iterator

from checklib import Violation, is_under, references, run


def check(path: str, text: str) -> Iterator[Violation]:
    for reference in references(path, ast.parse(text)):
        if is_under(reference.name, "torch.distributed"):
            yield Violation(reference.line, f"{reference.name} is used directly; use `import deepspeed.comm as dist`")


if __name__ == "__main__":
    sys.exit(run(check))
