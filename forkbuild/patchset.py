# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What patches/ holds: edits by upstream file, replaced directories, seams leaned on, the commits of the series.

    patches/<name>.py   FILE = upstream's path, EDITS = [Edit(...), ...]; <name> is module_name(FILE)
    patches/series.py   SERIES = [Commit(...), ...] in order, REPLACES = [Replace(...), ...]
    patches/leans_on.py LEANS_ON = {upstream's path: {function: why}}
"""

import fnmatch
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from forkbuild import ForkError
from forkbuild.edit import Edit

HEADER = ("why", "engine", "drop_when", "series")


@dataclass(frozen=True)
class Commit:
    """One commit of the series.

    body: paragraphs; they are filled to git's width when the series is written. files: patterns of the overlaid files
    that come with the commit; a commit that names a file as it is has it, else the first with a matching pattern.
    """
    key: str
    subject: str
    body: str
    files: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Replace:
    """A directory of upstream's that ours takes the place of: upstream's files in it go, all of them."""
    path: str
    why: str = ""
    engine: str = ""
    drop_when: str = ""
    series: str = ""

    def __str__(self) -> str:
        return f"replace {self.path}"


@dataclass(frozen=True)
class PatchSet:
    """Everything that patches/ says. `edits` keeps the order of the series, then that of the file."""
    modules: Dict[str, str]  # module name -> the upstream file it is about
    edits: Dict[str, Tuple[Edit, ...]]  # by upstream file
    replaces: Tuple[Replace, ...]
    series: Tuple[Commit, ...]
    leans_on: Dict[str, Dict[str, str]]

    def position(self, key: str) -> int:
        """Where the commit `key` stands in the series; after its end for an unknown key, which `check` reports."""
        keys = [commit.key for commit in self.series]
        return keys.index(key) if key in keys else len(keys)

    def commit_of(self, path: str) -> Optional[int]:
        """The position of the commit that an overlaid file comes with."""
        named = [position for position, commit in enumerate(self.series) if path in commit.files]
        if named:
            return named[0]
        for position, commit in enumerate(self.series):
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in commit.files):
                return position
        return None


def module_name(file: str) -> str:
    """The name of the module in patches/ that edits upstream's `file`."""
    return file[:-len(".py")].replace("__init__", "init").replace("/", "_").removeprefix("deepspeed_")


def load(folder: Path) -> PatchSet:
    """Reads patches/. Raises ForkError for a module that does not run, lacks its names, or repeats a FILE."""
    series = _run(folder / "series.py", ("SERIES", "REPLACES"))
    leans_on = _run(folder / "leans_on.py", ("LEANS_ON", ))
    edits: Dict[str, Tuple[Edit, ...]] = {}
    modules: Dict[str, str] = {}
    keys = [commit.key for commit in series["SERIES"]]
    for path in sorted(folder.glob("*.py")):
        if path.stem in ("series", "leans_on"):
            continue
        found = _run(path, ("FILE", "EDITS"))
        if found["FILE"] in edits:
            raise ForkError(f"{path}: a second module for {found['FILE']}; put its edits into one.")
        modules[path.stem] = found["FILE"]
        order = {key: position for position, key in enumerate(keys)}
        edits[found["FILE"]] = tuple(sorted(found["EDITS"], key=lambda edit: order.get(edit.series, len(order))))
    return PatchSet(modules, edits, tuple(series["REPLACES"]), tuple(series["SERIES"]), leans_on["LEANS_ON"])


def _run(path: Path, names: Tuple[str, ...]) -> Dict[str, Any]:
    try:
        found = runpy.run_path(str(path))
    except Exception as error:
        raise ForkError(f"{path} does not load: {type(error).__name__}: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ForkError(f"{path} does not set {', '.join(missing)}.")
    return found


def header_problems(patches: PatchSet) -> List[str]:
    """What is wrong with headers, names and the series, without looking at upstream."""
    problems = []
    records = [(file, edit) for file, edits in patches.edits.items() for edit in edits]
    records += [(replace.path, replace) for replace in patches.replaces]
    keys = [commit.key for commit in patches.series]
    for file, record in records:
        missing = [field for field in HEADER if not getattr(record, field).strip()]
        if missing:
            problems.append(f"{file}: {record}: the header lacks {', '.join(missing)}.")
        elif record.series not in keys:
            problems.append(f"{file}: {record}: patches/series.py has no commit {record.series!r}.")
    seen = set()
    for file, record in records:
        what = (file, str(record), getattr(record, "code", ""))
        if what in seen:
            problems.append(f"{file}: {record}: the same edit is there twice; drop one.")
        seen.add(what)
    for name, file in patches.modules.items():
        if name != module_name(file):
            problems.append(f"patches/{name}.py is about {file}; rename it to {module_name(file)}.py.")
        if not patches.edits[file]:
            problems.append(f"patches/{name}.py has no edits; delete it.")
    for commit in patches.series:
        if keys.count(commit.key) > 1 or not commit.subject.strip() or not commit.body.strip():
            problems.append(
                f"patches/series.py: the commit {commit.key!r} needs a key of its own, a subject and a body.")
    return problems
