# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Makefile, the pre-commit configuration and the documents agree with each other."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ("README.md", "AGENTS.md", "CHANGELOG.md", "docs/design.md", "docs/guide.md", ".ci/run",
             ".github/workflows/cpu.yml", ".github/workflows/gpu.yml")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the Makefile looks at before it has made anything."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "examples" / "configs", tmp_path / "examples" / "configs")
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    # Under `make test` the outer make's flags are in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments],
                          cwd=folder,
                          env=environment,
                          capture_output=True,
                          text=True,
                          timeout=60)


def test_every_make_target_in_the_documents_is_in_the_help(checkout):
    listed = set(re.findall(r"^make (\w+)", make(checkout, "help").stdout, re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(r"(?:`|^ *|run: |step )make (?:--\S+ )?([a-z]+)", (
            ROOT / document).read_text(), re.MULTILINE)
    }
    assert named and named <= listed


@pytest.mark.parametrize("setting, choices", [("ENGINE=zero9", "zero3-offload"), ("OPT=sgd", "muon adamw")])
def test_unknown_setting_is_refused_before_anything_is_made(checkout, setting, choices):
    before = sorted(checkout.rglob("*"))
    done = make(checkout, "train", setting)
    assert done.returncode != 0
    assert setting in done.stderr and choices in done.stderr
    assert sorted(checkout.rglob("*")) == before


def test_settings_reach_the_example(checkout):
    done = make(checkout, "--dry-run", "--assume-old=.venv/.train", "train", "ENGINE=zero3", "OPT=adamw", "STEPS=7",
                "RANKS=3")
    command = done.stdout.replace("\\\n", " ").split()
    for pair in (["--nproc-per-node", "3"], ["--engine", "zero3"], ["--opt", "adamw"], ["--steps", "7"]):
        position = command.index(pair[0])
        assert command[position:position + 2] == pair


def test_another_python_is_refused_by_its_version(checkout):
    old = checkout / "old-python"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 9, 1); "
                   "exec(sys.argv[1])' \"$2\"\n")
    old.chmod(0o755)
    done = make(checkout, ".venv/.made", f"PYTHON={old}")
    assert done.returncode != 0
    assert "is 3.9" in done.stderr and "3.10, 3.11 or 3.12" in done.stderr
    assert not (checkout / ".venv").exists()


def test_hooks_need_no_git_host_and_are_pinned():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    repositories = re.findall(r"^- repo: (\S+)$", text, re.MULTILINE)
    assert repositories and set(repositories) == {"local", "meta"}
    dependencies = re.findall(r"additional_dependencies: \[(.*)\]", text)
    assert dependencies and all(re.fullmatch(r"[\w-]+==[\w.]+", entry) for entry in dependencies)


def test_readme_has_every_key_of_the_optimizer():
    options = runpy.run_path(str(ROOT / "deepspeed" / "runtime" / "zero" / "muon" / "options.py"))["OPTIONS"]
    readme = (ROOT / "README.md").read_text()
    assert options and [key for key in options if f"`{key}`" not in readme] == []
