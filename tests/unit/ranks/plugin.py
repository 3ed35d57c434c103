# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Sends the tests of DistributedTest classes to the ranks, and makes fixtures of DistributedFixture classes.

Both are recognized by an attribute, so that pytest imports torch and DeepSpeed only with the first test that does.
"""

import types
from typing import Any, Optional

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Optional[bool]:
    """Runs a DistributedTest's method on the ranks instead of here."""
    if not getattr(pyfuncitem.cls, "is_dist_test", False):
        return None
    pyfuncitem.instance.run_item(pyfuncitem)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: Any) -> None:
    """Registers a DistributedFixture class as the fixture of its name, for the module or class that holds it.

    pytest asks for every name of a module before it collects the classes in it, so the fixture is there in time.
    """
    if isinstance(obj, type) and getattr(obj, "is_dist_fixture", False) and name == obj.__name__:
        from unit.common import DistributedFixture, as_pytest_fixture
        if obj is not DistributedFixture:
            holder = types.ModuleType(obj.__module__)
            setattr(holder, name, as_pytest_fixture(obj))
            manager = collector.session._fixturemanager
            try:
                manager.parsefactories(holder=holder, node=collector)
            except TypeError:  # pytest before 9.1
                manager.parsefactories(holder, collector.nodeid)
