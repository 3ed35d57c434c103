# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pinned DeepSpeed release: read UPSTREAM, fetch the sdist with pip, check its digest, read its files."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Dict, Optional

from forkbuild import ForkError

SDIST_ENV = "FORKBUILD_SDIST"


@dataclass(frozen=True)
class Pin:
    """One release on the package index. `sha256` is None only for a release that `refresh` tries out."""
    name: str
    version: str
    sha256: Optional[str]
    fork: str

    @property
    def filename(self) -> str:
        return f"{self.name}-{self.version}.tar.gz"


@dataclass(frozen=True)
class File:
    """One file of a tree: its bytes and whether it is executable."""
    data: bytes
    executable: bool = False


Files = Dict[str, File]  # by path inside the tree, with forward slashes


def read_pin(path: Path) -> Pin:
    """The release that an UPSTREAM file names. Raises ForkError for a missing, unknown or repeated key."""
    values: Dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if key not in Pin.__dataclass_fields__ or key in values or not equals or not value:
            raise ForkError(f"{path}:{number}: found {line!r}; write each of {', '.join(Pin.__dataclass_fields__)} "
                            "once, as `key = value`.")
        values[key] = value
    missing = [key for key in Pin.__dataclass_fields__ if key not in values]
    if missing:
        raise ForkError(f"{path}: {', '.join(missing)} missing; write each as `key = value`.")
    return Pin(**values)


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def obtain(pin: Pin, cache: Path) -> Path:
    """The sdist of `pin`: from $FORKBUILD_SDIST, else from `cache`, else downloaded with pip into `cache`.

    The digest is checked in all three cases. A download gets its final name only after that, so a file in `cache` is
    always whole. Raises ForkError.
    """
    given = os.environ.get(SDIST_ENV)
    if given and pin.sha256:
        if not Path(given).is_file():
            raise ForkError(f"{SDIST_ENV}={given}: no such file; set it to a copy of {pin.filename} or unset it.")
        return _checked(Path(given), pin, f"unset {SDIST_ENV} or set it to that release's sdist")
    cached = cache / pin.filename
    if cached.is_file():
        return _checked(cached, pin, "delete it, and it is downloaded again")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=cache) as scratch:
        downloaded = _checked(_pip_download(pin, Path(scratch)), pin, "compare UPSTREAM with the package index")
        os.replace(downloaded, cached)
    return cached


def _checked(path: Path, pin: Pin, remedy: str) -> Path:
    found = file_sha256(path)
    if pin.sha256 and found != pin.sha256:
        raise ForkError(f"{path} has sha256 {found}, but UPSTREAM says {pin.sha256} for {pin.name} {pin.version}; "
                        f"{remedy}.")
    return path


def _pip_download(pin: Pin, scratch: Path) -> Path:
    elsewhere = f"or set {SDIST_ENV} to a copy of {pin.filename}"
    if importlib.util.find_spec("pip") is None:
        raise ForkError(f"{sys.executable} has no pip, which fetches {pin.filename}; install pip there "
                        f"(python -m ensurepip), {elsewhere}.")
    requirements = scratch / "requirements.txt"
    # With the hash in the requirement pip refuses another file before it runs anything of it.
    digest = f" --hash=sha256:{pin.sha256}" if pin.sha256 else ""
    requirements.write_text(f"{pin.name}=={pin.version}{digest}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", pin.name]
    command += ["--disable-pip-version-check", "--dest", str(scratch), "--requirement", str(requirements)]
    # pip asks the sdist for its metadata, which takes bdist_wheel: in setuptools since 70.1, before that in wheel.
    # Without it pip has to fetch them into an environment of its own.
    if all(importlib.util.find_spec(name) for name in ("setuptools", "wheel")):
        command.append("--no-build-isolation")
    # The metadata step must not start to compile what the user wants of the fork's own build.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DS_BUILD_")}
    environment["DS_BUILD_OPS"] = "0"
    result = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    downloaded = scratch / pin.filename
    if result.returncode == 0 and downloaded.is_file():
        return downloaded
    output = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    if any("DO NOT MATCH THE HASHES" in line for line in output):
        got = next((line.split()[-1] for line in output if line.startswith("Got ")), "another digest")
        raise ForkError(f"the package index has {pin.filename} with sha256 {got}, but UPSTREAM says {pin.sha256}; "
                        f"compare UPSTREAM with the package index, {elsewhere}.")
    errors = [line for line in output if line.startswith("ERROR")] or output[-3:]
    raise ForkError(f"pip could not download {pin.name} {pin.version} ({' '.join(errors)}); check the network and "
                    f"pip's index settings, {elsewhere}.")


def read_release(sdist: Path) -> Files:
    """All files of an sdist, by path below its one top folder.

    Nothing is extracted, so a path cannot lead out of a folder; anything but plain files and folders below one top
    folder raises ForkError.
    """
    files: Files = {}
    top = set()
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            top.add(parts[0] if parts else "")
            if len(top) > 1 or ".." in parts or member.name.startswith("/") or not (member.isfile() or member.isdir()):
                raise ForkError(f"{sdist}: the entry {member.name!r} is not a plain file below one top folder; "
                                "this is not an sdist of DeepSpeed.")
            if member.isfile():
                handle = archive.extractfile(member)
                assert handle is not None  # extractfile returns None only for what isfile() already excludes
                files["/".join(parts[1:])] = File(handle.read(), bool(member.mode & 0o100))
    return files
