# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A small made-up release for fast tests, and the pinned one, prepared once for all tests that need it."""

import io
import shutil
import tarfile
from pathlib import Path
from typing import Dict

import pytest

from forkbuild.build import Project, prepare
from forkbuild.pin import SDIST_ENV, file_sha256, obtain, read_pin
from forkbuild.seams import lock_text, seams_of

ROOT = Path(__file__).resolve().parents[3]

RELEASE = {
    "setup.py":
    """\
        import os
        from setuptools import find_packages, setup

        setup(name='deepspeed', version='1.0' + os.environ['DS_BUILD_STRING'],
              packages=find_packages(include=['deepspeed', 'deepspeed.*']))
        """,
    "deepspeed/__init__.py":
    "",
    "deepspeed/old/__init__.py":
    "",
    "deepspeed/old/kernel.py":
    "x = 1\n",
    "deepspeed/engine.py":
    """\
        class Engine:

            def step(self, ready):
                first = 1
                if ready:
                    return first
                return None

            def other(self):
                return 2
        """,
}

SERIES = """
from forkbuild.patchset import Commit, Replace

SERIES = [
    Commit(key="step", subject="Step twice", body="It has to."),
    Commit(key="package", subject="A new package", body="It is better.", files=("deepspeed/old/*.py", )),
]
REPLACES = [Replace("deepspeed/old", why="one package", engine="all", drop_when="taken", series="package")]
"""

ENGINE = """
from forkbuild.edit import Edit

FILE = "deepspeed/engine.py"
EDITS = [
    Edit("insert_after", scope="Engine.step", anchor="first = 1", code="second = 2",
         why="w", engine="e", drop_when="d", series="step"),
]
"""


def dedented(text: str) -> str:
    return "".join(line[8:] if line.startswith(" " * 8) else line for line in text.splitlines(keepends=True))


def pack(path: Path, files: Dict[str, str], top: str) -> Path:
    """An sdist with these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size, entry.mtime = len(text.encode()), 1_700_000_000
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_lock(project: Project) -> None:
    write(project.lock, lock_text(seams_of(project.release(), project.patches())))


@pytest.fixture
def small(tmp_path, monkeypatch) -> Project:
    """A project on the made-up release 1.0, sound and not built."""
    monkeypatch.delenv(SDIST_ENV, raising=False)
    root = tmp_path / "checkout"
    release = {name: dedented(text) for name, text in RELEASE.items()}
    sdist = pack(root / "build" / "sdist" / "deepspeed-1.0.tar.gz", release, "deepspeed-1.0")
    write(root / "UPSTREAM", f"name = deepspeed\nversion = 1.0\nsha256 = {file_sha256(sdist)}\nfork = muon.7\n")
    write(root / "deepspeed" / "old" / "__init__.py", "NEW = True\n")
    write(root / "patches" / "series.py", SERIES)
    write(root / "patches" / "engine.py", ENGINE)
    write(root / "patches" / "leans_on.py", 'LEANS_ON = {"deepspeed/engine.py": {"Engine.other": "why"}}\n')
    write_lock(Project(root))
    return Project(root)


@pytest.fixture(scope="session")
def fork(tmp_path_factory) -> Project:
    """This checkout's fork in a folder of its own, with the tree of the pinned release prepared."""
    root = tmp_path_factory.mktemp("fork") / "checkout"
    pin = read_pin(ROOT / "UPSTREAM")
    (root / "build" / "sdist").mkdir(parents=True)
    shutil.copy(obtain(pin, ROOT / "build" / "sdist"), root / "build" / "sdist" / pin.filename)
    shutil.copy(ROOT / "UPSTREAM", root)
    for folder in ("patches", "bin", "deepspeed", "requirements"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    project = Project(root)
    with project.exclusive():
        prepare(project)
    return project
