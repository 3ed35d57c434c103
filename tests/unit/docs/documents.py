# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What README.md and the pages of docs/ say that can be tried: blocks, commands, links, messages."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("README.md", "docs/guide.md", "docs/scale.md", "docs/design.md", "docs/support.md", "examples/README.md")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its fence."""
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    return [page for page in PAGES if (ROOT / page).exists()]


def blocks(language: str) -> list[Block]:
    """All blocks of a language, on all pages."""
    found = []
    for page in pages():
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if match[1] == language:
                found.append(Block(page, text[:match.start()].count("\n") + 1, language, match[2]))
    return found


def commands(program: str) -> list[tuple[str, str]]:
    """(page, command) of the indented lines that start a program, with continued lines joined."""
    found = []
    for page in pages():
        text = (ROOT / page).read_text().replace("\\\n", " ")
        for match in re.finditer(rf"^    ({re.escape(program)} .*)$", text, re.MULTILINE):
            found.append((page, " ".join(match[1].split(" #")[0].split())))
    return found


def links(page: str) -> list[str]:
    """Where the page's links lead, without those to the web."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def messages_of_package() -> Iterator[str]:
    """Every string of the Muon package, with `...` where a value is put in and single spaces."""
    for path in sorted((ROOT / "deepspeed" / "runtime" / "zero" / "muon").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(node.value.split())
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                yield " ".join("".join(parts).split())
