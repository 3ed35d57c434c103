# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Trees: the pinned release with our files laid over it and the edits made, complete or not there at all.

A tree is put together in memory, written to a temporary folder below build/ and renamed into place. Its name has a
neighbour, <name>.inputs, with the digest of all that went into it, so that an unchanged tree is used again.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, Optional

from forkbuild import ForkError
from forkbuild.edit import apply_edits
from forkbuild.patchset import PatchSet, load
from forkbuild.pin import File, Files, Pin, obtain, read_pin, read_release
from forkbuild.seams import read_lock, seam_problems, seams_of

# Our files in these folders are laid over upstream's tree at the same path. All else, tests too, is the fork's alone.
OVERLAID = ("bin", "deepspeed", "requirements")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Project:
    """A checkout of the fork."""
    root: Path

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def pin(self) -> Pin:
        return read_pin(self.root / "UPSTREAM")

    @property
    def lock(self) -> Path:
        return self.root / "patches" / "seams.lock"

    def patches(self) -> PatchSet:
        return load(self.root / "patches")

    def release(self) -> Files:
        """The files of the pinned release; downloads it the first time."""
        return read_release(obtain(self.pin, self.build / "sdist"))

    def overlay(self) -> Files:
        """Our files that are laid over the release, by path. Hidden files and byte code are no part of it."""
        found = {}
        for top in OVERLAID:
            for path in sorted((self.root / top).rglob("*")):
                parts = path.relative_to(self.root).parts
                hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
                if path.is_file() and not hidden and path.suffix != ".pyc":
                    found["/".join(parts)] = File(path.read_bytes(), os.access(path, os.X_OK))
        return found

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds build/.lock, which the system gives back when the process dies. Raises ForkError if another has it."""
        self.build.mkdir(parents=True, exist_ok=True)
        with open(self.build / ".lock", "a+", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                holder = handle.read().strip() or "unknown"
                raise ForkError(f"another build runs in {self.root} (process {holder}); wait until it ends, "
                                "or stop it.") from None
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            for left_over in self.build.glob(_TEMPORARY + "*"):  # of a build that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            yield


def fork_files(release: Files, patches: PatchSet, overlay: Files, commits: Optional[int] = None) -> Files:
    """The tree after the first `commits` commits of the series; all of them without a number.

    Raises EditError for an edit that does not fit, ForkError for an overlaid file that would hide one of upstream's.
    """
    limit = len(patches.series) + 1 if commits is None else commits
    files = dict(release)
    for replace in patches.replaces:
        if patches.position(replace.series) < limit:
            inside = [path for path in files if path.startswith(replace.path + "/")]
            if not inside:
                raise ForkError(f"{replace}: the release has no such folder; drop the record from patches/series.py.")
            for path in inside:
                del files[path]
    for path, file in overlay.items():
        position = patches.commit_of(path)
        if position is None or position < limit:
            if path in files:
                raise ForkError(f"{path}: the release has this file too, and ours would hide it; change it with edits "
                                "in patches/, or replace its folder in patches/series.py.")
            files[path] = file
    for path, edits in patches.edits.items():
        chosen = [edit for edit in edits if patches.position(edit.series) < limit]
        if chosen and path not in files:
            raise ForkError(f"{path}: {chosen[0]}: the release has no such file; it has moved or is gone.")
        if chosen:
            text = apply_edits(path, files[path].data.decode(), chosen)
            files[path] = File(text.encode(), files[path].executable)
    return files


def prepare(project: Project) -> Path:
    """build/tree: the fork as a plain source tree, which nothing is ever built in. Call inside `exclusive()`."""
    inputs = _inputs(project)
    if _current(project, "tree") != inputs:
        release, patches = project.release(), project.patches()
        files = fork_files(release, patches, project.overlay())
        problems = seam_problems(seams_of(release, patches), read_lock(project.lock))
        if problems:
            raise ForkError("the edits apply, but upstream's code around them is not the one they were made for:\n  " +
                            "\n  ".join(problems))
        _put_in_place(project, "tree", inputs, files, {})
    return project.build / "tree"


def prepare_copy(project: Project, name: str, linked: bool = False) -> Path:
    """build/<name>: a copy of build/tree for setuptools to work in. Call inside `exclusive()`.

    With `linked` our files are links to the checkout, replaced folders as a whole, so that edits and new files in them
    count at once.
    """
    tree, inputs = prepare(project), _inputs(project)
    if _current(project, name) != inputs:
        links: Dict[str, Path] = {}
        if linked:
            folders = [replace.path for replace in project.patches().replaces]
            for path in project.overlay():
                target = next((folder for folder in folders if path.startswith(folder + "/")), path)
                links[target] = project.root / target
        _put_in_place(project, name, inputs, read_tree(tree), links)
    return project.build / name


def read_tree(tree: Path) -> Files:
    """The files below a folder, by path; links are followed."""
    paths = (path for path in sorted(tree.rglob("*")) if path.is_file())
    return {path.relative_to(tree).as_posix(): File(path.read_bytes(), os.access(path, os.X_OK)) for path in paths}


def write_tree(files: Files, folder: Path) -> None:
    """Writes files below an existing folder, over files that are there."""
    for path, file in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(0o755 if file.executable else 0o644)


def _put_in_place(project: Project, name: str, inputs: str, files: Files, links: Dict[str, Path]) -> None:
    final, stamp = project.build / name, project.build / f"{name}.inputs"
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=project.build) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        inside = tuple(f"{path}/" for path in links)
        write_tree({
            path: file
            for path, file in files.items() if path not in links and not path.startswith(inside)
        }, fresh)
        for path, target in links.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).symlink_to(target)
        if final.exists():
            final.rename(Path(scratch) / "old")
        fresh.rename(final)
    stamp.write_text(inputs, encoding="utf-8")


def _current(project: Project, name: str) -> str:
    stamp = project.build / f"{name}.inputs"
    return stamp.read_text(encoding="utf-8") if stamp.is_file() and (project.build / name).is_dir() else ""


def _inputs(project: Project) -> str:
    """A digest of everything that goes into a tree. The release is in it by its digest in UPSTREAM."""
    own = [project.root / "UPSTREAM", project.lock]
    own += sorted((project.root / "patches").glob("*.py")) + sorted(Path(__file__).parent.glob("*.py"))
    files = [(f"{path.parent.name}/{path.name}", File(path.read_bytes())) for path in own if path.is_file()]
    state = hashlib.sha256()
    for path, file in [*files, *project.overlay().items()]:
        state.update(f"{path}\0{file.executable}\0{len(file.data)}\0".encode() + file.data)
    return state.hexdigest()
