# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks find a test's module under any name that pytest gives it, also in the workers of pytest-xdist."""

import re
from pathlib import Path

import pytest

from unit.harness.inner import copy_case, run_pytest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two files of one name in directories that are no packages, and one in a package."""
    for folder in ("first", "second", "package/inner"):
        copy_case("own_class", tmp_path / folder / "test_own_class.py")
    for folder in ("package", "package/inner"):
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_importlib_with_xdist(directory: Path):
    pytest.importorskip("xdist")
    printed = run_pytest(directory, "-v", "-n", "2", "--import-mode=importlib", ".")
    assert "6 passed" in printed, printed
    assert set(re.findall(r"\[(gw\d)\]", printed)) == {"gw0", "gw1"}


def test_prepend(directory: Path):
    printed = run_pytest(directory, "--import-mode=prepend", "first", "package", "-k", "not TestInner", "-x")
    assert "2 passed, 2 deselected" in printed, printed
