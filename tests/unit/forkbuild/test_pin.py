# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fetching the release: every digest is checked, every failure has one message and leaves no file."""

import importlib.util
import os
import subprocess
import tarfile

import pytest

from forkbuild import ForkError, pin
from forkbuild.pin import SDIST_ENV, Pin, file_sha256, obtain, read_pin, read_release
from unit.forkbuild.conftest import pack, write

RELEASE = Pin("deepspeed", "0.19.8", "0" * 64, "muon.1")


@pytest.fixture
def no_index(monkeypatch):
    """pip knows an index that nothing listens at, and nothing else."""
    for key in [key for key in os.environ if key.startswith("PIP_") or key == SDIST_ENV]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")


def refused(release: Pin, cache) -> str:
    with pytest.raises(ForkError) as caught:
        obtain(release, cache)
    assert not cache.exists() or not [path for path in cache.iterdir() if path.name != release.filename]
    return str(caught.value)


def test_upstream_is_read_line_by_line(tmp_path):
    path = write(tmp_path / "UPSTREAM", "# c\nname = deepspeed\n\nversion=1.0\nsha256 = ab\nfork = muon.1\n")
    assert read_pin(path) == Pin("deepspeed", "1.0", "ab", "muon.1")


@pytest.mark.parametrize("text, message", [
    ("name = a\nversion = 1\nfork = b\n", "sha256 missing"),
    ("name = a\nname = b\n", "UPSTREAM:2: found 'name = b'; write each of name, version, sha256, fork once"),
    ("label = a\n", "UPSTREAM:1: found 'label = a'"),
    ("name\n", "UPSTREAM:1: found 'name'"),
])
def test_a_bad_upstream_file(tmp_path, text, message):
    with pytest.raises(ForkError, match=message):
        read_pin(write(tmp_path / "UPSTREAM", text))


def test_a_cached_file_with_another_digest(tmp_path, no_index):
    cached = write(tmp_path / RELEASE.filename, "something else")
    message = refused(RELEASE, tmp_path)
    assert message == (
        f"{cached} has sha256 {file_sha256(cached)}, but UPSTREAM says {'0' * 64} for deepspeed 0.19.8; "
        "delete it, and it is downloaded again.")


def test_a_given_file_is_checked_and_used(tmp_path, no_index, monkeypatch):
    given = write(tmp_path / "given.tar.gz", "bytes")
    monkeypatch.setenv(SDIST_ENV, str(given))
    assert "has sha256" in refused(RELEASE, tmp_path / "cache")
    assert obtain(Pin("deepspeed", "0.19.8", file_sha256(given), "muon.1"), tmp_path / "cache") == given
    monkeypatch.setenv(SDIST_ENV, str(tmp_path / "absent"))
    assert "no such file" in refused(RELEASE, tmp_path / "cache")


def test_no_network(tmp_path, no_index):
    message = refused(RELEASE, tmp_path / "cache")
    assert message.startswith("pip could not download deepspeed 0.19.8 (ERROR: ")
    assert f"check the network and pip's index settings, or set {SDIST_ENV} to a copy of" in message


def test_no_pip(tmp_path, no_index, monkeypatch):
    monkeypatch.setattr(pin.importlib.util, "find_spec", lambda name: None)
    assert "has no pip, which fetches deepspeed-0.19.8.tar.gz; install pip there" in refused(
        RELEASE, tmp_path / "cache")


@pytest.mark.parametrize("missing", ["setuptools", "wheel"])
def test_what_pip_needs_for_the_metadata_is_fetched_where_it_is_missing(tmp_path, monkeypatch, missing):
    """A new environment of Python 3.11 has setuptools 65 and no wheel, so bdist_wheel is unknown there."""
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: stopped here")

    monkeypatch.delenv(SDIST_ENV, raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    found = importlib.util.find_spec
    for hidden in (missing, None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == hidden else found(name))
        refused(RELEASE, tmp_path)
    assert ["--no-build-isolation" in command for command in commands] == [False, found("wheel") is not None]


def test_pip_refuses_another_file_before_it_runs_any_of_it(tmp_path, no_index, monkeypatch):
    ran = tmp_path / "ran"
    setup = f"import setuptools, pathlib; pathlib.Path({str(ran)!r}).touch(); setuptools.setup(name='deepspeed')\n"
    sdist = pack(tmp_path / "index" / RELEASE.filename, {"setup.py": setup}, "deepspeed-0.19.8")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(sdist.parent))
    message = refused(RELEASE, tmp_path / "cache")
    assert message.startswith(
        f"the package index has {RELEASE.filename} with sha256 {file_sha256(sdist)}, but UPSTREAM")
    assert not ran.exists()


def test_a_release_is_plain_files_below_one_folder(tmp_path):
    assert read_release(pack(tmp_path / "a.tar.gz", {"x/y.py": "1"}, "top"))["x/y.py"].data == b"1"
    for name, change in [("../out.py", {}), ("link", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})]:
        entry = tarfile.TarInfo(f"top/{name}")
        for key, value in change.items():
            setattr(entry, key, value)
        with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
            archive.addfile(entry)
        with pytest.raises(ForkError, match="is not a plain file below one top folder"):
            read_release(tmp_path / "b.tar.gz")
