# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checks that no file names CUDA; DeepSpeed's accelerator stands for whatever device the machine has."""

import ast
import sys
from typing import Iterator

from checklib import Violation, is_under, references, run

INSTEAD = "use deepspeed.accelerator.get_accelerator()"
# DeepSpeed's mark for a line that is about CUDA and nothing else.
ALLOWED = "ignore-cuda"


def check(path: str, text: str) -> Iterator[Violation]:
    lines = text.splitlines()
    return (found for found in _violations(path, ast.parse(text)) if ALLOWED not in lines[found.line - 1])


def _violations(path: str, tree: ast.AST) -> Iterator[Violation]:
    for reference in references(path, tree):
        if is_under(reference.name, "torch.cuda"):
            yield Violation(reference.line, f"{reference.name} is used directly; {INSTEAD}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield Violation(node.lineno, f"a .cuda() call; {INSTEAD}.device_name() with .to()")


if __name__ == "__main__":
    sys.exit(run(check))
