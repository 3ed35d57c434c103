# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`python -m forkbuild refresh VERSION`: what moving the fork to another release would take.

Only the terminal gets upstream's text; the repository gets nothing.
"""

import dataclasses
import difflib
import tempfile
from pathlib import Path
from typing import List, Optional

from forkbuild.build import Project
from forkbuild.check import edit_problems
from forkbuild.patchset import PatchSet
from forkbuild.pin import Files, file_sha256, obtain, read_release
from forkbuild.seams import seam_nodes, seams_of


def refresh(project: Project, version: str, sha256: Optional[str] = None) -> int:
    """Prints the report. Returns 0 where every edit applies and no seam changed, else 1. Raises ForkError.

    With a digest the release is fetched into build/sdist, as the pinned one is; without, into a temporary folder.
    """
    other = dataclasses.replace(project.pin, version=version, sha256=sha256)
    with tempfile.TemporaryDirectory() as scratch:
        sdist = obtain(other, project.build / "sdist" if sha256 else Path(scratch))
        digest, release = file_sha256(sdist), read_release(sdist)
    pinned, patches = project.release(), project.patches()
    misfits = edit_problems(release, patches)
    diffs = seam_diffs(pinned, release, patches)
    for line in [*misfits, *diffs]:
        print(line)
    count = sum(len(edits) for edits in patches.edits.values()) + len(patches.replaces)
    print(f"{project.pin.version} -> {version} (sha256 {digest}): {len(misfits)} of {count} edits do not apply, "
          f"{len(diffs)} seams changed.")
    if not misfits and not diffs:
        print("Nothing to adapt: write the version and the digest into UPSTREAM.")
    return 1 if misfits or diffs else 0


def seam_diffs(pinned: Files, release: Files, patches: PatchSet) -> List[str]:
    """For each seam function that differs between two releases: upstream's unified diff of that function."""
    before, after = seams_of(pinned, patches), seams_of(release, patches)
    diffs = []
    for file in before:
        for name in sorted({*before[file], *after.get(file, {})}):
            if before[file].get(name) != after.get(file, {}).get(name):
                old, new = (_source(files, patches, file, name) for files in (pinned, release))
                lines = difflib.unified_diff(old, new, f"{file}: {name}", f"{file}: {name}", lineterm="")
                diffs.append("\n".join(lines))
    return diffs


def _source(files: Files, patches: PatchSet, file: str, name: str) -> List[str]:
    text = files[file].data.decode() if file in files else ""
    return [line for node in seam_nodes(text, patches, file).get(name, []) for line in node.text().splitlines()]
