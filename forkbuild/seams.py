# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""seams.lock: a digest of the syntax tree of each upstream function that an edit touches or an adapter leans on.

The digest is over tokens, so comments, layout and the Python version do not change it. An edit anchored in a class
body or a module is checked by its anchor alone: a digest of so much text would change with every release.
"""

import hashlib
import json
from pathlib import Path
from typing import Dict, List

from ast_grep_py import SgNode

from forkbuild import ForkError
from forkbuild.patchset import PatchSet
from forkbuild.pin import Files
from forkbuild.syntax import definitions, parse, tokens

Seams = Dict[str, Dict[str, str]]  # upstream file -> dotted name -> digest
REMEDY = "run `python -m forkbuild refresh VERSION` to see the change, adapt patches/, then `python -m forkbuild lock`"


def digest(node: SgNode) -> str:
    """128 bits, as 32 hexadecimal digits, over the node's tokens."""
    return hashlib.sha256("\0".join(tokens(node)).encode()).hexdigest()[:32]


def seam_nodes(text: str, patches: PatchSet, file: str) -> Dict[str, List[SgNode]]:
    """The seam functions of one upstream file by dotted name. A name that the file lacks has an empty list."""
    known = definitions(parse(text))
    names = set(patches.leans_on.get(file, ()))
    for edit in patches.edits.get(file, ()):
        in_class = any(node.kind() == "class_definition" for node in known.get(edit.scope, []))
        if edit.scope and (edit.op == "remove_definition" or not in_class):
            names.add(edit.scope)
    return {name: known.get(name, []) for name in sorted(names)}


def seams_of(release: Files, patches: PatchSet) -> Seams:
    """The seams as `release` has them; a digest is "" where the function is not there, or several have its name."""
    seams: Seams = {}
    for file in sorted({*patches.edits, *patches.leans_on}):
        text = release[file].data.decode() if file in release else ""
        found = {
            name: digest(nodes[0]) if len(nodes) == 1 else ""
            for name, nodes in seam_nodes(text, patches, file).items()
        }
        if found:
            seams[file] = found
    return seams


def read_lock(path: Path) -> Seams:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ForkError(f"{path} cannot be read ({error}); write it with `python -m forkbuild lock`.") from error


def lock_text(seams: Seams) -> str:
    """What seams.lock holds. Raises ForkError for a function that the release does not define exactly once."""
    absent = [f"{file}: {name}" for file, names in seams.items() for name, found in names.items() if not found]
    if absent:
        raise ForkError(f"the pinned release does not define exactly once: {'; '.join(absent)}; correct patches/.")
    return json.dumps(seams, indent=2, sort_keys=True) + "\n"


def seam_problems(seams: Seams, lock: Seams) -> List[str]:
    """Where the release and seams.lock differ, one line per function."""
    problems = []
    for file in sorted({*seams, *lock}):
        ours, locked = seams.get(file, {}), lock.get(file, {})
        for name in sorted({*ours, *locked}):
            if name not in ours:
                problems.append(f"{file}: {name}: in seams.lock, but no edit and no LEANS_ON entry names it; run "
                                "`python -m forkbuild lock`.")
            elif name not in locked:
                problems.append(f"{file}: {name}: not in seams.lock; run `python -m forkbuild lock`.")
            elif not ours[name]:
                problems.append(f"{file}: {name}: the release does not define it exactly once; {REMEDY}.")
            elif ours[name] != locked[name]:
                problems.append(f"{file}: {name}: its code is not the one that seams.lock was made from; {REMEDY}.")
    return problems
