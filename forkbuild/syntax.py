# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Questions to a syntax tree that edits and seams share: what is defined, which statements are there, what matches."""

from functools import lru_cache
from typing import Dict, Iterator, List, Optional

from ast_grep_py import SgNode, SgRoot

DEFINITIONS = ("function_definition", "class_definition")
CLAUSES = ("elif_clause", "else_clause", "except_clause", "except_group_clause", "finally_clause", "case_clause")
# Nodes whose own text is more than that of their children.
_OPAQUE = ("string_content", "format_specifier")


def parse(text: str) -> SgNode:
    return SgRoot(text, "python").root()


def definitions(root: SgNode) -> Dict[str, List[SgNode]]:
    """Functions and classes by dotted name. A name has several nodes where it is defined several times."""
    found: Dict[str, List[SgNode]] = {}
    for kind in DEFINITIONS:
        for node in root.find_all(kind=kind):
            owners = [owner for owner in reversed(node.ancestors()) if owner.kind() in DEFINITIONS]
            found.setdefault(".".join(name_of(owner) for owner in [*owners, node]), []).append(node)
    return found


def tokens(node: SgNode) -> List[str]:
    """The node's tokens, without comments and layout, with braces where blocks begin and end."""
    kind, children = node.kind(), node.children()
    if kind in ("comment", "line_continuation"):
        return []
    if kind in _OPAQUE or not children:
        return [node.text()]
    inner = [token for child in children for token in tokens(child)]
    return ["{", *inner, "}"] if kind == "block" else inner


def name_of(definition: SgNode) -> str:
    return definition.field("name").text()


def body_of(node: SgNode) -> Optional[SgNode]:
    """The first block of a definition, compound statement or clause; None for another node."""
    if node.kind() == "decorated_definition":
        node = node.field("definition")
    return next((child for child in node.children() if child.kind() == "block"), None)


def is_statement(node: SgNode) -> bool:
    return node.kind() not in CLAUSES


def walk(region: SgNode) -> Iterator[SgNode]:
    """Statements and clauses below `region`, in order, but not those of functions and classes defined there."""
    for child in region.children():
        kind = child.kind()
        if kind == "comment":
            continue
        if region.kind() in ("block", "module") or kind in CLAUSES:
            yield child
        if kind not in (*DEFINITIONS, "decorated_definition"):
            yield from walk(child)


def direct(region: SgNode) -> Iterator[SgNode]:
    """The statements of a block and their clauses, nothing of what is in their bodies."""
    for statement in region.named_children():
        yield statement
        yield from (child for child in statement.children() if child.kind() in CLAUSES)


def matches(node: SgNode, anchor: str) -> bool:
    """Whether a statement is the anchor, token by token, or fits it where the anchor has metavariables."""
    if "$" not in anchor:
        return tokens(node) == _anchor_tokens(anchor)
    node = node.child(0) if node.kind() == "expression_statement" else node
    return node.matches(pattern=strict(anchor))


@lru_cache(maxsize=None)
def _anchor_tokens(anchor: str) -> List[str]:
    return tokens(parse(anchor.strip()).child(0))


def strict(anchor: str) -> Dict[str, str]:
    # ast-grep's default strictness lets `for x in y: pass` match a loop that also has an else.
    return {"context": anchor.strip(), "strictness": "cst"}


def header_matches(node: SgNode, header: str) -> bool:
    """Whether a definition, compound statement or clause has this header; its body does not matter."""
    block = body_of(node)
    if node.kind() == "decorated_definition":
        node = node.field("definition")
    if block is None or not header.lstrip().startswith(node.child(0).text()):
        return False
    head = [child.range().end.index for child in node.children() if child.kind() == ":"]
    length = max(end for end in head if end <= block.range().start.index) - node.range().start.index
    candidate, wanted = _standalone(node.text()[:length]), _standalone(header)
    return matches(parse(candidate).child(0), wanted)


def _standalone(header: str) -> str:
    """A whole statement with this header, so that headers are compared and matched like statements."""
    header = header.strip()
    keyword = header.rstrip(":").split(None, 1)[0]
    if keyword in ("except", "finally", "except*"):
        return f"try:\n    pass\n{header}\n    pass"
    return {
        "elif": f"if _:\n    pass\n{header}\n    pass",
        "else": f"if _:\n    pass\n{header}\n    pass",
        "try": f"{header}\n    pass\nfinally:\n    pass",
        "case": f"match _:\n    {header}\n        pass",
    }.get(keyword, f"{header}\n    pass")
