# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Structural edits of one Python source text, anchored on names and statements instead of line numbers.

An edit names a scope (`Class.method`, nested functions too, "" for the module) and inside it an anchor: one statement
written out, or an ast-grep pattern of one. A compound statement or clause is named by its header, `for $I in $X:` or
`elif ready:`. The scope of an edit excludes functions and classes nested in it; they have names of their own. Comments
and layout of the source never matter for a match. Each edit has to match exactly once; else EditError says what was
found instead.
"""

import ast
import difflib
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Dict, List, Sequence, Tuple

from ast_grep_py import SgNode

from forkbuild import ForkError
from forkbuild.syntax import (DEFINITIONS, body_of, definitions, direct, header_matches, is_statement, matches, parse,
                              strict, walk)


class EditError(ForkError):
    """An edit does not fit its file. Names the file, the scope, the anchor and what was found instead."""


@dataclass(frozen=True)
class Edit:
    """One change of one upstream file. `check` demands the last four fields, the edit's header, for every edit.

    op: a name of OPS. scope: dotted name, "" for the module. anchor: statement, header or pattern inside the scope.
    within: header of a compound statement or clause of the scope, whose body then is all that is searched. In
    "for x in y: > else: > if x:" each further header stands directly in the body of the one before, where headers that
    are alike lie at different depths. code: what comes in, at any indentation. why, engine, drop_when: for the reader.
    series: key of a commit in patches/series.py.
    """
    op: str
    scope: str = ""
    anchor: str = ""
    code: str = ""
    within: str = ""
    why: str = ""
    engine: str = ""
    drop_when: str = ""
    series: str = ""

    def __str__(self) -> str:
        parts = [f"{self.op} in {self.scope or 'the module'}"]
        parts += [f"within `{self.within}`"] if self.within else []
        parts += [f"at `{self.anchor}`"] if self.anchor else []
        return ", ".join(parts)


def apply_edit(file: str, text: str, edit: Edit) -> str:
    """`text` of upstream's `file` with one edit made. Raises EditError, also where the result is no valid Python."""
    return _valid(file, edit, _apply(file, text, edit))


def apply_edits(file: str, text: str, edits: Sequence[Edit]) -> str:
    """`text` with several edits made in order. Raises EditError for the first that does not fit."""
    result = text
    for edit in edits:
        result = _apply(file, result, edit)
    try:
        ast.parse(result)  # once, for it takes longer than the edits; the search for the culprit is the rare case
    except SyntaxError:
        for edit in edits:
            text = apply_edit(file, text, edit)
    return result


@lru_cache(maxsize=None)  # the series, one commit after the other, makes the same edits of the same texts again
def _apply(file: str, text: str, edit: Edit) -> str:
    if edit.op not in OPS:
        raise EditError(f"{file}: no operation {edit.op!r}; there are {', '.join(OPS)}.")
    operation, needs = OPS[edit.op]
    for field in ("anchor", "code"):
        if bool(getattr(edit, field)) != (field in needs) and not (field == "code" and edit.op == "replace_import"):
            raise EditError(f"{file}: {edit}: {edit.op} {'needs' if field in needs else 'takes no'} {field}.")
    return operation(_Source(file, text, edit))


def _valid(file: str, edit: Edit, text: str) -> str:
    try:
        ast.parse(text)
    except SyntaxError as error:
        message = f"{file}: {edit}: the result is no valid Python at line {error.lineno}: {error.msg}."
        raise EditError(message) from None
    return text


class _Source:
    """One source text, and what one edit finds in it."""

    def __init__(self, file: str, text: str, edit: Edit) -> None:
        self.file, self.text, self.edit = file, text, edit
        self.root = parse(text)

    def fail(self, message: str) -> EditError:
        return EditError(f"{self.file}: {self.edit}: {message}")

    def line(self, node: SgNode) -> str:
        return f"line {node.range().start.line + 1}: {node.text().splitlines()[0]}"

    def only(self, matches: List[SgNode], candidates: List[SgNode], wanted: str, what: str) -> SgNode:
        """The one match, else EditError that lists the matches, or the candidates nearest to `wanted`."""
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise self.fail(f"{len(matches)} matches instead of 1 for the {what} `{wanted}`: lines "
                            f"{', '.join(str(node.range().start.line + 1) for node in matches)}.")
        first_line = wanted.strip().splitlines()[0]
        ranked = sorted(candidates, reverse=True, key=lambda node: _likeness(first_line, node))
        nearest = "; ".join(self.line(node) for node in ranked[:3]) or "there is none"
        raise self.fail(f"no match for the {what} `{wanted}`; nearest there: {nearest}.")

    def definition(self) -> SgNode:
        """The function or class that the edit's scope names."""
        known, name = definitions(self.root), self.edit.scope
        near = [] if name in known else difflib.get_close_matches(name, known, n=3, cutoff=0)
        return self.only(known.get(name, []), [known[other][0] for other in near], name, "scope")

    def region(self) -> SgNode:
        """The block, or the module, that the edit searches."""
        region = body_of(self.definition()) if self.edit.scope else self.root
        for depth, header in enumerate(filter(None, self.edit.within.split(" > "))):
            compound = [node for node in (direct(region) if depth else walk(region)) if body_of(node) is not None]
            found = [node for node in compound if header_matches(node, header)]
            region = body_of(self.only(found, compound, header, "header"))
        return region

    def statement(self) -> SgNode:
        """The one statement that the anchor names."""
        candidates, anchor = [node for node in walk(self.region()) if is_statement(node)], self.edit.anchor
        if anchor.rstrip().endswith(":"):
            found = [node for node in candidates if header_matches(node, anchor)]
        else:
            self.parsed(anchor)
            found = [node for node in candidates if matches(node, anchor)]
        return self.only(found, candidates, anchor, "anchor")

    def parsed(self, anchor: str) -> SgNode:
        """The anchor as a syntax tree, with names in the place of metavariables."""
        root = parse(anchor.strip().replace("$", "_"))
        if root.find(kind="ERROR") or len(root.named_children()) != 1:
            raise self.fail(f"the anchor `{anchor}` is not one Python statement, expression, or header ending in ':'.")
        return root.child(0)

    def span(self, node: SgNode) -> Tuple[int, int]:
        """From the start of the node's first line to the start of the line after it, with the comments above it."""
        if node.parent() is not None and node.parent().kind() == "decorated_definition":
            node = node.parent()
        start = self.text.rfind("\n", 0, node.range().start.index) + 1
        end = self.text.find("\n", node.range().end.index) + 1 or len(self.text)
        rest = self.text[node.range().end.index:end].strip()
        if self.text[start:node.range().start.index].strip() or (rest and not rest.startswith("#")):
            raise self.fail(f"the statement shares its line with other code ({self.line(node)}).")
        indent = self.text[start:node.range().start.index]
        while start > 0:
            above = self.text.rfind("\n", 0, start - 1) + 1
            line = self.text[above:start]
            if not line.startswith(indent + "#"):
                return start, end
            start = above
        return self.text.rfind("\n", 0, node.range().start.index) + 1, end  # these comments are the file's header

    def indented(self, node: SgNode) -> str:
        """The edit's code at the indentation of `node`, ending in a newline."""
        code = textwrap.dedent(self.edit.code).strip("\n") + "\n"
        return textwrap.indent(code, " " * node.range().start.column)

    def without(self, node: SgNode) -> str:
        """The text without the node, and without the blank lines above it where it leaves two gaps or a loose end."""
        start, end = self.span(node)
        before, after = self.text[:start], self.text[end:]
        indent, following = " " * node.range().start.column, after.split("\n", 1)[0]
        is_definition = node.kind() in (*DEFINITIONS, "decorated_definition")
        if is_definition or not following.strip() or not following.startswith(indent):
            before = before.rstrip("\n") + "\n" if before.strip() else ""
        return before + after


def _likeness(wanted: str, node: SgNode) -> float:
    return difflib.SequenceMatcher(None, wanted, node.text().splitlines()[0]).ratio()


def _remove_definition(source: _Source) -> str:
    return source.without(source.definition())


def _remove(source: _Source) -> str:
    return source.without(source.statement())


def _replace(source: _Source) -> str:
    node = source.statement()
    start, end = source.span(node)
    return source.text[:start] + source.indented(node) + source.text[end:]


def _insert_before(source: _Source) -> str:
    node = source.statement()
    start, _ = source.span(node)
    return source.text[:start] + source.indented(node) + source.text[start:]


def _insert_after(source: _Source) -> str:
    node = source.statement()
    _, end = source.span(node)
    return source.text[:end] + source.indented(node) + source.text[end:]


def _prepend(source: _Source) -> str:
    """Code as the first statement of the scope, or of the clause named by `within`, after a docstring."""
    statements = [child for child in source.region().children() if child.kind() != "comment"]
    first = statements[0]
    docstring = first.kind() == "expression_statement" and first.child(0).kind() == "string"
    if docstring and not source.edit.within:
        _, at = source.span(first)
    else:
        at, _ = source.span(first)
    return source.text[:at] + source.indented(first) + source.text[at:]


def _append(source: _Source) -> str:
    """Code after the last statement of the scope, or of the clause named by `within`."""
    last = [child for child in source.region().children() if child.kind() != "comment"][-1]
    _, end = source.span(last)
    starts_definition = source.edit.code.lstrip().startswith(("def ", "async def ", "class ", "@"))
    gap = "\n" * (1 if source.edit.scope else 2) if starts_definition else ""
    return source.text[:end] + gap + source.indented(last) + source.text[end:]


def _replace_expression(source: _Source) -> str:
    """The one expression that the anchor names becomes `code`, in which $A and $$$A stand for what they matched."""
    anchor, region = source.edit.anchor, source.region()
    source.parsed(anchor)
    own = {(node.range().start.index, node.range().end.index) for node in walk(region)}
    found = [node for node in region.find_all(pattern=strict(anchor)) if _nearest(node) in own]
    found = [node for node in found if node.kind() not in ("expression_statement", "module")]
    node = source.only(found, [node for node in walk(region) if is_statement(node)], anchor, "anchor")
    code = textwrap.dedent(source.edit.code).strip()
    for name in sorted(_metavariables(source.edit.code), key=len, reverse=True):
        if name.startswith("$$$"):
            parts = node.get_multiple_matches(name[3:])
            bounds = (parts[0].range().start.index, parts[-1].range().end.index) if parts else (0, 0)
            code = code.replace(name, source.text[bounds[0]:bounds[1]])
        else:
            matched = node.get_match(name[1:])
            code = code.replace(name, matched.text() if matched else name)
    return source.text[:node.range().start.index] + code + source.text[node.range().end.index:]


def _nearest(node: SgNode) -> Tuple[int, int]:
    """Where the innermost statement that holds an expression lies."""
    while node.parent() is not None and node.parent().kind() not in ("block", "module"):
        node = node.parent()
    return node.range().start.index, node.range().end.index


def _metavariables(anchor: str) -> List[str]:
    words = "".join(c if c.isalnum() or c in "$_" else " " for c in anchor).split()
    return [word for word in words if word.startswith("$") and word.strip("$")]


def _replace_import(source: _Source) -> str:
    """Drops the one name that the anchor imports (`from a.b import c`, `import a.b`); `code`, if any, comes in there.

    Other names of the same statement stay.
    """
    wanted = source.parsed(source.edit.anchor)
    module, (name, ) = _imported(wanted)
    candidates = [node for node in walk(source.region()) if node.kind() == wanted.kind()]
    found = [node for node in candidates if _imported(node)[0] == module and name in _imported(node)[1]]
    node = source.only(found, candidates, source.edit.anchor, "import")
    code = source.indented(node) if source.edit.code else ""
    names = node.field_children("name")
    start, end = source.span(node)
    if len(names) == 1:
        return source.text[:start] + code + source.text[end:] if code else source.without(node)
    index = _imported(node)[1].index(name)
    if index + 1 < len(names):
        cut = names[index].range().start.index, names[index + 1].range().start.index
    else:
        cut = names[index - 1].range().end.index, names[index].range().end.index
    return source.text[:cut[0]] + source.text[cut[1]:end] + code + source.text[end:]


def _imported(node: SgNode) -> Tuple[str, List[str]]:
    module = node.field("module_name")
    return module.text() if module else "", [" ".join(name.text().split()) for name in node.field_children("name")]


OPS: Dict[str, Tuple[Callable[[_Source], str], Tuple[str, ...]]] = {
    "remove_definition": (_remove_definition, ()),
    "remove": (_remove, ("anchor", )),
    "replace": (_replace, ("anchor", "code")),
    "insert_before": (_insert_before, ("anchor", "code")),
    "insert_after": (_insert_after, ("anchor", "code")),
    "prepend": (_prepend, ("code", )),
    "append": (_append, ("code", )),
    "replace_expression": (_replace_expression, ("anchor", "code")),
    "replace_import": (_replace_import, ("anchor", )),
}
