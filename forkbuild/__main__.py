# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""python -m forkbuild COMMAND: what a maintainer of the fork runs."""

import argparse
import os
import sys
from pathlib import Path

from forkbuild import ForkError
from forkbuild.build import Project, prepare
from forkbuild.check import problems
from forkbuild.export import export
from forkbuild.refresh import refresh
from forkbuild.seams import lock_text, seams_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m forkbuild", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="whether all edits apply, seams.lock matches, and nothing is an orphan")
    commands.add_parser("tree", help="prepare the fork's source tree and print where it is")
    commands.add_parser("lock", help="write patches/seams.lock from the pinned release")
    commands.add_parser("export", help="write the series of `git am` files into build/patches")
    trial = commands.add_parser("refresh", help="try another release of DeepSpeed; changes nothing in the repository")
    trial.add_argument("version")
    trial.add_argument("--sha256", help="digest of that release's sdist; it is then kept in build/sdist")
    arguments = parser.parse_args()
    try:
        return _run(Project(arguments.root.resolve()), arguments)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(project: Project, arguments: argparse.Namespace) -> int:
    if arguments.command == "check":
        found = problems(project)
        for line in found:
            print(line)
        print(f"{len(found)} problems." if found else "The patch set is sound.")
        return 1 if found else 0
    if arguments.command == "refresh":
        return refresh(project, arguments.version, arguments.sha256)
    if arguments.command == "lock":
        text = lock_text(seams_of(project.release(), project.patches()))
        fresh = project.lock.with_suffix(".tmp")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, project.lock)
        return 0
    with project.exclusive():
        for path in [prepare(project)] if arguments.command == "tree" else export(project):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
