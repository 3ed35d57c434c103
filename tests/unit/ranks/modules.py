# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Finds the module of a test in a rank, whatever way pytest imported it."""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Dict, Optional

from _pytest.assertion import install_importhook
from _pytest.config import get_config


class TestModules:
    """Loads test modules once each, with pytest's assertion rewriting, so that a failed assert names its values.

    pytest gives a module the name of its package path or, where there is no package, one of its own making that
    nothing can import. Hence a module is imported by name only where the name leads to the same file, else from its
    file.
    """

    __test__ = False

    def __init__(self) -> None:
        self._loaded: Dict[str, ModuleType] = {}
        self._rewriting = install_importhook(get_config())

    def load(self, name: str, file: str) -> ModuleType:
        """The module that pytest knows as ``name``, from the source ``file``. Raises what its import raises."""
        if file not in self._loaded:
            self._rewriting.mark_rewrite(name)
            if _same_file(getattr(sys.modules.get(name), "__file__", None), file):
                self._loaded[file] = sys.modules[name]
            elif _leads_to(name, file):
                self._loaded[file] = importlib.import_module(name)
            else:
                self._loaded[file] = self._load_from_file(name, file)
        return self._loaded[file]

    def _load_from_file(self, name: str, file: str) -> ModuleType:
        spec = self._spec_of_file(name, file)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"test module {name} cannot be loaded in a rank: {file} is no Python source")
        module = importlib.util.module_from_spec(spec)
        # Before it runs: dataclasses and pickle look a class's module up by name.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    def _spec_of_file(self, name: str, file: str) -> Optional[ModuleSpec]:
        spec = self._rewriting.find_spec(name, [str(Path(file).parent)])
        if spec is not None and _same_file(spec.origin, file):
            return spec
        return importlib.util.spec_from_file_location(name, file)


def _leads_to(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        # A parent that is no package, or a module in sys.modules without a spec: the name leads nowhere.
        return False
    return spec is not None and _same_file(spec.origin, file)


def _same_file(first: Optional[str], second: str) -> bool:
    return first is not None and Path(first).resolve() == Path(second).resolve()
