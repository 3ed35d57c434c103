# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`python -m forkbuild check`: everything that can be wrong with the patch set, all of it in one run."""

import fnmatch
from typing import List, Set

from forkbuild import ForkError
from forkbuild.build import Project, fork_files
from forkbuild.edit import EditError, apply_edit, apply_edits
from forkbuild.patchset import PatchSet, header_problems
from forkbuild.pin import Files
from forkbuild.seams import read_lock, seam_problems, seams_of


def problems(project: Project) -> List[str]:
    """One line per problem; empty where the patch set is sound."""
    release, patches, overlay = project.release(), project.patches(), project.overlay()
    found = header_problems(patches) + edit_problems(release, patches) + _series_problems(patches, set(overlay))
    found += seam_problems(seams_of(release, patches), read_lock(project.lock))
    if not found:
        # Each commit of the series has to stand on its own; an edit may need one of a later commit.
        for commits in range(1, len(patches.series) + 1):
            try:
                fork_files(release, patches, overlay, commits)
            except ForkError as error:
                found.append(f"the series up to {patches.series[commits - 1].key!r} does not apply: {error}")
    return found


def edit_problems(release: Files, patches: PatchSet) -> List[str]:
    """Every edit of `patches` that does not fit `release`; the others are made, so that one does not hide the next."""
    found = []
    for file, edits in patches.edits.items():
        if file not in release:
            found.append(f"{file}: the release has no such file; it has moved or is gone ({len(edits)} edits).")
            continue
        text = release[file].data.decode()
        try:
            apply_edits(file, text, edits)
        except EditError:
            for edit in edits:
                try:
                    text = apply_edit(file, text, edit)
                except EditError as error:
                    found.append(str(error))
    found += [
        f"{replace}: the release has no such folder." for replace in patches.replaces
        if not any(path.startswith(replace.path + "/") for path in release)
    ]
    return found


def _series_problems(patches: PatchSet, overlay: Set[str]) -> List[str]:
    found = [
        f"{path}: no commit in patches/series.py comes with this file." for path in sorted(overlay)
        if patches.commit_of(path) is None
    ]
    used = {edit.series for edits in patches.edits.values() for edit in edits}
    used |= {replace.series for replace in patches.replaces}
    for position, commit in enumerate(patches.series):
        idle = [pattern for pattern in commit.files if not fnmatch.filter(overlay, pattern)]
        found += [f"patches/series.py: {commit.key!r}: no file of ours matches {pattern!r}." for pattern in idle]
        if commit.key not in used and position not in map(patches.commit_of, overlay):
            found.append(f"patches/series.py: no edit and no file belongs to the commit {commit.key!r}; drop it.")
    return found
