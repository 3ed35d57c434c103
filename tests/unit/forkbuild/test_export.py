# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The series applies with `git am` to the release as it is, gives the fork's tree, and is the same from run to run."""

import os
import subprocess

import pytest

from forkbuild import ForkError
from forkbuild.build import File, Project, read_tree, write_tree
from forkbuild.export import export
from unit.forkbuild.conftest import write


@pytest.fixture
def identity(tmp_path, monkeypatch):
    """A user's git configuration with what would change the files, if it had a say."""
    for key in [key for key in os.environ if key.startswith("GIT_")]:
        monkeypatch.delenv(key)
    config = write(
        tmp_path / "gitconfig", "[user]\n\tname = Ann Author\n\temail = ann@example.org\n"
        "[commit]\n\tgpgsign = true\n[diff]\n\tnoprefix = true\n[format]\n\tsubjectPrefix = RFC\n"
        "[core]\n\tautocrlf = true\n\thooksPath = /nowhere\n")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    return config


def exported(project: Project) -> list:
    with project.exclusive():
        return export(project)


def applied(project: Project, patches: list, folder) -> dict:
    """The tree that `git am` makes of the pristine release."""
    folder.mkdir()
    write_tree(project.release(), folder)
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    environment.update({f"GIT_COMMITTER_{key}": "reviewer@example.org" for key in ("NAME", "EMAIL")})
    environment.update({f"GIT_AUTHOR_{key}": "reviewer@example.org" for key in ("NAME", "EMAIL")})
    for command in (["init", "--quiet"], ["add", "--all", "--force",
                                          "."], ["commit", "--quiet", "--message",
                                                 "base"], ["am", "--quiet", *map(str, patches)]):
        subprocess.run(["git", *command], cwd=folder, env=environment, check=True, capture_output=True)
    log = subprocess.run(["git", "log", "--format=%an|%s", "--reverse"],
                         cwd=folder,
                         env=environment,
                         check=True,
                         capture_output=True,
                         text=True).stdout.splitlines()
    assert log[1:] == [f"Ann Author|{commit.subject}" for commit in project.patches().series]
    return {path: file for path, file in read_tree(folder).items() if not path.startswith(".git/")}


def test_git_am_on_the_pristine_release_gives_the_forks_tree(fork, identity, tmp_path):
    patches = exported(fork)
    tree = read_tree(fork.build / "tree")
    assert applied(fork, patches, tmp_path / "am") == tree
    assert len(tree) > 1000  # the precondition: this is DeepSpeed's tree and not an empty one
    for path in patches:
        text = path.read_text(encoding="utf-8")
        assert "\nSigned-off-by: Ann Author <ann@example.org>\n" in text
        body = text.partition("\n\n")[2].partition("\nSigned-off-by:")[0]
        assert body.strip() and max(map(len, body.splitlines())) <= 72


def test_the_files_are_the_same_from_run_to_run(small, identity):
    first = [(path.name, path.read_bytes()) for path in exported(small)]
    assert [name for name, _ in first] == ["0001-Step-twice.patch", "0002-A-new-package.patch"]
    write(identity, "[user]\n\tname = Ann Author\n\temail = ann@example.org\n")
    assert [(path.name, path.read_bytes()) for path in exported(small)] == first


def test_an_export_inside_a_git_hook_stays_out_of_that_repository(small, identity, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "not-this-one"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "nor-this-index"))
    assert len(exported(small)) == 2 and not (tmp_path / "nor-this-index").exists()


@pytest.mark.parametrize("key", ["user.name", "user.email"])
def test_without_an_identity_nothing_is_written(small, identity, key):
    write(identity, identity.read_text().replace(f"\t{key.partition('.')[2]} = ", "\tother = "))
    with pytest.raises(ForkError, match=f"git has no {key}, which signs off the commits; set it with `git config"):
        exported(small)
    assert not (small.build / "patches").exists()


def test_a_series_that_ends_elsewhere_is_refused(small, identity):
    write(small.root / "deepspeed" / "lonely.py", "")
    assert "deepspeed/lonely.py" not in small.release()
    small_series = small.patches().series
    assert all(small.patches().commit_of("deepspeed/lonely.py") is None for _ in small_series)
    exported(small)  # a file of no commit comes with the first one; `check` reports it
    edit = small.root / "patches" / "engine.py"
    write(edit, edit.read_text().replace('series="step"', 'series="unknown"'))
    with pytest.raises(ForkError, match="the series does not end at the fork's tree"):
        exported(small)


def test_modes_are_part_of_the_comparison(tmp_path):
    write_tree({"run": File(b"", True), "data": File(b"")}, tmp_path)
    assert read_tree(tmp_path) == {"run": File(b"", True), "data": File(b"")}
