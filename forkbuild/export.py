# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`python -m forkbuild export`: the fork as a series of `git am` files in build/patches/, for review upstream.

The commits are made in a throw-away repository whose first commit is the release as it is. Nothing but the name and
e-mail of the user's git configuration has a say, so the same checkout writes the same files everywhere.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from pathlib import Path
from typing import Dict, List

from forkbuild import ForkError
from forkbuild.build import Project, fork_files, prepare, read_tree, write_tree
from forkbuild.patchset import Commit
from forkbuild.pin import Files, obtain

_FORMAT = ["--numbered", "--full-index", "--binary", "--no-renames", "--no-signature", "--zero-commit"]
_FORMAT += ["--diff-algorithm=histogram", "--stat=120"]


def export(project: Project) -> List[Path]:
    """Writes build/patches anew; the files in order. Call inside `project.exclusive()`. Raises ForkError."""
    name, email = _identity(project.root, "user.name"), _identity(project.root, "user.email")
    tree = read_tree(prepare(project))
    release, patches, overlay = project.release(), project.patches(), project.overlay()
    final = project.build / "patches"
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=project.build) as scratch:
        repository, written = Path(scratch) / "repository", Path(scratch) / "patches"
        repository.mkdir()
        git = _Git(repository, _environment(Path(scratch), name, email, _date(project)))
        git("init", "--quiet", "--initial-branch=fork")
        _commit(git, {}, release, f"{project.pin.name} {project.pin.version}")
        files = release
        for position, commit in enumerate(patches.series, 1):
            before, files = files, fork_files(release, patches, overlay, position)
            _commit(git, before, files, _message(commit))
        if files != tree:
            raise ForkError("the series does not end at the fork's tree; `python -m forkbuild check` says which file "
                            "or edit belongs to no commit.")
        git("format-patch", "--quiet", f"-{len(patches.series)}", "--output-directory", str(written), *_FORMAT)
        shutil.rmtree(final, ignore_errors=True)
        written.rename(final)
    return sorted(final.iterdir())


class _Git:
    """Runs git in one folder with one environment."""

    def __init__(self, folder: Path, environment: Dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def __call__(self, *arguments: str) -> None:
        command = ["git", *arguments]
        result = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if result.returncode:
            raise ForkError(f"`{' '.join(command)}` failed: {result.stderr.strip() or result.stdout.strip()}")


def _commit(git: _Git, before: Files, files: Files, message: str) -> None:
    for path in before.keys() - files.keys():
        (git.folder / path).unlink()
    write_tree({path: file for path, file in files.items() if before.get(path) != file}, git.folder)
    git("add", "--all", "--force", ".")
    git("commit", "--quiet", "--signoff", "--message", message)


def _message(commit: Commit) -> str:
    paragraphs = [textwrap.fill(paragraph, 72) for paragraph in commit.body.strip().split("\n\n")]
    return "\n\n".join([commit.subject.strip(), *paragraphs])


def _date(project: Project) -> str:
    """When the release was packed: a date for the commits that is the same from run to run."""
    with tarfile.open(obtain(project.pin, project.build / "sdist")) as archive:
        return f"{int(max(member.mtime for member in archive))} +0000"


def _environment(home: Path, name: str, email: str, date: str) -> Dict[str, str]:
    # GIT_DIR and its like are set inside a git hook and would lead git to the wrong repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment.update(HOME=str(home), GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL=os.devnull, LC_ALL="C", TZ="UTC")
    for role in ("AUTHOR", "COMMITTER"):
        environment.update({f"GIT_{role}_NAME": name, f"GIT_{role}_EMAIL": email, f"GIT_{role}_DATE": date})
    return environment


def _identity(root: Path, key: str) -> str:
    try:
        found = subprocess.run(["git", "config", key], cwd=root, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        raise ForkError("git is not installed; the series is written with it.") from None
    if not found:
        raise ForkError(f"git has no {key}, which signs off the commits; set it with `git config {key} ...`.")
    return found
