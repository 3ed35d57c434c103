# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The PEP 517 and PEP 660 hooks: prepare the tree, then let upstream's setup.py do its work in it.

setup.py imports modules from its working directory and changes the environment, so each hook runs it in a process of
its own. DeepSpeed's DS_BUILD_* variables reach it unchanged; DS_BUILD_STRING gets the fork's local version appended.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

from forkbuild import ForkError
from forkbuild.build import Project, prepare_copy

Settings = Optional[Dict[str, Any]]

# Run with the prepared tree as working directory, which -c puts in front of sys.path, as setup.py expects.
_CHILD = """
import json, sys
from setuptools.build_meta import __legacy__ as setuptools_backend
hook, arguments, answer = json.load(sys.stdin)
name = getattr(setuptools_backend, hook)(**arguments)
with open(answer, "w", encoding="utf-8") as handle:
    handle.write(name)
"""

# What of a checkout goes into its sdist when git is not there to say it.
_NOT_OURS = ("build", "dist", "runs", "__pycache__")


def get_requires_for_build_wheel(config_settings: Settings = None) -> List[str]:
    return []


get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return _run("prepare_metadata_for_build_wheel", config_settings, metadata_directory=metadata_directory)


def build_wheel(wheel_directory: str,
                config_settings: Settings = None,
                metadata_directory: Optional[str] = None) -> str:
    return _run("build_wheel", config_settings, wheel_directory=wheel_directory)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    return _run("prepare_metadata_for_build_editable", config_settings, metadata_directory=metadata_directory)


def build_editable(wheel_directory: str,
                   config_settings: Settings = None,
                   metadata_directory: Optional[str] = None) -> str:
    return _run("build_editable", config_settings, wheel_directory=wheel_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Packs the fork's own files; upstream is fetched when a wheel is built from them."""
    project = _project()
    version = project.pin.version + local_version("", project.pin.fork)
    top = f"{project.pin.name}-{version}"
    metadata = f"Metadata-Version: 2.2\nName: {project.pin.name}\nVersion: {version}\nDynamic: Requires-Dist\n"
    metadata += "Dynamic: Provides-Extra\nDynamic: Summary\n"
    with tarfile.open(Path(sdist_directory) / f"{top}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path in _own_files(project.root):
            archive.add(project.root / path, f"{top}/{path}", recursive=False)
        entry = tarfile.TarInfo(f"{top}/PKG-INFO")
        entry.size = len(metadata)
        archive.addfile(entry, io.BytesIO(metadata.encode()))
    return f"{top}.tar.gz"


def local_version(build_string: str, fork: str) -> str:
    """What follows the release's version: the user's DS_BUILD_STRING, then the fork's label as a local version."""
    return f"{build_string}{'.' if '+' in build_string else '+'}{fork}"


def _project() -> Project:
    return Project(Path(__file__).resolve().parent.parent)


def _run(hook: str, config_settings: Settings, **directories: str) -> str:
    """One hook of setuptools in a prepared tree. An error of ours ends the hook with its message alone."""
    project = _project()
    settings = dict(config_settings or {})
    editable = hook.endswith("editable")
    if editable:
        # setuptools' import finder would let the checkout's partial deepspeed/ folder win over the real package for a
        # program that starts in the checkout; a tree on sys.path does not.
        settings["editable_mode"] = "compat"
    try:
        with project.exclusive():
            tree = prepare_copy(project, "editable" if editable else "wheel", linked=editable)
            arguments = {name: os.path.abspath(path) for name, path in directories.items()}
            return _setuptools(tree, hook, {**arguments, "config_settings": settings}, project.pin.fork)
    except ForkError as error:
        raise SystemExit(f"\nerror: {error}") from None


def _setuptools(tree: Path, hook: str, arguments: Dict[str, Any], fork: str) -> str:
    environment = dict(os.environ)
    environment["DS_BUILD_STRING"] = local_version(environment.get("DS_BUILD_STRING", ""), fork)
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer"
        result = subprocess.run([sys.executable, "-c", _CHILD],
                                input=json.dumps([hook, arguments, str(answer)]),
                                text=True,
                                cwd=tree,
                                env=environment)
        if result.returncode:
            raise ForkError(f"DeepSpeed's own build failed in {tree} (exit status {result.returncode}); "
                            "its output is above.")
        return answer.read_text(encoding="utf-8")


def _own_files(root: Path) -> List[str]:
    """The checkout's files: those git does not ignore; without git, all but hidden folders and build products."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
        if "UPSTREAM" in listed:
            return sorted(path for path in listed if path and (root / path).is_file())
    except (OSError, subprocess.CalledProcessError):
        pass  # an unpacked sdist, or no git on this machine
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_OURS and not name.startswith(".")]
        found += [Path(folder, name).relative_to(root).as_posix() for name in names if not name.endswith(".pyc")]
    return sorted(path for path in found if path != "PKG-INFO")
