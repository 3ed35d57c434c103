# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checks that the files of the Muon package named on the command line do not lean on DeepSpeed's private names, except
in the adapters: what DeepSpeed may change without notice is to be found in few places.

Types are not known here, so the rule is: an attribute with a leading underscore is used on `self` or `cls`, or is
defined somewhere in the same file, or belongs to a module other than deepspeed's (torch._foreach_add_).
"""

import ast
import sys
from pathlib import PurePath
from typing import Iterator, Optional, Set, Tuple

from checklib import Violation, bound_names, is_under, references, resolve, run

OWN_PACKAGE = "deepspeed.runtime.zero.muon"
ADAPTERS = ("engines.py", "checkpoint.py", "checkpoint_check.py")
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def check(path: str, text: str) -> Iterator[Violation]:
    if PurePath(path).name in ADAPTERS:
        return
    tree = ast.parse(text)
    for reference in references(path, tree):
        upstream = is_under(reference.name, "deepspeed") and not is_under(reference.name, OWN_PACKAGE)
        if upstream and any(_is_private(part) for part in reference.name.split(".")):
            yield _violation(reference.line, reference.name)
    names = bound_names(path, tree)
    defined = _defined_names(tree)
    for node in ast.walk(tree):
        owner, name = _attribute(node)
        # What an imported name leads to was judged above, by the module that it comes from.
        if owner and _is_private(name) and name not in defined and not resolve(owner, names):
            yield _violation(node.lineno, name)


def _violation(line: int, name: str) -> Violation:
    return Violation(line, f"{name} is private to DeepSpeed; read it in {ADAPTERS[0]} and pass the value on")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _attribute(node: ast.AST) -> Tuple[Optional[ast.expr], str]:
    """The object and the attribute's name, where `node` takes an attribute of something other than self and cls."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return (None if own else node.value), node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        literal = node.args[1] if len(node.args) > 1 else None
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
            return node.args[0], literal.value
    return None, ""


def _defined_names(tree: ast.AST) -> Set[str]:
    """Names that this file defines: functions, methods, classes, variables, fields, and attributes set on self."""
    defined = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                defined.add(node.attr)
    return defined


if __name__ == "__main__":
    sys.exit(run(check))
