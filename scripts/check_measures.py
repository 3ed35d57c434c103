# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checks the measures that keep this code readable: lengths, numbers of parameters, and typed signatures."""

import ast
import sys
from pathlib import PurePath
from typing import Iterator, List, Union

from checklib import Violation, run

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_PARAMETERS = 7

# Everything but tests and examples, where fixtures and short scripts speak for themselves.
TYPED_FOLDERS = ("deepspeed", "forkbuild", "scripts")

# Public functions whose parameters are DeepSpeed's, and not ours to put into records.
SIGNATURE_IS_GIVEN = frozenset({"muon_update"})

# A kernel's parameters are pointers and numbers of a device; it has neither records nor types.
KERNEL_DECORATORS = frozenset({"triton.jit"})

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


def check(path: str, text: str) -> Iterator[Violation]:
    top = PurePath(path).parts[0]
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES and top != "tests":
        yield Violation(1, f"{lines} lines, at most {MAX_FILE_LINES}; a longer file is two ideas")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _function(node, typed=top in TYPED_FOLDERS)


def _function(node: Function, typed: bool) -> Iterator[Violation]:
    lines = node.end_lineno - node.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield Violation(node.lineno, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}; split it")
    if any(ast.unparse(decorator) in KERNEL_DECORATORS for decorator in node.decorator_list):
        return
    parameters = _parameters(node)
    if len(parameters) > MAX_PARAMETERS and node.name not in SIGNATURE_IS_GIVEN:
        yield Violation(
            node.lineno, f"{node.name} has {len(parameters)} parameters, at most {MAX_PARAMETERS}; "
            "put what belongs together into a record")
    untyped = [parameter.arg for parameter in parameters if parameter.annotation is None]
    if node.returns is None and node.name != "__init__":
        untyped.append("what it returns")
    if typed and untyped:
        yield Violation(node.lineno, f"{node.name} has no type for: {', '.join(untyped)}")


def _parameters(node: Function) -> List[ast.arg]:
    """All parameters but the first of a method, *args and **kwargs included."""
    arguments = node.args
    found = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    found += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
    return [parameter for parameter in found if parameter.arg not in ("self", "cls")]


if __name__ == "__main__":
    sys.exit(run(check))
