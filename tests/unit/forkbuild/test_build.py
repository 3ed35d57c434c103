# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Trees are complete or not there, made once, and by one process at a time; the hooks hand them to setuptools."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile

import pytest

from forkbuild import ForkError, backend, build
from forkbuild.build import Project, prepare, prepare_copy, read_tree
from unit.forkbuild.conftest import ROOT, write

_HOLD = """
import sys, time
from pathlib import Path
from forkbuild.build import Project
with Project(Path(sys.argv[1])).exclusive():
    print("held", flush=True)
    time.sleep(60)
"""


def left_overs(project: Project) -> list:
    return [path.name for path in project.build.iterdir() if path.name.startswith(".tmp-")]


def make(project: Project):
    with project.exclusive():
        return prepare(project)


def test_the_tree_is_the_release_with_our_files_and_the_edits(small):
    files = read_tree(make(small))
    assert set(files) == {"setup.py", "deepspeed/__init__.py", "deepspeed/engine.py", "deepspeed/old/__init__.py"}
    assert files["deepspeed/old/__init__.py"].data == b"NEW = True\n"
    assert b"        first = 1\n        second = 2\n" in files["deepspeed/engine.py"].data


def test_an_unchanged_tree_is_used_again_and_a_changed_one_is_made_anew(small, monkeypatch):
    made = make(small).stat().st_ino
    assert make(small).stat().st_ino == made
    for change in (lambda: write(small.root / "deepspeed" / "old" / "more.py", ""),
                   lambda: write(small.root / "patches" / "note.txt", "not an input")):
        change()
    assert make(small).stat().st_ino != made and (small.build / "tree/deepspeed/old/more.py").is_file()
    made = make(small).stat().st_ino
    write(small.root / "patches" / "other.txt", "not an input")
    assert make(small).stat().st_ino == made


def test_a_failure_in_the_middle_leaves_no_half_built_tree(small, monkeypatch):

    def fails_midway(files, folder):
        written = dict(list(files.items())[:2])
        real(written, folder)
        raise OSError("disk full")

    real = build.write_tree
    monkeypatch.setattr(build, "write_tree", fails_midway)
    with pytest.raises(OSError, match="disk full"):
        make(small)
    assert not (small.build / "tree").exists() and not left_overs(small)
    monkeypatch.setattr(build, "write_tree", real)
    before = read_tree(make(small))
    write(small.root / "deepspeed" / "old" / "more.py", "")
    monkeypatch.setattr(build, "write_tree", fails_midway)
    with pytest.raises(OSError, match="disk full"):
        make(small)
    assert read_tree(small.build / "tree") == before and not left_overs(small)


def test_an_edit_that_fails_leaves_no_tree(small):
    engine = small.root / "patches" / "engine.py"
    write(engine, engine.read_text().replace("first = 1", "third = 3"))
    with pytest.raises(ForkError, match=r"deepspeed/engine.py: insert_after in Engine.step, at `third = 3`: no match"):
        make(small)
    assert not (small.build / "tree").exists() and not left_overs(small)


def test_a_changed_seam_stops_the_build(small):
    write(small.lock, json.dumps({"deepspeed/engine.py": {"Engine.step": "0" * 32, "Engine.other": "0" * 32}}))
    with pytest.raises(ForkError) as caught:
        make(small)
    assert "deepspeed/engine.py: Engine.other: its code is not the one that seams.lock was made from; run " \
           "`python -m forkbuild refresh VERSION`" in str(caught.value)
    assert "Engine.step" in str(caught.value) and not (small.build / "tree").exists()


def test_our_file_must_not_hide_one_of_upstreams(small):
    write(small.root / "deepspeed" / "engine.py", "")
    with pytest.raises(ForkError, match="deepspeed/engine.py: the release has this file too, and ours would hide it"):
        make(small)


def test_a_second_build_is_told_and_the_lock_dies_with_its_process(small):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, small.root],
                              stdout=subprocess.PIPE,
                              text=True,
                              env=environment)
    try:
        assert holder.stdout.readline() == "held\n"
        write(small.build / ".tmp-of-a-killed-build" / "file", "")
        second = subprocess.run([sys.executable, "-m", "forkbuild", "--root", small.root, "tree"],
                                env=environment,
                                capture_output=True,
                                text=True)
        assert second.returncode == 2 and second.stdout == "" and second.stderr == (
            f"error: another build runs in {small.root} (process {holder.pid}); wait until it ends, or stop it.\n")
        assert left_overs(small)  # the first one may still need it
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    make(small)
    assert not left_overs(small)


def test_in_an_editable_tree_our_folders_are_links(small):
    with small.exclusive():
        tree = prepare_copy(small, "editable", linked=True)
    write(small.root / "deepspeed" / "old" / "fresh.py", "x = 1\n")
    assert (tree / "deepspeed" / "old").is_symlink() and (tree / "deepspeed/old/fresh.py").read_text() == "x = 1\n"
    assert not (tree / "deepspeed/engine.py").is_symlink()


@pytest.mark.parametrize("given, expected", [("", "1.0+muon.7"), (".dev3", "1.0.dev3+muon.7"), ("+x", "1.0+x.muon.7")])
def test_the_version_keeps_the_users_build_string(given, expected):
    assert "1.0" + backend.local_version(given, "muon.7") == expected


def hook(project: Project, name: str, build_string: str = "") -> str:
    """Runs one hook of the made-up project as pip does. The file it made."""
    shutil.copytree(ROOT / "forkbuild", project.root / "forkbuild", dirs_exist_ok=True)
    code = f"import forkbuild.backend as backend; print(backend.{name}({str(project.root.parent)!r}))"
    result = subprocess.run([sys.executable, "-c", code],
                            cwd=project.root,
                            env={
                                **os.environ, "DS_BUILD_STRING": build_string
                            },
                            capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
    return project.root.parent / result.stdout.splitlines()[-1]


def test_a_wheel_is_built_in_a_copy_of_the_tree(small):
    with zipfile.ZipFile(hook(small, "build_wheel", ".dev3")) as wheel:
        names = wheel.namelist()
    assert "deepspeed-1.0.dev3+muon.7.dist-info/METADATA" in names and "deepspeed/old/kernel.py" not in names
    assert set(read_tree(small.build / "tree")) == {
        "setup.py", "deepspeed/__init__.py", "deepspeed/engine.py", "deepspeed/old/__init__.py"
    }


def test_an_editable_wheel_puts_the_linked_tree_on_the_path(small):
    with zipfile.ZipFile(hook(small, "build_editable")) as wheel:
        paths = [wheel.read(name).decode().strip() for name in wheel.namelist() if name.endswith(".pth")]
    assert paths == [str(small.build / "editable")]


def test_an_error_of_ours_ends_a_hook_with_its_message_alone(small):
    write(small.lock, "{}")
    shutil.copytree(ROOT / "forkbuild", small.root / "forkbuild")
    result = subprocess.run([sys.executable, "-c", "import forkbuild.backend as b; b.build_wheel('.')"],
                            cwd=small.root,
                            capture_output=True,
                            text=True)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: the edits apply, but" in result.stderr and "Engine.step: not in seams.lock" in result.stderr


def test_the_sdist_holds_our_files_and_nothing_of_upstreams(small):
    write(small.root / "README.md", "ours")
    sdist = hook(small, "build_sdist")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sdist.name == "deepspeed-1.0+muon.7.tar.gz"
    assert {"UPSTREAM", "README.md", "PKG-INFO", "patches/seams.lock", "forkbuild/backend.py"} <= names
    assert "deepspeed/engine.py" not in names and not [name for name in names if name.startswith("build/")]


def test_the_engine_checks_the_keys_of_muon_before_it_takes_any_out(fork):
    engine = (fork.build / "tree" / "deepspeed" / "runtime" / "engine.py").read_text(encoding="utf-8")
    branch = engine.partition("elif self.optimizer_name() == MUON_OPTIMIZER:\n")[2]
    asks = branch.index("check_optimizer_params(optimizer_parameters, model_parameters)\n")
    assert asks < branch.index("optimizer_parameters.pop(")


def test_ds_muon_is_a_command(fork):
    script = fork.build / "tree" / "bin" / "ds_muon"
    setup = (fork.build / "tree" / "setup.py").read_text(encoding="utf-8")
    assert os.access(script, os.X_OK) and script.read_text(encoding="utf-8").startswith("#!/usr/bin/env python3\n")
    assert setup.index("scripts.append('bin/ds_muon')\n") < setup.index("\nsetup(")
