# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the check_*.py scripts share: the loop over files, and what each name in a Python file stands for.

The checks work on the syntax tree, because a search for text misses `from torch import distributed as d` and finds
`torch.distributed` in comments.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple


@dataclass(frozen=True)
class Violation:
    """One finding: `line` counts from 1, `message` says what was found and what to do."""

    line: int
    message: str


@dataclass(frozen=True)
class Reference:
    """A use of the dotted name `name` on `line`, with every alias and relative import resolved."""

    line: int
    name: str


Check = Callable[[str, str], Iterable[Violation]]


def run(check: Check, paths: Optional[Sequence[str]] = None) -> int:
    """Applies check(path, text) to the files named on the command line (or in `paths`), prints each violation as
    `path:line: message`, and returns 1 if there was one, else 0."""
    found = 0
    for path in sys.argv[1:] if paths is None else paths:
        text = Path(path).read_text(encoding="utf-8")
        try:
            violations = list(check(path, text))
        except SyntaxError as error:
            violations = [Violation(error.lineno or 1, f"cannot be parsed: {error.msg}")]
        for violation in violations:
            print(f"{path}:{violation.line}: {violation.message}")
        found += len(violations)
    return 1 if found else 0


def is_under(name: str, module: str) -> bool:
    """Whether the dotted `name` is `module` or lies inside it."""
    return name == module or name.startswith(module + ".")


def references(path: str, tree: ast.AST) -> List[Reference]:
    """All uses of imported names in `tree`, the syntax tree of the file at `path` (relative to the repository).

    Reported are: imports, attribute chains that start at an imported name or at a plain alias of one, and modules or
    attributes named by a literal in import_module, __import__ or getattr. Names are taken to mean the same in the
    whole file; a local variable that shadows an import is therefore reported too.
    """
    collector = _Collector(path, bound_names(path, tree))
    collector.visit(tree)
    return collector.found


def bound_names(path: str, tree: ast.AST) -> Dict[str, str]:
    """The dotted name behind each local name that an import, or an assignment of an imported name, makes."""
    names: Dict[str, str] = {}
    for node in ast.walk(tree):
        names.update(_imported(path, node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            aliased = resolve(node.value, names)
            if aliased:
                names[node.targets[0].id] = aliased
    return names


def resolve(node: ast.AST, names: Dict[str, str]) -> Optional[str]:
    """The dotted name that a Name or Attribute chain stands for, or None where its root was not imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        root = resolve(node.value, names)
        return f"{root}.{node.attr}" if root else None
    return None


def _imported(path: str, node: ast.AST) -> Iterator[Tuple[str, str]]:
    """Pairs (local name, dotted name) that an import statement binds."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            # `import a.b` binds `a`; `import a.b as c` binds a.b.
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0], ) * 2
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, f"{_source_module(path, node)}.{alias.name}"


def _source_module(path: str, node: ast.ImportFrom) -> str:
    """The absolute module that a `from … import` takes its names from."""
    if not node.level:
        return node.module or ""
    package = PurePosixPath(path).parts[:-node.level]
    return ".".join(package + ((node.module, ) if node.module else ()))


class _Collector(ast.NodeVisitor):

    def __init__(self, path: str, names: Dict[str, str]) -> None:
        self.path = path
        self.names = names
        self.found: List[Reference] = []

    def _report(self, node: ast.AST, name: str) -> None:
        self.found.append(Reference(node.lineno, name))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._report(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for _, name in _imported(self.path, node):
            self._report(node, name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = resolve(node, self.names)
        if name:
            # Reported once for the whole chain, so there is no descent into its shorter prefixes.
            self._report(node, name)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        literals = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if literals and function in ("import_module", "__import__"):
            self._report(node, literals[0])
        elif literals and function == "getattr":
            owner = resolve(node.args[0], self.names)
            if owner:
                self._report(node, f"{owner}.{literals[0]}")
        self.generic_visit(node)
