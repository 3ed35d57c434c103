# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Moving to another release, on the real ones: 0.19.7 -> 0.19.8 and back."""

import shutil

import pytest

from forkbuild import ForkError
from forkbuild.build import Project, prepare, read_tree
from forkbuild.check import problems
from forkbuild.pin import Pin, obtain, read_pin
from forkbuild.refresh import refresh
from unit.forkbuild.conftest import ROOT, write, write_lock

OLD = Pin("deepspeed", "0.19.7", "c6640ecbda08ec6b4b6c72521155351719f145f48d850687b7332f503992921c", "muon.1")

SERIES = 'from forkbuild.patchset import Commit\nSERIES = [Commit("k", "subject", "body")]\nREPLACES = []\n'

SETUP = """
from forkbuild.edit import Edit
FILE = "setup.py"
EDITS = [Edit("insert_after", anchor="extras_require['all'] = $VALUE", code="pass",
              why="w", engine="e", drop_when="d", series="k")]
"""

# Fits both releases, but the function around it changed. The second edit is about an option that 0.19.8 dropped.
RUNNER = """
from forkbuild.edit import Edit
FILE = "deepspeed/launcher/runner.py"
EDITS = [
    Edit("insert_before", scope="parse_args", anchor="return parser.parse_args($$$)", code="pass",
         why="w", engine="e", drop_when="d", series="k"),
    Edit("remove", scope="parse_args", anchor='parser.add_argument("--elastic_training", $$$)',
         why="w", engine="e", drop_when="d", series="k"),
]
"""


@pytest.fixture(scope="module")
def sdists(tmp_path_factory):
    """Both releases in one folder."""
    folder = tmp_path_factory.mktemp("sdist")
    for pin in (read_pin(ROOT / "UPSTREAM"), OLD):
        shutil.copy(obtain(pin, ROOT / "build" / "sdist"), folder / pin.filename)
    return folder


def pinned(root, pin: Pin, sdists, **modules: str) -> Project:
    """A project on a real release with a patch set of the test's own."""
    shutil.copytree(sdists, root / "build" / "sdist", dirs_exist_ok=True)
    write(root / "patches" / "series.py", SERIES)
    write(root / "patches" / "leans_on.py", "LEANS_ON = {}\n")
    for name, text in modules.items():
        write(root / "patches" / f"{name}.py", text)
    move(Project(root), pin)
    return Project(root)


def move(project: Project, pin: Pin) -> None:
    write(project.root / "UPSTREAM", "".join(f"{key} = {value}\n" for key, value in vars(pin).items()))


def test_a_move_that_needs_nothing(tmp_path, sdists, capsys):
    new = read_pin(ROOT / "UPSTREAM")
    project = pinned(tmp_path, OLD, sdists, setup=SETUP)
    write_lock(project)
    assert refresh(project, new.version, new.sha256) == 0
    assert capsys.readouterr().out == (f"0.19.7 -> 0.19.8 (sha256 {new.sha256}): 0 of 1 edits do not apply, 0 seams "
                                       "changed.\nNothing to adapt: write the version and the digest into UPSTREAM.\n")
    for pin in (new, OLD):
        move(project, pin)
        assert problems(project) == []
        with project.exclusive():
            assert (prepare(project) / "version.txt").read_text().strip() == pin.version


def test_a_move_that_needs_work_there_and_back(tmp_path, sdists, capsys):
    new = read_pin(ROOT / "UPSTREAM")
    project = pinned(tmp_path, OLD, sdists, launcher_runner=RUNNER)
    write_lock(project)
    assert problems(project) == []
    before = read_tree(project.root)
    assert refresh(project, new.version, new.sha256) == 1
    report = capsys.readouterr().out
    assert 'remove in parse_args, at `parser.add_argument("--elastic_training", $$$)`: no match for the' in report
    assert "--- deepspeed/launcher/runner.py: parse_args\n" in report
    assert '-    parser.add_argument("--elastic' in report
    assert report.endswith("1 of 2 edits do not apply, 1 seams changed.\n")
    assert read_tree(project.root) == before  # nothing of upstream's, nothing at all is written

    move(project, new)
    with pytest.raises(ForkError, match="--elastic_training.*no match"), project.exclusive():
        prepare(project)
    write(project.root / "patches" / "launcher_runner.py", RUNNER.partition('    Edit("remove"')[0] + "]\n")
    with pytest.raises(ForkError, match="parse_args: its code is not the one"), project.exclusive():
        prepare(project)
    write_lock(project)
    assert problems(project) == []

    assert refresh(project, OLD.version, OLD.sha256) == 1
    report = capsys.readouterr().out
    assert '+    parser.add_argument("--elastic' in report
    assert report.endswith("0 of 1 edits do not apply, 1 seams changed.\n")


def test_this_patch_set_against_the_release_before(fork, sdists, capsys):
    shutil.copy(sdists / OLD.filename, fork.build / "sdist")
    assert refresh(fork, OLD.version, OLD.sha256) == 1
    report = capsys.readouterr().out
    assert "--- deepspeed/runtime/engine.py: DeepSpeedEngine._configure_basic_optimizer\n" in report
    assert refresh(fork, fork.pin.version, fork.pin.sha256) == 0
    assert "0 seams changed" in capsys.readouterr().out
